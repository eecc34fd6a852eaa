"""Scores completions: in child processes with limits, and with judges.

    pool        Job, Scorer, NotStarted: completions in, scores or failures out; ScoringPool: scoring in child
                processes, with limits (ScoringPatience); decides who is to blame if a job ends its process
    child       the child process
    frames      the messages between parent and child
    panel       Panel: judges that add to the task's own reward
    classifier  Classifier: a Hugging Face sequence classifier as a judge
    chat        ChatJudge: a model behind an OpenAI-compatible address as a judge

Only the classifier needs a tensor library.
"""

from shoal.rewards.pool import DirectScorer, Job, NotStarted, Scorer, ScoringPatience, ScoringPool

__all__ = ["DirectScorer", "Job", "NotStarted", "Scorer", "ScoringPatience", "ScoringPool"]
