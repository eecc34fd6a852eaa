"""The validator: checks every submission before it may be trained on, and computes its reward. Trusted.

settings   ValidatorSettings, Tolerances, ValidatorConfig
loop       run_validator, Validator: claim audits, judge, report
judge      Judge: verdicts on the submissions of one policy, with one batched prefill
checks     BEFORE_PREFILL, AFTER_PREFILL: every check, cheapest first, and the table of reason codes
case       Case, Finding: what a check sees and says
rewards    score_group, shuffled, Decoders: the reward, computed here and nowhere else
verdicts   Docket: findings to verdicts
"""

from shoal.validator.judge import Judge
from shoal.validator.loop import Validator, run_validator
from shoal.validator.settings import Tolerances, ValidatorConfig, ValidatorSettings

__all__ = ["Judge", "Tolerances", "Validator", "ValidatorConfig", "ValidatorSettings", "run_validator"]
