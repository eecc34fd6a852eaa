"""Scores completions: in child processes with limits (`pool`, `child`, `frames`), and with judges (`panel`): a sequence
classifier (`classifier`, which alone needs a tensor library) or a model behind an address (`chat`)."""

from shoal.rewards.pool import DirectScorer, Job, NotStarted, Scorer, ScoringPatience, ScoringPool

__all__ = ["DirectScorer", "Job", "NotStarted", "Scorer", "ScoringPatience", "ScoringPool"]
