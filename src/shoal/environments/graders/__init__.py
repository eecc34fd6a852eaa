"""Graders score completions of one kind of task, by the text after the thinking. Here: their interface and their list.
Each is imported on first use: symbolic algebra takes a second."""

from typing import Protocol, runtime_checkable

from shoal.environments.protocol import Score
from shoal.errors import EnvironmentSetupError
from shoal.runtime.text import meant


@runtime_checkable
class Grader(Protocol):
    """Scores a completion against a task's `answer`: the verification info of its row, as JSON or plain text.

    The score depends on the arguments only. No completion can make it raise or hang. `ScoringFailure` means a failure
    of the machinery: a sandbox that does not start, an answer that `problem` refuses."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...  # part of every digest; raised when a score may change

    def problem(self, answer: str) -> str:
        """What is wrong with a task's answer, in a sentence, or empty. Cheap: it is called for every row."""
        ...

    def score(self, answer: str, completion: str) -> Score: ...


@runtime_checkable
class PatientGrader(Grader, Protocol):
    def clock_s(self, answer: str) -> float:
        """The clock time that these limits allow; the caller must wait that long."""
        ...


GRADERS = ("code", "exact", "mathematics", "math-verify", "choice")

TASK_TYPES = {"verifiable_math": "mathematics", "prime_rl_code": "code", "verifiable_code": "code"}
"""Task types of INTELLECT-2's data set and of SYNTHETIC-1 that can be graded."""


def grader(name: str) -> Grader:
    from shoal.environments.graders import choice

    match TASK_TYPES.get(name, name):
        case "code":
            from shoal.environments.graders.code import CodeGrader

            return CodeGrader()
        case "mathematics" | "math-verify" as kind:
            from shoal.environments.graders.mathematics.grader import MathematicsGrader, MathVerifyGrader

            return MathematicsGrader() if kind == "mathematics" else MathVerifyGrader()
        case "choice":
            return choice.ChoiceGrader()
        case "exact":
            return choice.ExactGrader()
    near = meant(name, [*GRADERS, *TASK_TYPES])
    raise EnvironmentSetupError(f"there is no grader {name!r}{near}; there are {', '.join(sorted(GRADERS))}")


OPENING, CLOSING = "<think>", "</think>"


def after_thinking(completion: str) -> str:
    """The text after the last `</think>`, up to another `<think>`. Without `</think>`: all of it, or nothing if it
    begins with `<think>`."""
    _thought, end, rest = completion.rpartition(CLOSING)
    if end:
        return rest.partition(OPENING)[0]
    return "" if completion.lstrip().startswith(OPENING) else completion
