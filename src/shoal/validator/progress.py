"""Shown progress: what a node on probation showed of a group before it was finished, and what it submitted after that.

    lease at work   one rollout, as far as it was shown ─► form, dialogue ─► prefill ─► proofs, seeds ─► a verdict only
                    if it fails for certain: what is doubtful is judged when the group is finished
    submission      every rollout begins with what was shown of it, tokens and proofs (`progress`)

The audit of a lease at work has a submission in which one rollout has tokens and proofs, and nothing else has anything.
It claims no log-probabilities, so the validator's own take their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from shoal.protocol import Outcome, Severity, Verdict, pack_logprobs
from shoal.protocol.submission import pack_spans, shown_digest
from shoal.validator.case import Case, Finding, Replay, failed, passed

REASONS: Mapping[str, str] = {
    "shape": "progress.shape",
    "dialogue": "progress.dialogue",
    "proofs": "progress.proofs",
    "sampling": "progress.seed",
}
"""What a failed check of shown progress is called, by the check. Others are about the hub's own framing."""


def progress(case: Case) -> Finding:
    """Every rollout begins with what its node showed of it while it was generated."""
    for shown in case.shown:
        rollout = case.rollouts[shown.rollout]
        begins = shown_digest(rollout.tokens[: 4 * shown.tokens], rollout.proofs[: shown.proof_bytes])
        if begins != shown.digest:
            return failed(
                "progress.prefix",
                f"rollout {shown.rollout} does not begin with the {shown.tokens} tokens, or their proofs, that this "
                "node showed of it to keep its lease",
                rollout=shown.rollout,
                tokens=shown.tokens,
                shown=shown.digest,
                submitted=begins,
            )
    return passed("progress", rollouts=len(case.shown), tokens=sum(shown.tokens for shown in case.shown))


def unfinished(case: Case) -> Case:
    """The case of the only rollout that has tokens, under its own seed, ready for the checks before the prefill."""
    index = next(index for index, rollout in enumerate(case.rollouts) if rollout.tokens)
    rollout = msgspec.structs.replace(case.rollouts[index], logprobs=bytes(len(case.rollouts[index].tokens)))
    if case.dialogue is not None:
        spans = case.dialogue.read(rollout.token_ids.tolist(), whole=False).given
        rollout = msgspec.structs.replace(rollout, given=pack_spans(spans))
    lease = case.lease.model_copy(update={"seeds": (case.lease.seeds[index],)})
    return replace(case, lease=lease, submission=msgspec.structs.replace(case.claim, rollouts=[rollout]))


def talk(case: Case) -> Finding:
    """As far as the rollout goes, the tool's words are where its turns ask for them."""
    if case.dialogue is None:
        return passed("dialogue")
    reading = case.dialogue.read(case.rollouts[0].token_ids.tolist(), whole=False)
    if reading.problem:
        return failed(
            "dialogue.forged", f"after turn {reading.turns}, at token {reading.at}, is not what the tool says there",
            token=reading.at,
        )  # fmt: skip
    return passed("dialogue", given=sum(length for _, length in reading.given))


def replayed(case: Case, replay: Replay) -> Case:
    """The case with its prefill, whose log-probabilities nobody claimed otherwise."""
    rollout = msgspec.structs.replace(case.rollouts[0], logprobs=pack_logprobs(replay.logprobs))
    return replace(case, submission=msgspec.structs.replace(case.claim, rollouts=[rollout]), replay=replay)


def told(verdict: Verdict) -> Verdict | None:
    """What is said of shown progress: a certain failure, under a reason of its own, or nothing."""
    reason = REASONS.get(verdict.reason.partition(".")[0])
    if verdict.outcome is not Outcome.REJECTED or verdict.severity is not Severity.CERTAIN or reason is None:
        return None
    return verdict.model_copy(update={"reason": reason})
