"""A case: everything that the checks of one submission may look at, and what a check finds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.engines import Prefill
from shoal.errors import CodecError
from shoal.protocol import CheckResult, Lease, Limits, Rollout, Severity, Submission, unpack
from shoal.validator.settings import Tolerances

MESSAGE_LIMIT = 500
GIB = 2**30
# The hub has enforced the run's own caps before it gave a receipt; these only bound this process's memory, and must
# never be the tighter ones: a body that the hub took is not malformed for being large.
BODY_LIMITS = Limits(compressed_bytes=GIB, inflated_bytes=4 * GIB)


@dataclass(frozen=True, eq=False)
class Case:
    """One submission under audit. The lease is the hub's signed word; the submission is only a claim.

    `submission` is None, and `problem` says why, if the body could not be decoded. `prefills` has one entry per
    rollout once the checks before the prefill have passed; with `hidden` in them, activation checks can join.
    """

    lease: Lease
    submission: Submission | None
    problem: str
    vocabulary_size: int
    tolerances: Tolerances
    prefills: tuple[Prefill, ...] = ()

    @property
    def claim(self) -> Submission:
        """The decoded submission; only for checks after the envelope's."""
        assert self.submission is not None, "the envelope check comes first"
        return self.submission

    @property
    def rollouts(self) -> list[Rollout]:
        return self.claim.rollouts

    def tokens(self) -> npt.NDArray[np.int64]:
        """The tokens of all rollouts, laid end to end."""
        return np.concatenate([rollout.token_ids for rollout in self.rollouts])

    def place(self, position: int) -> tuple[int, int]:
        """Which (rollout, token) a position of `tokens()` is."""
        for index, rollout in enumerate(self.rollouts):
            length = len(rollout.tokens) // 4
            if position < length:
                return index, position
            position -= length
        raise IndexError(position)


def open_case(lease: Lease, body: bytes, vocabulary_size: int, tolerances: Tolerances) -> Case:
    """Decode a body under the codec's caps; one that cannot be decoded makes a case too, for the envelope check."""
    submission, problem = None, ""
    try:
        submission = unpack(body, Submission, BODY_LIMITS)
    except CodecError as error:
        problem = str(error)
    return Case(lease, submission, problem, vocabulary_size, tolerances)


Evidence = float | int | str


@dataclass(frozen=True)
class Finding:
    """What one check found. A failure carries a stable reason code and how sure it is."""

    result: CheckResult
    reason: str = ""
    severity: Severity | None = None

    @property
    def passed(self) -> bool:
        return self.result.passed


def passed(check: str, **evidence: Evidence) -> Finding:
    return Finding(CheckResult(check=check, passed=True, evidence=_finite(evidence)))


def failed(reason: str, message: str, severity: Severity = Severity.CERTAIN, **evidence: Evidence) -> Finding:
    """A failed check; the part of `reason` before its first dot is the check's name."""
    check = reason.partition(".")[0]
    result = CheckResult(check=check, passed=False, evidence=_finite(evidence), message=message[:MESSAGE_LIMIT])
    return Finding(result, reason, severity)


def _finite(evidence: dict[str, Evidence]) -> dict[str, Evidence]:
    """JSON has no infinity and no NaN, and a verdict is signed JSON: such numbers become words."""
    return {
        key: str(value) if isinstance(value, float) and not np.isfinite(value) else value
        for key, value in evidence.items()
    }
