"""Tasks and rewards: what the policy is asked, and what its answer is worth.

    protocol   Task, Score, Environment: what everything here implements; ObjectingEnvironment: what one may add
    generated  GeneratedEnvironment: tasks computed from their index, none stored
    sort       SortEnvironment: put digits in order (the demo's task)
    addition   AdditionEnvironment: add two numbers
    function   FunctionEnvironment: a reward of your own, one Python file
    registry   EnvironmentSettings, ENVIRONMENTS, build

An environment needs no tensor library: the hub reads tasks from it, the validator scores with it, and both compare
its `digest` so that they cannot disagree about what is being trained.
"""

from shoal.environments.protocol import Environment, ObjectingEnvironment, Score, Split, Task
from shoal.environments.registry import ENVIRONMENTS, EnvironmentSettings, build

__all__ = [
    "ENVIRONMENTS", "Environment", "EnvironmentSettings", "ObjectingEnvironment", "Score", "Split", "Task", "build",
]  # fmt: skip
