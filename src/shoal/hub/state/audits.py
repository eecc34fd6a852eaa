"""Audits: who checks what, until when, and what a verdict changes.

    received ─ claim ─► auditing ─ verdict ─► accepted ─► credit; unit accepted, dropped (equal rewards) or void (stale)
       ▲                   │                  rejected ─► strike, perhaps a ban; unit open again; see `pulls`
       └── claim ran out ──┘                  unsure ─► nothing for anybody; unit open again

The first verdict on a submission stands. The same outcome again, also from another validator, is harmless. What is to
be audited fully cannot be accepted after a light audit; it can be rejected, for a failed check is a failed check.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from shoal.hub.state import credits, gains, nodes, pacing, pulls, reputation, windows
from shoal.hub.state.commands import AddVerdict, Command, Record, SaveNode, SaveSubmission, SaveUnit
from shoal.hub.state.machines import UNDECIDED_SUBMISSIONS, SubmissionState, UnitState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rewards import has_equal_rewards, pass_rate
from shoal.hub.state.rows import Holding, Moment, NodeRow, Rules, SubmissionRow, UnitRow
from shoal.hub.state.units import VOID_STALE, fail, refill_alarm
from shoal.protocol import Outcome, Tally, Verdict, document_hash


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
    """All that a verdict may touch: the submission, its unit, its node, the leases that the node holds, and what else
    it has at stake."""

    submission: SubmissionRow
    unit: UnitRow
    node: NodeRow
    holdings: tuple[Holding, ...] = ()
    stake: pulls.Stake = field(default_factory=pulls.Stake)


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
    if submission.state not in UNDECIDED_SUBMISSIONS:
        return _judge_again(submission, verdict)
    case = replace(case, node=gains.counted(case.node, verdict))
    accepted = verdict.outcome == Outcome.ACCEPTED
    decided = submission.to(
        SubmissionState(verdict.outcome.value),
        validator=ruling.validator,
        claimed_until_ms=None,
        rewards=tuple(reward.value for reward in verdict.rewards),
        generated_tokens=verdict.generated_tokens if accepted else 0,
        reason=verdict.reason,
        message=verdict.message,
        decided_at_ms=moment.now_ms,
        depth=verdict.depth,
        matures_at_ms=credits.matures_at_ms(moment) if accepted else None,
        pass_rate=pass_rate(verdict.rewards) if accepted else None,
    )
    commands: list[Command] = [
        SaveSubmission(decided, submission.state),
        AddVerdict(submission.submission, ruling.document),
    ]
    if accepted:
        return commands + _accept(moment, case, decided, ruling)
    if verdict.outcome == Outcome.REJECTED:
        return commands + _reject(moment, case, ruling)
    record = reputation.of_late(case.node.record.plus(verdict.tally))  # so that accidents are not for the asking
    counted = replace(case.node, unsure=case.node.unsure + 1, record=record)
    failed = fail(moment, [case.unit], verdict.reason) if _is_current(case) else []
    return [*commands, SaveNode(counted, case.node.state), *failed]


def _judge_again(submission: SubmissionRow, verdict: Verdict) -> list[Command]:
    """The first verdict stands; what was pulled since had been accepted."""
    stands = "accepted" if submission.state == SubmissionState.PULLED else submission.state.value
    if stands == verdict.outcome.value:
        return []
    raise Refusal(
        409, "verdict.decided", f"submission {submission.submission[:16]}… is {submission.state.value} already"
    )


def _require_fitting(rules: Rules, case: Case, verdict: Verdict) -> None:
    if (verdict.unit, verdict.node) != (case.submission.unit, case.submission.node):
        raise Refusal(422, "verdict.mismatch", "the verdict names another unit or node than its submission")
    if verdict.outcome != Outcome.REJECTED:  # an unsure audit joins the record, too
        _require_possible(rules, verdict.tally)
    if len(verdict.branches.differences) > verdict.branches.looked or verdict.branches.looked > rules.group_size:
        raise Refusal(422, "verdict.branches", f"{verdict.branches.looked} branches of {rules.group_size} rollouts")
    if verdict.outcome != Outcome.ACCEPTED:
        return
    if len(verdict.rewards) != rules.group_size:
        raise Refusal(
            422, "verdict.rewards", f"{len(verdict.rewards)} rewards for a group of {rules.group_size} rollouts"
        )
    if not 0 <= verdict.generated_tokens <= rules.group_size * rules.max_new_tokens:
        raise Refusal(422, "verdict.tokens", f"{verdict.generated_tokens} generated tokens are impossible for this run")
    if verdict.depth == "light" and case.submission.depth == "full":
        raise Refusal(422, "verdict.depth", "this submission is to be audited fully; the verdict is of a light audit")


def _require_possible(rules: Rules, tally: Tally) -> None:
    """Sums that no group of this run can have would spoil their node's record, for or against it."""
    too_many = tally.tokens + tally.accidents > rules.group_size * rules.max_new_tokens
    if too_many or tally.outside > tally.tokens or tally.exponent_mismatches > tally.proof_values:
        raise Refusal(
            422,
            "verdict.tally",
            f"the tally is impossible: {tally.outside} of {tally.tokens} tokens outside, {tally.accidents} more by "
            f"accident, {tally.exponent_mismatches} of {tally.proof_values} exponents off",
        )


def _accept(moment: Moment, case: Case, decided: SubmissionRow, ruling: Ruling) -> list[Command]:
    progress, verdict = moment.progress, ruling.verdict
    trusted = windows.widened(moment.rules, reputation.passed(case.node, verdict))
    node, record = credits.earn(trusted, decided, ruling.document, moment.now_ms)
    joined = [] if case.node.on_chain else nodes.joined(node, moment.now_ms)
    commands: list[Command] = [SaveNode(node, case.node.state), *joined, record]
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
    verdict, stake, now_ms = ruling.verdict, case.stake, moment.now_ms
    body = {
        "node": case.node.node,
        "unit": case.submission.unit,
        "submission": case.submission.submission,
        "reason": verdict.reason,
        "severity": verdict.severity.value if verdict.severity else "",
        "validator": ruling.validator,
        "verdict": document_hash(ruling.document),
    }
    rejected = [Record("rejected", body, now_ms)] if case.node.on_chain else []
    reopened = [SaveUnit(case.unit.reopened(), case.unit.state)] if _is_current(case) else []  # the node failed, not it
    if verdict.severity is None:  # soft: it costs the credit of this submission, and no trust
        return [*rejected, *nodes.reject(case.node, verdict, case.holdings, now_ms), *reopened]
    node, voided = credits.void(case.node, stake.pending, verdict.reason, now_ms)
    disbelieved = moment.rules.audit == "reputation" and nodes.is_over(reputation.failed(node, verdict.severity))
    return [
        *rejected,
        *voided,
        *nodes.reject(node, verdict, case.holdings, now_ms),
        *pulls.pull(stake, verdict, disbelieved, now_ms),
        *pulls.deepen(stake.light, but=case.submission.submission),
        *reopened,
    ]


def _is_current(case: Case) -> bool:
    return case.unit.state == UnitState.SUBMITTED and case.unit.submission == case.submission.submission
