"""What a decision asks for: commands, applied in the transaction its rows came from, or a refusal."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from shoal.errors import HubRefused
from shoal.hub.state.rows import (
    EvaluationRow,
    LeaseRow,
    Moment,
    NodeRow,
    ShownRow,
    SubmissionRow,
    TaskRow,
    TraceRow,
    UnitRow,
)
from shoal.protocol import Batch, PolicyRef, SignedDocument


class Refusal(HubRefused):
    """An HTTP status, a stable code for programs, a sentence for people; after how many seconds to ask again; the hub's
    signed time for clocks that are off it."""

    def __init__(
        self, status: int, code: str, sentence: str, retry_after_s: int | None = None,
        clock: SignedDocument | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, code, sentence)
        self.sentence, self.retry_after_s, self.clock = sentence, retry_after_s, clock


R = TypeVar("R", UnitRow, LeaseRow, SubmissionRow, NodeRow, EvaluationRow)


@dataclass(frozen=True)
class Save(Generic[R]):
    """The whole new row, and the state that the old one had (`was`; None: a new row). Storage writes only over a
    row that still is in that state: two hubs on one database cannot both make a move."""

    row: R
    was: StrEnum | None


@dataclass(frozen=True)
class AddPolicy:
    policy: PolicyRef
    announced_at_ms: int


@dataclass(frozen=True)
class AddBatch:
    batch: Batch


@dataclass(frozen=True)
class AddVerdict:
    submission: str
    document: str


@dataclass(frozen=True)
class RaiseAlarm:
    step: int
    code: str
    message: str
    at_ms: int


def alarm(moment: Moment, code: str, message: str) -> RaiseAlarm:
    step = moment.progress.next_step
    return RaiseAlarm(step, code, f"step {step}: {message}", moment.now_ms)


@dataclass(frozen=True)
class Record:
    kind: str
    body: dict[str, Any]
    at_ms: int


Command: TypeAlias = Save[Any] | TaskRow | AddPolicy | AddBatch | AddVerdict | ShownRow | TraceRow | RaiseAlarm | Record
"""A row without a state is its own command: a task's is written over whatever it was, only with a batch."""
