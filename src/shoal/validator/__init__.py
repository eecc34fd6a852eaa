"""The validator: checks every submission before it may be trained on, and computes its reward. Trusted.

settings   ValidatorSettings, ValidatorConfig, profile_keys, measurable_kinds
calibrate  measure: the limits of one kind of worker; limits: Calibrator, which keeps them in force
profiles   Profile, load_profiles, to_toml: what honest rounding may explain, by what a worker generates with
loop       run_validator, Validator: claim audits, judge, report
judge      Judge: verdicts on the submissions of one policy, with one batched prefill, and a second look at what fails;
           recheck: once more, later
checks     BEFORE_PREFILL, AFTER_PREFILL: every check, cheapest first, and the table of reason codes
case       Case, Finding: what a check sees and says; replay_all: the prefill; SeenWork: so that copies show
canary     Canary: a known cheat now and then, which must be caught; SelfTest: the same before joining
rewards    Scoring, shuffled: the reward, computed here and nowhere else; Notebook: its notes, for the owner
side_jobs  SliceRunner, Generating, Ahead: what a validator does beside audits
verdicts   Docket: findings to verdicts
"""

from shoal.validator.judge import Judge
from shoal.validator.loop import Validator, run_validator
from shoal.validator.profiles import Profile, load_profiles
from shoal.validator.settings import ValidatorConfig, ValidatorSettings, measurable_kinds, profile_keys

__all__ = [
    "Judge", "Profile", "Validator", "ValidatorConfig", "ValidatorSettings", "load_profiles", "measurable_kinds",
    "profile_keys", "run_validator",
]  # fmt: skip
