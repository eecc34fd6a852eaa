"""Verdicts: what a validator found. The reward is computed here and nowhere else.

Branches: does tolerance buy reward? Where a token passes only by the tolerance, the validator decodes what the seed
gives instead, and scores both. Honest rounding does not know the reward, so the difference is as often negative as
positive. A worker that chose the branch that pays has more positive differences.

The evidence is the wealth of a gambler who bets on positive differences and begins with 1. If they are no likelier than
negative ones (up to `MARGIN`), the wealth exceeds 10⁶ at most once in 10⁶ gamblers, however long one plays and whenever
one looks (Ville's inequality). A part of the wealth is staked at each difference, so that a node that was honest for
long is found out as well: 1/2 at the first, 1/6 at the second, 1/(n(n+1)) at the nth; each part is spread evenly over
five sizes of bets. How many differences are looked for may depend on all that was seen before, so a second gambler, who
begins again with 1 whenever he has less (`recent`), says how many: who was honest for long is noticed as soon.

Evaluation while training: held-out tasks that validators answer with a published policy, slice by slice.

    hub ── EvaluationSlice (signed) ──► validator ── greedy completions, scores ──► EvaluationReport (signed) ──► hub
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from shoal.protocol.lease import MAX_GROUP, MAX_PROMPT_TOKENS, PRINTABLE, PROFILE, SamplingParameters
from shoal.protocol.policy import HEX_256, PolicyRef
from shoal.protocol.signing import Document, Message, Milliseconds, SignedDocument
from shoal.protocol.submission import ShownPrefix

BETS = (0.1, 0.2, 0.4, 0.6, 0.8)
MARGIN = 0.04  # 52 % of unequal pairs in favour of the submission are allowed
ENOUGH = 1e6  # the evidence that a strike needs
FORGOTTEN = 1e3  # below this evidence owners and newcomers are trusted again
LEAST_LOG = -700.0
LOOK_SHARE, FIRST_SHARE, FIRST_AUDITS = 0.011, 0.04, 50  # part of a node's tokens; in its first groups
RECENT_BET = 0.4


def look_share(audits: int, evidence: float) -> float:
    """The share of a node's tokens for which branches are decoded: about 1 % without suspicion, 4 % for new nodes, and
    all tokens from an evidence of 6 on. Over 1,000 honest groups the mean is 3 %."""
    base = FIRST_SHARE if audits < FIRST_AUDITS else LOOK_SHARE
    return float(min(1.0, base * min(100.0, max(1.0, evidence)) ** 2.5))


class Branches(Message):
    """Of `looked` branches, with `tokens` decoded tokens, those with another reward. A difference is reward(submitted)
    - reward(seed's branch) as a share of the range of the group's rewards, from -1 to 1."""

    looked: int = Field(default=0, ge=0, le=MAX_GROUP)
    tokens: int = Field(default=0, ge=0)
    differences: tuple[float, ...] = Field(default=(), max_length=MAX_GROUP)


class GainEvidence(Message):
    """The evidence that tolerance was used to gain reward: of a node, an owner, or all newcomers. `stakes`: logarithms
    of the stakes on each size of bet; 1/(differing + 1) is not staked yet. `recent` says where to look, not whom to
    strike.

    >>> round(GainEvidence().after([1.0]).value, 4)  # 1/2 is not staked, 1/2 has grown by 0.96 × 0.42 on average
    1.2016
    """

    differing: int = Field(default=0, ge=0)
    gained: float = Field(default=0.0, allow_inf_nan=False)
    stakes: tuple[float, ...] = Field(default=(LEAST_LOG,) * len(BETS), min_length=len(BETS), max_length=len(BETS))
    recent: float = Field(default=1.0, ge=1, le=ENOUGH)

    def after(self, differences: Iterable[float]) -> GainEvidence:
        """With further differences; equal rewards do not count."""
        count, gained, stakes, recent = self.differing, self.gained, list(self.stakes), self.recent
        for difference in differences:
            bounded = max(-1.0, min(1.0, difference))
            if bounded == 0.0:
                continue
            count, gained = count + 1, gained + bounded
            staked, outcome = -math.log(count * (count + 1)), bounded - MARGIN * abs(bounded)
            # log(exp(log) + exp(staked)), then what the bet has made of it
            sums = [max(log, staked) + math.log1p(math.exp(-abs(log - staked))) for log in stakes]
            stakes = [max(LEAST_LOG, s + math.log1p(bet * outcome)) for s, bet in zip(sums, BETS, strict=True)]
            recent = min(ENOUGH, max(1.0, recent * (1 + RECENT_BET * outcome)))
        return GainEvidence(differing=count, gained=gained, stakes=tuple(stakes), recent=recent)

    def without(self, part: float) -> GainEvidence:
        """Reduced by a factor: what a node was struck for does not count against others."""
        lower = tuple(max(LEAST_LOG, log - math.log(part)) for log in self.stakes)
        return self.model_copy(update={"stakes": lower})

    @property
    def value(self) -> float:
        staked = sum(math.exp(min(-LEAST_LOG, log)) for log in self.stakes) / len(BETS)
        return staked + 1 / (self.differing + 1)

    @property
    def suffices(self) -> bool:
        return self.value >= ENOUGH


MAX_REWARD = 1e6
Outcome = StrEnum("Outcome", "ACCEPTED REJECTED UNSURE")
"""Unsure: the check could not be made, so there is no credit, no training, no punishment."""
Severity = StrEnum("Severity", "CERTAIN STATISTICAL")
"""How sure a rejection is. A hard sanction needs one `CERTAIN` failure, or two `STATISTICAL` ones."""


class CheckResult(Message):
    """Whether the check passed, its numbers, and a message for the contributor if it did not."""

    check: str = Field(max_length=64)
    passed: bool
    evidence: dict[str, float | int | str] = Field(default={}, max_length=64)
    message: str = Field(default="", max_length=500)


# Bounded, so that no reward becomes an infinite advantage in float32.
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]


class RolloutReward(Message):
    value: Reward
    parts: dict[str, Reward] = Field(default={}, max_length=64)


class Sums(Message):
    """One channel of the evidence, in units of its noise: what was `seen`, what is `expected` of honest work at most,
    and the variance that a submission shares (`shoal.validator.evidence`)."""

    seen: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    expected: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    shared: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def plus(self, other: Sums) -> Sums:
        seen, expected, shared = self.seen + other.seen, self.expected + other.expected, self.shared + other.shared
        return Sums(seen=seen, expected=expected, shared=shared)


NOTHING = Sums()


class Tally(Message):
    """Sums of rounding errors that audits saw: of one submission, or of a node's recent submissions. `accidents` of the
    `proofs` were far off, as happens in coarse arithmetic; they count only in the channel of that name."""

    tokens: int = Field(default=0, ge=0)
    proofs: int = Field(default=0, ge=0)
    accidents: int = Field(default=0, ge=0)
    channels: dict[str, Sums] = Field(default={}, max_length=16)

    def plus(self, other: Tally) -> Tally:
        names = sorted({*self.channels, *other.channels})
        channels = {name: self.of(name).plus(other.of(name)) for name in names}
        tokens, proofs = self.tokens + other.tokens, self.proofs + other.proofs
        return Tally(tokens=tokens, proofs=proofs, accidents=self.accidents + other.accidents, channels=channels)

    def of(self, channel: str) -> Sums:
        return self.channels.get(channel, NOTHING)


Depth = Literal["full", "light", "progress"]
"""A light audit, for nodes with a long record, makes the checks that need no prefill, and computes the reward. An audit
of progress is of an unfinished rollout, as far as a node on probation has shown it."""


class Verdict(Document):
    """The result of an audit, signed by the validator. `reason` is a code such as `sampling.seed`. `unreproducible`:
    parts of the rewards that nobody else can compute. `unsure_rate`: how likely honest work of this kind and length is
    to be unsure. `measured`: the limits are of the worker's own kind."""

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


class TokenTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prefill saw at each token of a submission, all rollouts one after the other, as float16 (LE): the claimed
    log-probability minus the validator's; and how far the uniform lies inside the token's interval. NaN: not drawn."""

    gaps: bytes
    margins: bytes


class VerdictReport(Message):
    """Signed `Verdict`s, handled one by one in one transaction: a refused one does not stop the others. `traces`, by
    submission, are packed `TokenTrace`s in base64; they are for the records of the run only."""

    verdicts: tuple[SignedDocument, ...] = Field(min_length=1, max_length=MAX_VERDICTS_PER_REPORT)
    traces: dict[str, str] = Field(default={}, max_length=MAX_VERDICTS_PER_REPORT)


class RefusedVerdict(Message):
    submission: str
    status: int
    code: str
    message: str


class VerdictReply(Message):
    refused: tuple[RefusedVerdict, ...] = ()


class SubmissionBodies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In the order asked for (bulk)."""

    bodies: Annotated[list[bytes], msgspec.Meta(max_length=MAX_BODIES_PER_REQUEST)]


Readiness = Literal["no", "idle", "now", "only"]
"""Whether a validator evaluates: not now, if nothing waits for an audit, in any case, or nothing else."""


class AuditRequest(Message):
    """A validator asks for submissions to check, waiting up to `wait_s`. What it claimed before and neither judged nor
    names in `left` is given out again at once. `left`: audits to try later, and leases of its own that failed.
    `generates`: the kind of its engine, if it is ready to generate units that nobody could judge."""

    max_audits: int = Field(default=8, ge=1, le=256)
    wait_s: float = Field(default=0, ge=0, le=60)
    left: tuple[str, ...] = Field(default=(), max_length=4096)
    evaluate: Readiness = Field(default="no")
    generates: str = Field(default="", pattern=f"^$|{PROFILE}")


class Audit(Message):
    """One submission to check; its bytes are at `GET /submissions?name=…`. Each rollout must begin with what was
    `shown` of it. With the depth `progress` it is a lease at work: the shown tokens and proofs of one rollout. Of a
    `newcomer` one rollout is checked first. A `trusted` one was generated by a validator. `record` and `gains` are the
    evidence of its node so far, `look_share` the share of its tokens of which branches are decoded; `distrusted`: the
    evidence of its owner, or of newcomers, suffices."""

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
    """Submissions to check, and perhaps an `EvaluationSlice`; or none, and why. `generate` are leases of the validator
    itself, until it has answered them. `calibration` is in force; `wanted` are the kinds of workers that asked."""

    audits: tuple[Audit, ...] = ()
    waiting: str = ""
    finished: bool = False
    evaluation: SignedDocument | None = Field(default=None)
    generate: tuple[SignedDocument, ...] = Field(default=(), max_length=16)
    calibration: str = ""
    wanted: tuple[str, ...] = Field(default=(), max_length=64)


MAX_SLICE = 64


class EvaluationTask(Message):
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
    """What a slice came to: one score per task in order, None where scoring itself failed. Without scores `problem`
    says why the slice could not be done; somebody tries again."""

    kind: ClassVar[str] = "evaluation-report"
    run: str
    policy: PolicyRef
    first: int = Field(ge=0, le=2**31)
    environment_digest: str = Field(pattern=HEX_256)
    scores: tuple[Reward | None, ...] = Field(default=(), max_length=MAX_SLICE)
    problem: str = Field(default="", max_length=200, pattern=PRINTABLE)
    decided_at_ms: Milliseconds


class Evaluation(Message):
    """How a version does on the held-out tasks so far: `mean` of the `scored` ones of `tasks`. `complete`: no slice is
    still to come. `partial`: slices were given up, so the mean is not to be compared with those of other versions."""

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
