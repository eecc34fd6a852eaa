"""The validator: checks every submission before it may be trained on, and computes its reward. Trusted.

settings, profiles    what it is told, and what it measures with; what rounding may explain, by kind of worker
calibrate, limits     measuring the limits of one kind of worker; keeping those of a run in force
loop, side_jobs       claim audits, judge, report; evaluate, generate and load ahead beside that
judge, verdicts       verdicts on the submissions of one policy, with one batched prefill and a second look
checks, case          every check, cheapest first, and the table of reason codes; what a check sees and says
rewards, branches     the reward, computed here and nowhere else; whether reward was bought with tolerance
canary                a known cheat now and then, which must be caught; the same before joining
"""

from shoal.validator.judge import Judge
from shoal.validator.loop import Validator, run_validator
from shoal.validator.profiles import Profile, load_profiles
from shoal.validator.settings import ValidatorConfig, ValidatorSettings, measurable_kinds, profile_keys

__all__ = [
    "Judge", "Profile", "Validator", "ValidatorConfig", "ValidatorSettings", "load_profiles", "measurable_kinds",
    "profile_keys", "run_validator",
]  # fmt: skip
