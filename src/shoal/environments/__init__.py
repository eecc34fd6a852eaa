"""Tasks and rewards: what the policy is asked, and what its answer is worth.

    protocol   Task, Score, Environment: what everything here implements; what one may add
    settings   EnvironmentSettings: the [environment] section of a recipe, with its tables
    generated  tasks computed from their index: SortEnvironment (the demo's), AdditionEnvironment, CalculatorEnvironment
    gym        GymEnvironment: the generators of reasoning-gym, by name, made safe to train on
    mix        MixedEnvironment: several environments with weights
    questions  whether two prompts are the same question; what one part of a mixture holds out, no part trains on
    dataset    DatasetEnvironment: tasks from Parquet or JSON lines, of any size
    data/      how data sets are found, read, scanned, checked and split
    formats    how a row becomes a task: the described schema, question and answer, AIME, LiveCodeBench, GPQA
    function   FunctionEnvironment: a reward of your own, one Python file
    graders/   what a completion of one kind of task is worth: mathematics, code, …
    tools      what answers a model's turn, where an environment has several
    composed   Composed: an environment with how it is asked and what else counts; LengthBudget: a target per unit
    registry   ENVIRONMENTS, build

An environment needs no tensor library: the hub reads tasks from it, the validator scores with it, and both compare
its `digest` so that they cannot disagree about what is being trained.
"""

from shoal.environments.composed import budget_of, judges_of, prompt_settings_of, scoring_of
from shoal.environments.mix import dialogue_of, has_dialogues
from shoal.environments.protocol import DialogueRule, Environment, Identity, Score, Split, Task, identity_of
from shoal.environments.protocol import require_scoring as require_scoring
from shoal.environments.registry import ENVIRONMENTS, build
from shoal.environments.settings import EnvironmentSettings

__all__ = [
    "ENVIRONMENTS", "DialogueRule", "Environment", "EnvironmentSettings", "Identity", "Score",
    "Split", "Task", "budget_of", "build", "dialogue_of", "has_dialogues", "identity_of", "judges_of",
    "prompt_settings_of", "require_scoring", "scoring_of",
]  # fmt: skip
