"""What a grader is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from shoal.environments.protocol import Score


@runtime_checkable
class Grader(Protocol):
    """Scores a completion against a task's `answer`: the verification info of its row, as text (JSON, or plain).

    Deterministic; of nothing but its arguments. A completion can make it give 0 and never make it raise or hang.
    `ScoringFailure` is for a failure of the machinery: a sandbox that does not start, an answer that `problem` refuses.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int:
        """Part of every digest; raised when a score may change."""
        ...

    def problem(self, answer: str) -> str:
        """What is wrong with a task's answer, in a sentence; empty if nothing is. Bad rows are found by it: cheap."""
        ...

    def score(self, answer: str, completion: str) -> Score: ...


@runtime_checkable
class PatientGrader(Grader, Protocol):
    """A grader that starts something with limits of its own, which it holds to by itself."""

    def clock_s(self, answer: str) -> float:
        """How long these limits let it take by the clock: whoever waits for a score must wait that long."""
        ...


@runtime_checkable
class DemandingGrader(Grader, Protocol):
    """A grader that needs something of the machine."""

    def prepare(self) -> None:
        """Whether this machine can score at all: an `EnvironmentSetupError` says what is missing."""
        ...
