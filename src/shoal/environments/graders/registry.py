"""Which graders there are. Each is imported when it is first needed: symbolic algebra takes a second to load."""

from __future__ import annotations

from shoal.environments.graders.protocol import Grader
from shoal.errors import EnvironmentSetupError
from shoal.runtime.text import meant

GRADERS = ("code", "exact", "mathematics", "math-verify", "choice", "instructions")

TASK_TYPES = {"verifiable_math": "mathematics", "prime_rl_code": "code", "verifiable_code": "code"}
"""What INTELLECT-2's data set and SYNTHETIC-1 call those of their kinds of tasks that can be judged."""


def grader(name: str) -> Grader:
    """The grader of that name, or of that task type."""
    match TASK_TYPES.get(name, name):
        case "code":
            from shoal.environments.graders.code import CodeGrader

            return CodeGrader()
        case "mathematics":
            from shoal.environments.graders.mathematics import MathematicsGrader

            return MathematicsGrader()
        case "math-verify":
            from shoal.environments.graders.mathematics import MathVerifyGrader

            return MathVerifyGrader()
        case "instructions":
            from shoal.environments.graders.instructions import InstructionsGrader

            return InstructionsGrader()
        case "choice" | "exact" as plain:
            from shoal.environments.graders.choice import ChoiceGrader, ExactGrader

            return ChoiceGrader() if plain == "choice" else ExactGrader()
    near = meant(name, [*GRADERS, *TASK_TYPES])
    raise EnvironmentSetupError(f"there is no grader {name!r}{near}; there are {', '.join(sorted(GRADERS))}")
