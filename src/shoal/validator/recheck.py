"""Judging again what was accepted: the same checks on the kept bytes, against the verdict that was signed then.

A difference means that the validator of then, or this machine, is wrong. What this machine cannot decide (another
number format, a judge that does not answer) is unknown, and proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.engines.shelf import LoadedPolicy
from shoal.protocol import Audit, Lease, Outcome, SignedDocument, Verdict, submission_digest
from shoal.validator.judge import Judge
from shoal.validator.verdicts import Docket

REWARD_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Kept:
    """An accepted submission: the verdict on it, its signed lease, and its bytes."""

    verdict: Verdict
    lease: SignedDocument
    body: bytes


@dataclass(frozen=True)
class Rechecked:
    state: Literal["same", "different", "unknown"]
    sentence: str


def recheck(judge: Judge, kept: Kept, loaded: LoadedPolicy) -> Rechecked:
    """Judge it fully, whatever depth it was audited with then, and compare outcome, tokens and rewards."""
    then, lease = kept.verdict, Lease.model_validate(kept.lease.document, extra="ignore")
    if submission_digest(kept.body) != then.submission:
        return Rechecked("different", "the kept bytes are not those that the verdict names")
    if (lease.run, lease.unit, lease.node) != (then.run, then.unit, then.node):
        return Rechecked("different", "the lease is of another unit or node than the verdict")
    audit = Audit(
        submission=then.submission, size_bytes=len(kept.body), lease=kept.lease, received_at_ms=0, deadline_ms=0
    )
    verdicts = judge.verdicts([Docket(audit, lease, kept.body)], loaded)
    if not verdicts or verdicts[0].outcome is Outcome.UNSURE:
        why = f"{verdicts[0].reason}: {verdicts[0].message}" if verdicts else "its reward could not be computed"
        return Rechecked("unknown", f"this machine cannot decide about it ({why})")
    return _compared(then, verdicts[0])


def _compared(then: Verdict, now: Verdict) -> Rechecked:
    if (now.outcome, now.generated_tokens) != (then.outcome, then.generated_tokens):
        reason = f" ({now.reason}: {now.message})" if now.reason else ""
        return Rechecked(
            "different",
            f"it was {then.outcome.value} with {then.generated_tokens} tokens, and is {now.outcome.value} with "
            f"{now.generated_tokens}{reason}",
        )
    if then.unreproducible != now.unreproducible:
        said, found = (", ".join(each.unreproducible) or "none" for each in (then, now))
        return Rechecked("different", f"rewards that nobody can compute again: it named {said}, and there are {found}")
    if now.unreproducible:
        return Rechecked(
            "unknown", f"its rewards cannot be computed again: {now.unreproducible[0]}; the rest is the same"
        )
    rewards = [(one.value, other.value) for one, other in zip(then.rewards, now.rewards, strict=False)]
    if len(then.rewards) != len(now.rewards) or any(abs(one - other) > REWARD_TOLERANCE for one, other in rewards):
        return Rechecked("different", "its rewards are others now")
    return Rechecked("same", f"{then.outcome.value}, {then.generated_tokens} tokens, the same rewards")
