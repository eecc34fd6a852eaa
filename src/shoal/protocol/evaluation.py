"""Evaluation while training: held-out tasks that validators answer with a published policy, slice by slice.

hub ── EvaluationSlice (signed) ──► validator ── greedy completions, scores ──► EvaluationReport (signed) ──► hub
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shoal.protocol.lease import MAX_PROMPT_TOKENS, PRINTABLE, SamplingParameters
from shoal.protocol.policy import HEX_256, PolicyRef
from shoal.protocol.signing import Document, Message, Milliseconds
from shoal.protocol.verdict import Reward

MAX_SLICE = 64


class EvaluationTask(Message):
    """One held-out task: its id, and the very tokens that the policy is asked with."""

    task: str = Field(max_length=256)
    prompt_ids: tuple[int, ...] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)


class EvaluationSlice(Document):
    """Held-out tasks from number `first` on, for one validator until the deadline: answer each greedily by `policy`."""

    kind: ClassVar[str] = "evaluation-slice"
    run: str
    policy: PolicyRef
    first: int = Field(ge=0)
    tasks: tuple[EvaluationTask, ...] = Field(max_length=MAX_SLICE)
    sampling: SamplingParameters
    environment_digest: str = Field(pattern=HEX_256)
    deadline_ms: Milliseconds


class EvaluationReport(Document):
    """What a slice came to, signed by the validator: one score per task in order, None where scoring itself failed.

    Without scores `problem` says why the slice could not be done; somebody tries again.
    """

    kind: ClassVar[str] = "evaluation-report"
    run: str
    policy: PolicyRef
    first: int = Field(ge=0, le=2**31)
    environment_digest: str = Field(pattern=HEX_256)
    scores: tuple[Reward | None, ...] = Field(default=(), max_length=MAX_SLICE)
    problem: str = Field(default="", max_length=200, pattern=PRINTABLE)
    decided_at_ms: Milliseconds


class Evaluation(Message):
    """How a version does on the held-out tasks, as far as that is known: `mean` of the `scored` ones of `tasks`.

    `complete`: no slice of it is still to come. `partial`: slices of it were given up, so that the mean is of other
    tasks than those of other versions, and not to be compared with theirs. Tasks that could not be scored are no
    sample, and are not in the mean.
    """

    policy: PolicyRef
    tasks: int
    scored: int
    mean: float | None = None
    complete: bool = False
    partial: bool = False
    decided_at_ms: Milliseconds = 0


class EvaluationPage(Message):
    """The newest evaluations, oldest first; of each version that of its newest incarnation."""

    evaluations: tuple[Evaluation, ...] = ()
