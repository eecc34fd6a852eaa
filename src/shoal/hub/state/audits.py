"""Audits: who checks what, until when, and what a verdict changes.

    received ─ claim ─► auditing ─ verdict ─► accepted ─► credit; unit accepted, dropped (equal rewards) or void (stale)
       ▲                   │                  rejected ─► strike, perhaps a ban; unit open again; see `pulls`
       └── claim ran out ──┘                  unsure ─► nothing for anybody; unit open again (`units`)

A statistical rejection is unsure if most machines of that kind fail the same check (`kinds`). A validator's own group
earns nothing and costs nothing: if it cannot be used, that is an attempt of ours that came to nothing.

The first verdict on a submission stands. The same outcome again, also from another validator, is harmless. What is to
be audited fully cannot be accepted after a light audit; it can be rejected, for a failed check is a failed check.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from shoal.hub.state import credits, gains, kinds, nodes, pacing, pulls, reputation, windows
from shoal.hub.state.commands import AddVerdict, Command, RaiseAlarm, Record, SaveNode, SaveSubmission, SaveUnit
from shoal.hub.state.machines import UNDECIDED_SUBMISSIONS, SubmissionState, UnitState
from shoal.hub.state.refusals import Refusal
from shoal.hub.state.rewards import has_equal_rewards, pass_rate
from shoal.hub.state.rows import Holding, Moment, NodeRow, Rules, SubmissionRow, UnitRow
from shoal.hub.state.units import NOT_THE_NODES, VOID_STALE, fail, refill_alarm
from shoal.protocol import Outcome, Severity, Tally, Verdict, document_hash
from shoal.protocol.branches import Branches


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


DECIDED = "verdict.decided"


@dataclass(frozen=True)
class VerdictCase:
    """All that a verdict may touch: the submission, its unit, its node, the leases that the node holds, and what else
    it has at stake. `leased_at_ms` is when the submission's lease was issued, 0 where nothing has failed; `kin` are
    nodes of the same kind."""

    submission: SubmissionRow
    unit: UnitRow
    node: NodeRow
    holdings: tuple[Holding, ...] = ()
    stake: pulls.Stake = field(default_factory=pulls.Stake)
    leased_at_ms: int = 0
    kin: tuple[NodeRow, ...] = ()


@dataclass(frozen=True)
class Ruling:
    """A verdict, who gave it, and its signed form."""

    verdict: Verdict
    validator: str
    document: str


def judge(moment: Moment, case: VerdictCase, ruling: Ruling) -> list[Command]:
    """Apply a verdict."""
    verdict, submission = ruling.verdict, case.submission
    _require_fitting(moment.rules, case, verdict)
    if submission.state not in UNDECIDED_SUBMISSIONS:
        return _judge_again(submission, verdict)
    if _is_before_failure(case):  # the record has begun anew since: a second strike rests on fresh data alone
        verdict = verdict.model_copy(update={"tally": Tally(), "branches": Branches()})
        ruling = replace(ruling, verdict=verdict)
    case = replace(case, node=gains.counted(case.node, verdict))
    spread = kinds.failing(moment, case.node, case.kin, verdict)
    outcome = Outcome.UNSURE if spread else verdict.outcome
    accepted, paid = outcome == Outcome.ACCEPTED, not case.node.trusted
    decided = submission.to(
        SubmissionState(outcome.value),
        validator=ruling.validator,
        claimed_until_ms=None,
        rewards=tuple(reward.value for reward in verdict.rewards),
        generated_tokens=verdict.generated_tokens if accepted and paid else 0,
        reason=verdict.reason,
        message=verdict.message,
        decided_at_ms=moment.now_ms,
        depth=verdict.depth,
        matures_at_ms=credits.matures_at_ms(moment) if accepted and paid else None,
        pass_rate=pass_rate(verdict.rewards) if accepted else None,
    )
    commands: list[Command] = [
        SaveSubmission(decided, submission.state),
        AddVerdict(submission.submission, ruling.document),
    ]
    if accepted:
        return commands + _accept(moment, case, decided, ruling)
    if case.node.trusted:
        return commands + _wasted(moment, case, ruling)
    if outcome == Outcome.REJECTED:
        return commands + _reject(moment, case, ruling)
    if spread:
        return [*commands, *_unsure(moment, case, kinds.failed(case.node, verdict, moment.now_ms), ""), spread]
    node = reputation.unsure(case.node, verdict, own_fault=verdict.reason not in NOT_THE_NODES)
    return commands + _unsure(moment, case, node, verdict.reason)


def _unsure(moment: Moment, case: VerdictCase, node: NodeRow, reason: str) -> list[Command]:
    failed = fail(moment, [case.unit], reason) if _is_current(case) else []
    return [SaveNode(node, case.node.state), *failed]


def _wasted(moment: Moment, case: VerdictCase, ruling: Ruling) -> list[Command]:
    """A group that a validator generated cannot be used: an attempt of ours, and no sanction."""
    verdict, rejected = ruling.verdict, ruling.verdict.outcome == Outcome.REJECTED
    node = replace(case.node, rejected=case.node.rejected + rejected, unsure=case.node.unsure + (not rejected))
    commands: list[Command] = [SaveNode(node, case.node.state)]
    if rejected:
        step = moment.progress.next_step
        message = (
            f"step {step}: a validator rejected a group that validator {node.name} had generated itself "
            f"({verdict.reason}): one of the two is broken; `shoal why {case.unit.unit}` has the verdict"
        )
        commands.append(RaiseAlarm(step, f"trusted.{verdict.reason}", message, moment.now_ms))
    return commands + (fail(moment, [case.unit], verdict.reason, trusted=True) if _is_current(case) else [])


def _judge_again(submission: SubmissionRow, verdict: Verdict) -> list[Command]:
    """The first verdict stands; what was pulled since had been accepted, what its kind made unsure was rejected."""
    stands = "accepted" if submission.state == SubmissionState.PULLED else submission.state.value
    of_its_kind = verdict.severity is Severity.STATISTICAL and submission.reason == verdict.reason
    if stands == verdict.outcome.value or (stands == Outcome.UNSURE.value and of_its_kind):
        return []
    raise Refusal(409, DECIDED, f"submission {submission.submission[:16]}… is {submission.state.value} already")


def disagreement(moment: Moment, submission: SubmissionRow, ruling: Ruling) -> list[Command]:
    """An alarm if a refused verdict contradicts the one that stands: accepted by one validator, rejected by another."""
    contradicts = {
        SubmissionState.ACCEPTED: Outcome.REJECTED,
        SubmissionState.PULLED: Outcome.REJECTED,
        SubmissionState.REJECTED: Outcome.ACCEPTED,
    }
    if contradicts.get(submission.state) != ruling.verdict.outcome:
        return []
    step, reason = moment.progress.next_step, ruling.verdict.reason or submission.reason
    message = (
        f"step {step}: validators {submission.validator} and {ruling.validator} disagree about unit {submission.unit} "
        f"({reason}); the first verdict stands. One of them is wrong: run `shoal doctor --selftest` on both, and stop "
        "the one that fails"
    )
    return [RaiseAlarm(step, "verdict.disagreement", message, moment.now_ms)]


def _require_fitting(rules: Rules, case: VerdictCase, verdict: Verdict) -> None:
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
    if tally.tokens > rules.group_size * rules.max_new_tokens or tally.accidents > tally.proofs:
        raise Refusal(
            422,
            "verdict.tally",
            f"the tally is impossible: {tally.tokens} tokens, {tally.accidents} accidents in {tally.proofs} proofs",
        )


def _accept(moment: Moment, case: VerdictCase, decided: SubmissionRow, ruling: Ruling) -> list[Command]:
    progress, verdict = moment.progress, ruling.verdict
    commands = _paid(moment, case, decided, ruling)
    unit = case.unit
    if not _is_current(case):
        return commands  # the unit is void meanwhile; the work was done, so its credit stays
    if pacing.is_stale(moment.rules, progress.next_step, case.submission.version):
        return [*commands, SaveUnit(unit.to(UnitState.VOID, reason=VOID_STALE), unit.state)]
    if has_equal_rewards(verdict.rewards, moment.rules.drop_equal):
        dropped = unit.to(UnitState.DROPPED, lost_step=progress.next_step, reason="equal rewards")
        after = replace(progress, dropped=progress.dropped + 1)
        return [*commands, SaveUnit(dropped, unit.state), *refill_alarm(replace(moment, progress=after))]
    return [*commands, SaveUnit(unit.to(UnitState.ACCEPTED), unit.state)]


def _paid(moment: Moment, case: VerdictCase, decided: SubmissionRow, ruling: Ruling) -> list[Command]:
    """What an accepted submission does for its node: a validator's own is neither credit nor trust."""
    if case.node.trusted:
        return [SaveNode(replace(case.node, accepted=case.node.accepted + 1), case.node.state)]
    widened = windows.widened(moment.rules, reputation.passed(case.node, ruling.verdict))
    node, record = credits.earn(widened, decided, ruling.document, moment.now_ms)
    joined = [] if case.node.on_chain else nodes.joined(node, moment.now_ms)
    return [SaveNode(node, case.node.state), *joined, record]


def _reject(moment: Moment, case: VerdictCase, ruling: Ruling) -> list[Command]:
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
    severity = _fresh_severity(case, verdict)
    if severity is None:  # soft: it costs the credit of this submission, and no trust
        return [*rejected, *nodes.reject(case.node, verdict, severity, case.holdings, now_ms), *reopened]
    node, voided = credits.void(case.node, stake.pending, verdict.reason, now_ms)
    struck = reputation.failed(node, severity, verdict.reason, now_ms)
    disbelieved = moment.rules.audit == "reputation" and nodes.is_over(struck)
    return [
        *rejected,
        *voided,
        *nodes.reject(node, verdict, severity, case.holdings, now_ms),
        *pulls.pull(stake, verdict, disbelieved, now_ms),
        *pulls.deepen(stake.light, but=case.submission.submission),
        *reopened,
    ]


def _fresh_severity(case: VerdictCase, verdict: Verdict) -> Severity | None:
    """How much the rejection counts. A second statistical strike needs fresh data: work that was leased before the
    first one comes of the same machine in the same state, and is rejected without a further strike."""
    again = verdict.severity is Severity.STATISTICAL and case.node.statistical > 0
    return None if again and _is_before_failure(case) else verdict.severity


def _is_before_failure(case: VerdictCase) -> bool:
    """Whether the work was leased before its node last failed a statistical check."""
    return case.node.failed_at_ms > 0 and case.leased_at_ms <= case.node.failed_at_ms


def _is_current(case: VerdictCase) -> bool:
    return case.unit.state == UnitState.SUBMITTED and case.unit.submission == case.submission.submission
