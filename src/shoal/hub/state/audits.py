"""Audits: who checks what, until when, and what a verdict changes.

    received ─ claim ─► auditing ─ verdict ─► accepted ─► credit; unit accepted, dropped (equal rewards) or void (stale)
       ▲                   │                  rejected ─► strike, perhaps a ban; unit open again
       └── claim ran out ──┘                  inconclusive ─► nothing for anybody; unit open again

The first verdict on a submission stands. The same outcome again, also from another validator, is harmless.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from shoal.hub.state import nodes, pacing
from shoal.hub.state.commands import AddVerdict, Command, Record, SaveNode, SaveSubmission, SaveUnit
from shoal.hub.state.machines import DECIDED_SUBMISSIONS, SubmissionState, UnitState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rows import Holding, Moment, NodeRow, Rules, SubmissionRow, UnitRow
from shoal.hub.state.units import VOID_STALE, fail, refill_alarm
from shoal.ledger import credit_for
from shoal.protocol import Outcome, RolloutReward, Verdict


def expire(submissions: Sequence[SubmissionRow], now_ms: int) -> list[Command]:
    """Put back what a validator claimed and did not judge in time."""
    return [_put_back(row) for row in submissions if _is_claimed(row) and (row.claimed_until_ms or 0) <= now_ms]


def abandon(submissions: Sequence[SubmissionRow], validator: str, left: Container[str]) -> list[Command]:
    """Put back what a validator that asks for more claimed before: it has lost it, but for those `left` for later."""
    return [
        _put_back(row)
        for row in submissions
        if _is_claimed(row) and row.validator == validator and row.submission not in left
    ]


def _is_claimed(row: SubmissionRow) -> bool:
    return row.state == SubmissionState.AUDITING


def _put_back(row: SubmissionRow) -> SaveSubmission:
    return SaveSubmission(row.to(SubmissionState.RECEIVED, validator=None, claimed_until_ms=None), row.state)


def claim(moment: Moment, waiting: Sequence[SubmissionRow], validator: str, count: int) -> list[SaveSubmission]:
    """Give up to `count` received submissions to a validator, lowest unit first: batches need those first."""
    free = sorted((row for row in waiting if row.state == SubmissionState.RECEIVED), key=lambda row: row.unit)
    until_ms = moment.now_ms + moment.rules.audit_ms
    return [
        SaveSubmission(row.to(SubmissionState.AUDITING, validator=validator, claimed_until_ms=until_ms), row.state)
        for row in free[:count]
    ]


@dataclass(frozen=True)
class Case:
    """All that a verdict may touch: the submission, its unit, its node, and the leases that the node holds."""

    submission: SubmissionRow
    unit: UnitRow
    node: NodeRow
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True)
class Ruling:
    """A verdict, who gave it, and its signed form."""

    verdict: Verdict
    validator: str
    document: str


def judge(moment: Moment, case: Case, ruling: Ruling) -> list[Command]:
    """Apply a verdict."""
    verdict, submission = ruling.verdict, case.submission
    _require_fitting(moment.rules, case, verdict)
    if submission.state in DECIDED_SUBMISSIONS:
        if submission.state.value == verdict.outcome.value:
            return []
        raise Refusal(
            409, "verdict.decided", f"submission {submission.submission[:16]}… is {submission.state.value} already"
        )
    decided = submission.to(
        SubmissionState(verdict.outcome.value),
        validator=ruling.validator,
        claimed_until_ms=None,
        rewards=tuple(reward.value for reward in verdict.rewards),
        generated_tokens=verdict.generated_tokens if verdict.outcome == Outcome.ACCEPTED else 0,
        reason=verdict.reason,
        message=verdict.message,
        decided_at_ms=moment.now_ms,
    )
    commands: list[Command] = [
        SaveSubmission(decided, submission.state),
        AddVerdict(submission.submission, ruling.document),
    ]
    if verdict.outcome == Outcome.ACCEPTED:
        return commands + _accept(moment, case, ruling)
    if verdict.outcome == Outcome.REJECTED:
        return commands + _reject(moment, case, ruling)
    counted = replace(case.node, inconclusive=case.node.inconclusive + 1)
    return [*commands, SaveNode(counted, case.node.state), *(fail(moment, [case.unit]) if _is_current(case) else [])]


def _require_fitting(rules: Rules, case: Case, verdict: Verdict) -> None:
    if (verdict.unit, verdict.node) != (case.submission.unit, case.submission.node):
        raise Refusal(422, "verdict.mismatch", "the verdict names another unit or node than its submission")
    if verdict.outcome != Outcome.ACCEPTED:
        return
    if len(verdict.rewards) != rules.group_size:
        raise Refusal(
            422, "verdict.rewards", f"{len(verdict.rewards)} rewards for a group of {rules.group_size} rollouts"
        )
    if not 0 <= verdict.generated_tokens <= rules.group_size * rules.max_new_tokens:
        raise Refusal(422, "verdict.tokens", f"{verdict.generated_tokens} generated tokens are impossible for this run")


def _accept(moment: Moment, case: Case, ruling: Ruling) -> list[Command]:
    verdict, node, progress = ruling.verdict, case.node, moment.progress
    credit = credit_for(verdict.generated_tokens)
    paid = replace(node, accepted=node.accepted + 1, credit=node.credit + credit)
    body = {
        "node": node.node,
        "unit": case.submission.unit,
        "submission": case.submission.submission,
        "tokens": verdict.generated_tokens,
        "credit": credit,
        "validator": ruling.validator,
    }
    commands: list[Command] = [SaveNode(paid, node.state), Record("credit", body, moment.now_ms)]
    unit = case.unit
    if not _is_current(case):
        return commands  # the unit is void meanwhile; the work was done, so its credit stays
    if pacing.is_stale(moment.rules, progress.next_step, case.submission.version):
        return [*commands, SaveUnit(unit.to(UnitState.VOID, reason=VOID_STALE), unit.state)]
    if has_equal_rewards(verdict.rewards):
        dropped = unit.to(UnitState.DROPPED, lost_step=progress.next_step, reason="equal rewards")
        after = replace(progress, dropped=progress.dropped + 1)
        return [*commands, SaveUnit(dropped, unit.state), *refill_alarm(replace(moment, progress=after))]
    return [*commands, SaveUnit(unit.to(UnitState.ACCEPTED), unit.state)]


def _reject(moment: Moment, case: Case, ruling: Ruling) -> list[Command]:
    verdict = ruling.verdict
    body = {
        "node": case.node.node,
        "unit": case.submission.unit,
        "submission": case.submission.submission,
        "reason": verdict.reason,
        "severity": verdict.severity.value if verdict.severity else "",
        "validator": ruling.validator,
    }
    return [
        Record("rejected", body, moment.now_ms),
        *nodes.reject(case.node, verdict, case.holdings, moment.now_ms),
        *([SaveUnit(case.unit.reopened(), case.unit.state)] if _is_current(case) else []),  # the node failed, not it
    ]


def _is_current(case: Case) -> bool:
    return case.unit.state == UnitState.SUBMITTED and case.unit.submission == case.submission.submission


def has_equal_rewards(rewards: Sequence[RolloutReward]) -> bool:
    """Whether a group teaches nothing: the task's part of the reward (else the whole) is the same everywhere.

    A length bonus may differ while the task's answer does not; such a group is dropped all the same. A group of one
    rollout has nothing to compare with and is kept.
    """
    values = {reward.parts.get("task", reward.value) for reward in rewards}
    return len(rewards) > 1 and len(values) == 1
