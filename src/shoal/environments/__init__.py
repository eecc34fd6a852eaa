"""Tasks and rewards: what the policy is asked, and what its answer is worth.

    settings   ─► registry: generated, gym, dataset (data/, formats) or function ─► mix ─► Composed
    graders/   what a completion of one kind of task is worth: mathematics, code in a sandbox/, a choice
    tools      what answers a model's turn, where an environment has several

An environment needs no tensor library: the hub reads tasks from it, the validator scores with it, and both compare
its `digest` so that they cannot disagree about what is being trained.
"""

from shoal.environments.mix import columns_of, dialogue_of, has_dialogues
from shoal.environments.protocol import DialogueRule, Environment, Identity, Score, Split, Task, identity_of
from shoal.environments.protocol import require_scoring as require_scoring
from shoal.environments.registry import ENVIRONMENTS, build, runs_own_code
from shoal.environments.settings import EnvironmentSettings, budget_of, judges_of, prompt_settings_of, scoring_of

__all__ = [
    "ENVIRONMENTS", "DialogueRule", "Environment", "EnvironmentSettings", "Identity", "Score",
    "Split", "Task", "budget_of", "build", "columns_of", "dialogue_of", "has_dialogues", "identity_of", "judges_of",
    "prompt_settings_of", "require_scoring", "runs_own_code", "scoring_of",
]  # fmt: skip
