"""Verdicts: what a validator found. The reward is computed here and nowhere else."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from shoal.protocol.branches import LOOK_SHARE, Branches, GainEvidence
from shoal.protocol.lease import MAX_GROUP, PROFILE
from shoal.protocol.policy import HEX_256
from shoal.protocol.signing import Document, Message, Milliseconds, SignedDocument
from shoal.protocol.submission import ShownPrefix

MAX_REWARD = 1e6


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNSURE = "unsure"  # the check could not be made: no credit, no training, no punishment


class Severity(StrEnum):
    """How sure a rejection is. A hard sanction needs one `CERTAIN` failure, or two `STATISTICAL` ones."""

    CERTAIN = "certain"
    STATISTICAL = "statistical"


class CheckResult(Message):
    """One check: whether it held, the numbers it saw, and a sentence for the contributor if it did not."""

    check: str = Field(max_length=64)
    passed: bool
    evidence: dict[str, float | int | str] = Field(default={}, max_length=64)
    message: str = Field(default="", max_length=500)


# Bounded so that no reward, however it came about, turns into an infinite advantage in float32.
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]


class RolloutReward(Message):
    """The validator's reward for one rollout, with its parts."""

    value: Reward
    parts: dict[str, Reward] = Field(default={}, max_length=64)


class Sums(Message):
    """One channel of the evidence, in units of its noise: what was `seen`, what is `expected` of honest work at most,
    and the variance of what a submission shares (see `shoal.validator.evidence`)."""

    seen: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    expected: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    shared: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def plus(self, other: Sums) -> Sums:
        return Sums(
            seen=self.seen + other.seen, expected=self.expected + other.expected, shared=self.shared + other.shared
        )


NOTHING = Sums()


class Tally(Message):
    """What audits saw of rounding, in sums: of one submission, or of what a node handed in recently.

    `accidents` of the `proofs` parts of rollouts (the tokens of one proof each) were quite wrong, as happens in coarse
    arithmetic now and then; they count in the channel of that name and nowhere else.
    """

    tokens: int = Field(default=0, ge=0)
    proofs: int = Field(default=0, ge=0)
    accidents: int = Field(default=0, ge=0)
    channels: dict[str, Sums] = Field(default={}, max_length=16)

    def plus(self, other: Tally) -> Tally:
        names = sorted({*self.channels, *other.channels})
        return Tally(
            tokens=self.tokens + other.tokens,
            proofs=self.proofs + other.proofs,
            accidents=self.accidents + other.accidents,
            channels={name: self.of(name).plus(other.of(name)) for name in names},
        )

    def of(self, channel: str) -> Sums:
        return self.channels.get(channel, NOTHING)


Depth = Literal["full", "light", "progress"]
"""A light audit makes every check that needs no prefill, and computes the reward; for nodes with a long record. An
audit of progress is of a rollout that is not finished: what a node on probation showed of it."""


class Verdict(Document):
    """The result of an audit, signed by the validator. `reason` is a stable code such as `sampling.seed`.

    It names the environment that it was scored with. `unreproducible` are the parts of the rewards that nobody else can
    compute again: the word of a judge. `unsure_rate` is how likely honest work of this kind and length is to be unsure.
    `calibration` is the lease's: what the limits were; `measured`, whether they are of the worker's very kind.
    """

    kind: ClassVar[str] = "verdict"
    run: str
    submission: str = Field(pattern=HEX_256)
    unit: int
    node: str
    outcome: Outcome
    reason: str = Field(default="", max_length=64)
    severity: Severity | None = None
    message: str = Field(default="", max_length=500)
    checks: tuple[CheckResult, ...] = ()
    rewards: tuple[RolloutReward, ...] = ()
    generated_tokens: int = 0
    depth: Depth = "full"
    tally: Tally = Tally()
    branches: Branches = Branches()
    decided_at_ms: Milliseconds
    environment: str = Field(default="", max_length=256)
    environment_version: int = Field(default=0, ge=0)
    environment_digest: str = Field(default="", max_length=64)
    data_digest: str = Field(default="", max_length=64)
    unreproducible: tuple[str, ...] = Field(default=(), max_length=64)
    unsure_rate: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    calibration: str = Field(default="", pattern=rf"^$|{HEX_256}")
    measured: bool = True


MAX_VERDICTS_PER_REPORT = 64
MAX_BODIES_PER_REQUEST = 64


class VerdictReport(Message):
    """Signed `Verdict`s, taken one by one in one transaction: a refused one does not hold up the others."""

    verdicts: tuple[SignedDocument, ...] = Field(min_length=1, max_length=MAX_VERDICTS_PER_REPORT)


class RefusedVerdict(Message):
    """A verdict that was not taken: the status and code that it would have got alone, and a sentence."""

    submission: str
    status: int
    code: str
    message: str


class VerdictReply(Message):
    refused: tuple[RefusedVerdict, ...] = ()


class SubmissionBodies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes of several submissions in the order asked for (bulk)."""

    bodies: Annotated[list[bytes], msgspec.Meta(max_length=MAX_BODIES_PER_REQUEST)]


Readiness = Literal["no", "idle", "now", "only"]
"""Whether a validator evaluates: never, when nothing waits to be checked, even if something does, or that alone now."""


class AuditRequest(Message):
    """A validator asks for submissions to check, waiting up to `wait_s` for one.

    What it claimed before and neither judged nor names in `left` is given out again at once: the answer with it was
    lost, or the validator was killed. `left` are those that it means to try later, when their claim has run out; and
    leases of its own that it could not generate. `generates` is the kind of its engine (`engine/device/number format`),
    if it is ready to generate units that nobody could judge.
    """

    max_audits: int = Field(default=8, ge=1, le=256)
    wait_s: float = Field(default=0, ge=0, le=60)
    left: tuple[str, ...] = Field(default=(), max_length=4096)
    evaluate: Readiness = Field(default="no")
    generates: str = Field(default="", pattern=f"^$|{PROFILE}")


class Audit(Message):
    """One submission to check: its bytes are at `GET /submissions?name=…`; `record` is its node's recent record.

    `shown` is what its node showed of it while it was generated: each rollout must begin with that. With the depth
    `progress` it is a lease at work: a `Submission` with the shown tokens and proofs of one rollout, and nothing else.
    Of a `newcomer` one rollout is checked first, and the others only if that one does not fail for certain. A `trusted`
    one was generated by a validator: it has no kind to be judged by. `gains` is the evidence so far that its node
    bought reward by tolerance, `look_share` the share of its tokens of which branches are decoded; `distrusted` is set
    while the evidence of its owner's nodes, or of newer nodes, suffices.
    """

    submission: str
    size_bytes: int
    lease: SignedDocument
    received_at_ms: Milliseconds
    deadline_ms: Milliseconds
    depth: Depth = "full"
    record: Tally = Tally()
    shown: tuple[ShownPrefix, ...] = Field(default=(), max_length=MAX_GROUP)
    newcomer: bool = False
    trusted: bool = False
    gains: GainEvidence = GainEvidence()
    look_share: float = Field(default=LOOK_SHARE, ge=0, le=1)
    distrusted: Literal["", "its owner", "newcomers"] = ""


class AuditReply(Message):
    """Submissions to check, and perhaps a slice of an evaluation (`EvaluationSlice`); or none, and why.

    `generate` are leases of the validator itself: units to generate and hand in like a worker. Those that it has and
    has not answered come again with each reply.
    `calibration` is the one in force; `wanted` are the kinds of the workers that asked for work.
    """

    audits: tuple[Audit, ...] = ()
    waiting: str = ""
    finished: bool = False
    evaluation: SignedDocument | None = Field(default=None)
    generate: tuple[SignedDocument, ...] = Field(default=(), max_length=16)
    calibration: str = ""
    wanted: tuple[str, ...] = Field(default=(), max_length=64)
