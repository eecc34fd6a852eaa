"""Which graders there are. Each is imported when it is first needed: symbolic algebra takes a second to load."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from shoal.environments.graders.protocol import Grader
from shoal.errors import EnvironmentSetupError


def _exact() -> Grader:
    from shoal.environments.graders.exact import ExactGrader

    return ExactGrader()


def _mathematics() -> Grader:
    from shoal.environments.graders.mathematics import MathematicsGrader

    return MathematicsGrader()


def _math_verify() -> Grader:
    from shoal.environments.graders.mathematics import MathVerifyGrader

    return MathVerifyGrader()


def _choice() -> Grader:
    from shoal.environments.graders.choice import ChoiceGrader

    return ChoiceGrader()


def _instructions() -> Grader:
    from shoal.environments.graders.instructions import InstructionsGrader

    return InstructionsGrader()


def _code() -> Grader:
    from shoal.environments.graders.code import CodeGrader

    return CodeGrader()


GRADERS: dict[str, Callable[[], Grader]] = {
    "code": _code,
    "exact": _exact,
    "mathematics": _mathematics,
    "math-verify": _math_verify,
    "choice": _choice,
    "instructions": _instructions,
}

TASK_TYPES = {"verifiable_math": "mathematics", "prime_rl_code": "code", "verifiable_code": "code"}
"""What INTELLECT-2's data set and SYNTHETIC-1 call those of their kinds of tasks that can be judged."""


def grader(name: str) -> Grader:
    """The grader of that name, or of that task type."""
    known = TASK_TYPES.get(name, name)
    if known not in GRADERS:
        close = get_close_matches(known, [*GRADERS, *TASK_TYPES], n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise EnvironmentSetupError(f"there is no grader {name!r}{meant}; there are {', '.join(sorted(GRADERS))}")
    return GRADERS[known]()
