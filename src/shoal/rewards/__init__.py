"""What completions are worth, computed: scoring in processes with limits, length budgets, judges, and their sum.

    protocol    Job, Scorer, NotStarted: completions in, scores or failures out; ScoringPatience
    pool        ScoringPool: in processes of their own, with limits; who is to blame for a job that ends its process
    child       what runs in it
    frames      what the two say to each other
    panel       Panel: judges beside the task's own reward, and how their words count
    classifier  Classifier: a Hugging Face sequence classifier, run here
    chat        ChatJudge: a model behind an OpenAI-compatible address

Needs no tensor library unless a classifier is asked for.
"""

from shoal.rewards.pool import ScoringPool
from shoal.rewards.protocol import DirectScorer, Job, NotStarted, Scorer, ScoringPatience

__all__ = ["DirectScorer", "Job", "NotStarted", "Scorer", "ScoringPatience", "ScoringPool"]
