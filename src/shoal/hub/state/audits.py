"""Audits: who checks what, until when, and what a verdict changes.

    received ─ claim ─► auditing ─ verdict ─► accepted ─► credit; unit accepted, dropped (equal rewards) or void (stale)
       ▲                   │                  rejected ─► strike, perhaps a ban; unit open again; the rest as below
       └── claim ran out ──┘                  unsure ─► nothing for anybody; unit open again (`units`)

The first verdict on a submission stands; the same outcome again is harmless. A statistical rejection is unsure if most
machines of that kind fail the same check (`reputation`). What a failed audit does to the rest of its node's work:

    accepted by a light audit, in no batch yet ─► pulled; the unit is open again, task and seeds unchanged
    accepted by a full audit, in no batch yet ──► stays, unless the node is banned for it (audits by reputation only)
    waiting for a light audit, or in one ───────► waits for a full one
    credit pending ─────────────────────────────► void
    credit final (its window has passed) ───────► stays; its unit is void: not trained on, and not paid twice

A light audit of a trusted worker's group gives no credit. One failed audit, or the owner, revokes its certificate: then
it is banned, and nothing of it is trained on any more. What waits is judged fully and paid, but its unit is void.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.hub.state import AddVerdict, Command, Record, Refusal, Save, alarm, credits, nodes, pacing, reputation, rows
from shoal.hub.state.rows import Filled, Holding, Moment, NodeRow, SubmissionRow, SubmissionState, UnitRow, UnitState
from shoal.hub.state.units import NOT_THE_NODES, VOID_STALE, fail, refill_alarm
from shoal.protocol import Branches, NodeState, Outcome, RolloutReward, Severity, Tally, Verdict, document_hash

DECIDED = "verdict.decided"
PULLED = "node.failed"
TASK_PART, JUDGE_PART = "task", "judge."


def put_back(claimed: Iterable[SubmissionRow]) -> list[Save[SubmissionRow]]:
    return [Save(row.to(SubmissionState.RECEIVED, validator=None, claimed_until_ms=None), row.state) for row in claimed]


def claim(moment: Moment, waiting: Iterable[SubmissionRow], validator: str) -> list[Save[SubmissionRow]]:
    """Lowest unit first: batches need those first."""
    changes = {"validator": validator, "claimed_until_ms": moment.now_ms + moment.rules.audit_ms}
    ordered = sorted(waiting, key=lambda row: row.unit)
    return [Save(row.to(SubmissionState.AUDITING, **changes), row.state) for row in ordered]


@dataclass(frozen=True)
class VerdictCase:
    """All rows that a verdict may change. A failed audit also concerns the node's accepted groups in no batch
    (`untrained`), what waits for a `light` audit, and `pending` credit; `same_kind` are nodes of the same kind.
    `leased_at_ms` is 0 unless the audit failed, or the node failed one before."""

    submission: SubmissionRow
    unit: UnitRow
    node: NodeRow
    holdings: Sequence[Holding] = ()
    leased_at_ms: int = 0
    same_kind: Sequence[NodeRow] = ()
    untrained: Sequence[Filled] = ()
    light: Sequence[SubmissionRow] = ()
    pending: Sequence[SubmissionRow] = ()

    @property
    def is_current(self) -> bool:
        return self.unit.state == UnitState.SUBMITTED and self.unit.submission == self.submission.submission

    @property
    def is_before_failure(self) -> bool:
        """Whether the work was leased before its node last failed a statistical check."""
        return self.node.failed_at_ms > 0 and self.leased_at_ms <= self.node.failed_at_ms


@dataclass(frozen=True)
class Ruling:
    verdict: Verdict
    validator: str
    document: str


def judge(moment: Moment, case: VerdictCase, ruling: Ruling) -> list[Command]:
    verdict, submission = ruling.verdict, case.submission
    _require_fitting(moment, case, verdict)
    if submission.state not in rows.UNDECIDED_SUBMISSIONS:
        return _judge_again(submission, verdict)
    if case.is_before_failure:  # the record has begun again since: a second strike rests on fresh data alone
        verdict = verdict.model_copy(update={"tally": Tally(), "branches": Branches()})
        ruling = replace(ruling, verdict=verdict)
    case = replace(case, node=reputation.counted(case.node, verdict))
    spread = reputation.failing_kind(moment, case.node, case.same_kind, verdict)
    outcome = Outcome.UNSURE if spread else verdict.outcome
    accepted, paid = outcome == Outcome.ACCEPTED, not case.node.is_unpaid(verdict.depth)
    decided = submission.to(
        SubmissionState(outcome.value), validator=ruling.validator, claimed_until_ms=None,
        rewards=tuple(reward.value for reward in verdict.rewards),
        generated_tokens=verdict.generated_tokens if accepted and paid else 0, reason=verdict.reason,
        message=verdict.message, decided_at_ms=moment.now_ms, depth=verdict.depth,
        matures_at_ms=credits.matures_at_ms(moment) if accepted and paid else None,
        pass_rate=pass_rate(verdict.rewards) if accepted else None,
    )  # fmt: skip
    commands: list[Command] = [Save(decided, submission.state), AddVerdict(submission.submission, ruling.document)]
    if accepted:
        return commands + _accept(moment, case, decided, ruling)
    if case.node.is_ours:
        return commands + _wasted(moment, case, verdict)
    if outcome == Outcome.REJECTED:
        return commands + _reject(moment, case, ruling)
    node = reputation.unsure(case.node, verdict, own_fault=spread is not None or verdict.reason not in NOT_THE_NODES)
    if spread:  # no strike; but a record by limits that are in doubt would fail the node under better ones, too
        node = replace(node, record=Tally(), failed_check=verdict.reason, failed_at_ms=moment.now_ms)
        commands.append(spread)
    commands.append(Save(node, case.node.state))
    return commands + (fail(moment, [case.unit], "" if spread else verdict.reason) if case.is_current else [])


def _wasted(moment: Moment, case: VerdictCase, verdict: Verdict) -> list[Command]:
    """A validator's own group cannot be used: a failed attempt, no sanction."""
    rejected = verdict.outcome == Outcome.REJECTED
    node = replace(case.node, rejected=case.node.rejected + rejected, unsure=case.node.unsure + (not rejected))
    commands: list[Command] = [Save(node, case.node.state)]
    if rejected:
        message = f"validator {node.name} generated a group that another one rejected ({verdict.reason}): one is broken"
        commands.append(alarm(moment, f"trusted.{verdict.reason}", message))
    return commands + (fail(moment, [case.unit], verdict.reason, trusted=True) if case.is_current else [])


def _judge_again(submission: SubmissionRow, verdict: Verdict) -> list[Command]:
    """A pulled submission had been accepted; one that is unsure because of its kind had been rejected."""
    stands = "accepted" if submission.state == SubmissionState.PULLED else submission.state.value
    of_its_kind = verdict.severity is Severity.STATISTICAL and submission.reason == verdict.reason
    if stands == verdict.outcome.value or (stands == Outcome.UNSURE.value and of_its_kind):
        return []
    raise Refusal(409, DECIDED, f"submission {submission.submission[:16]}… is {submission.state.value} already")


def disagreement(moment: Moment, submission: SubmissionRow, ruling: Ruling) -> list[Command]:
    opposite = dict.fromkeys((SubmissionState.ACCEPTED, SubmissionState.PULLED), Outcome.REJECTED)
    opposite[SubmissionState.REJECTED] = Outcome.ACCEPTED
    if opposite.get(submission.state) != ruling.verdict.outcome:
        return []
    who = f"validators {submission.validator} and {ruling.validator} disagree about unit {submission.unit}"
    message = f"{who}; the first verdict stands: run `shoal doctor --selftest` on both, and stop the one that fails"
    return [alarm(moment, "verdict.disagreement", message)]


def _require_fitting(moment: Moment, case: VerdictCase, verdict: Verdict) -> None:
    """Refuse impossible sums: they would falsify their node's record."""
    rules, tally, branches = moment.rules, verdict.tally, verdict.branches
    most = rules.group_size * rules.max_new_tokens
    if (verdict.unit, verdict.node) != (case.submission.unit, case.submission.node):
        raise Refusal(422, "verdict.mismatch", "the verdict names another unit or node than its submission")
    if verdict.outcome != Outcome.REJECTED and (tally.tokens > most or tally.accidents > tally.proofs):
        sums = f"{tally.tokens} tokens, {tally.accidents} accidents in {tally.proofs} proofs"
        raise Refusal(422, "verdict.tally", f"the tally is impossible: {sums}")
    if len(branches.differences) > branches.looked or branches.looked > rules.group_size:
        raise Refusal(422, "verdict.branches", f"{branches.looked} branches of {rules.group_size} rollouts")
    if verdict.outcome != Outcome.ACCEPTED:
        return
    if (count := len(verdict.rewards)) != rules.group_size:
        raise Refusal(422, "verdict.rewards", f"{count} rewards for a group of {rules.group_size} rollouts")
    if not 0 <= verdict.generated_tokens <= most:
        raise Refusal(422, "verdict.tokens", f"{verdict.generated_tokens} generated tokens are impossible for this run")
    if verdict.depth == "light" and case.submission.depth == "full":
        raise Refusal(422, "verdict.depth", "this submission is to be audited fully; the verdict is of a light audit")


def _accept(moment: Moment, case: VerdictCase, decided: SubmissionRow, ruling: Ruling) -> list[Command]:
    progress, unit, before, commands = moment.progress, case.unit, case.node, list[Command]()
    widened = nodes.widened(moment.rules, reputation.passed(before, ruling.verdict))
    if before.is_ours:  # a validator's own group is neither credit nor trust
        commands.append(Save(replace(before, accepted=before.accepted + 1), before.state))
    elif before.is_unpaid(ruling.verdict.depth):
        commands.append(Save(widened, before.state))
    else:
        node, record = credits.earn(widened, decided, ruling.document, moment.now_ms)
        joined = [] if before.on_chain else nodes.joined(node, moment.now_ms)
        commands += [Save(node, before.state), *joined, record]
    if not case.is_current:
        return commands  # the unit is void meanwhile; the work was done, so its credit stays
    if before.certified and before.state is NodeState.BANNED:
        return [*commands, Save(unit.to(UnitState.VOID, reason=PULLED), unit.state)]
    if pacing.is_stale(moment.rules, progress.next_step, case.submission.version):
        return [*commands, Save(unit.to(UnitState.VOID, reason=VOID_STALE), unit.state)]
    if has_equal_rewards(ruling.verdict.rewards, moment.rules.drop_equal):
        dropped = unit.to(UnitState.DROPPED, lost_step=progress.next_step, reason="equal rewards")
        after = replace(progress, dropped=progress.dropped + 1)
        return [*commands, Save(dropped, unit.state), *refill_alarm(replace(moment, progress=after))]
    return [*commands, Save(unit.to(UnitState.ACCEPTED), unit.state)]


def _reject(moment: Moment, case: VerdictCase, ruling: Ruling) -> list[Command]:
    verdict, now_ms, node, severity = ruling.verdict, moment.now_ms, case.node, ruling.verdict.severity
    commands: list[Command] = []
    if node.on_chain:
        body = {
            "node": node.node, "unit": case.submission.unit, "submission": case.submission.submission,
            "reason": verdict.reason, "severity": severity.value if severity else "",
            "validator": ruling.validator, "verdict": document_hash(ruling.document),
        }  # fmt: skip
        commands.append(Record("rejected", body, now_ms))
    if severity is Severity.STATISTICAL and node.statistical > 0 and case.is_before_failure:
        severity = None  # a second strike needs fresh data: this comes of the same machine in the same state
    if severity is not None:
        node, voided = credits.void(node, case.pending, verdict.reason, now_ms)
        commands += voided
    commands += nodes.reject(node, verdict, severity, case.holdings, now_ms)
    if severity is not None:
        struck = reputation.failed(node, severity, verdict.reason, now_ms)
        banned = (node.certified or moment.rules.audit == "reputation") and nodes.is_over(struck)
        commands += pull(node, case.untrained, verdict, banned, now_ms)
        commands += audit_fully(row for row in case.light if row.submission != case.submission.submission)
        if node.certified and node.state is not NodeState.BANNED:
            who = f"{node.name} ({node.node[:8]})".strip()
            message = f"trusted worker {who} failed an audit ({verdict.reason}): its certificate is revoked"
            commands.append(alarm(moment, f"trusted.revoked.{node.node[:8]}", message))
    if case.is_current:  # the node failed, not the unit
        commands.append(Save(case.unit.reopened(), case.unit.state))
    return commands


def audit_fully(light: Iterable[SubmissionRow]) -> list[Command]:
    waiting = ((row, put_back([row])[0].row if row.state == SubmissionState.AUDITING else row) for row in light)
    return [Save(replace(after, depth="full"), row.state) for row, after in waiting]


def pull(
    node: NodeRow, untrained: Sequence[Filled], verdict: Verdict | None, banned: bool, now_ms: int
) -> list[Command]:
    """Take back the accepted groups that are in no batch: those audited lightly, and all if the node is `banned`. Their
    units are open again; void where the credit is final: nobody trains on it, nobody is paid for it again. Without a
    `verdict` the owner revoked the node's key, and credit stays."""
    message = "its node's key was revoked"
    if verdict is not None:
        message = f"its node failed the audit of unit {verdict.unit} ({verdict.reason or 'no reason given'})"
    commands, units, unpaid = list[Command](), list[int](), list[int]()
    for unit, row in ((filled.unit, filled.submission) for filled in untrained):
        if not (banned or row.depth == "light"):
            continue
        is_unpaid = node.is_unpaid(row.depth)
        if not is_unpaid and (verdict is None or row.matures_at_ms is None):
            commands.append(Save(unit.to(UnitState.VOID, reason=PULLED), unit.state))
            continue
        taken = {"reason": PULLED, "message": message, "decided_at_ms": now_ms, "matures_at_ms": None}
        commands.append(Save(row.to(SubmissionState.PULLED, **taken), row.state))
        commands.append(Save(unit.reopened(), unit.state))
        units.append(unit.unit)
        unpaid += [unit.unit] if is_unpaid else []
    if verdict is None or not units:
        return commands
    body = {"node": verdict.node, "units": units, "submission": verdict.submission, "reason": verdict.reason}
    return [*commands, Record("pulled", {**body, "unpaid": unpaid} if unpaid else body, now_ms)]


def task_rewards(rewards: Sequence[RolloutReward]) -> list[float]:
    """The task's part of every reward; the whole rewards unless all have that part."""
    if all(TASK_PART in reward.parts for reward in rewards):
        return [reward.parts[TASK_PART] for reward in rewards]
    return [reward.value for reward in rewards]


def has_equal_rewards(rewards: Sequence[RolloutReward], of: Literal["task", "total"] = "task") -> bool:
    """Whether a group teaches nothing: all rollouts have the same task part and judges' parts, whatever length adds;
    or, `of` the total, the same whole. A group of one rollout is kept."""
    if of == "total":
        return len(rewards) > 1 and len({reward.value for reward in rewards}) == 1
    judged = [sorted(item for item in reward.parts.items() if item[0].startswith(JUDGE_PART)) for reward in rewards]
    kinds = {(task, *said) for task, said in zip(task_rewards(rewards), judged, strict=True)}
    return len(rewards) > 1 and len(kinds) == 1


def pass_rate(rewards: Sequence[RolloutReward]) -> float | None:
    """How much of its task a group solved, 0 to 1, in any order of rollouts; None of an empty group."""
    solved = [min(1.0, max(0.0, value)) for value in task_rewards(rewards)]
    return math.fsum(solved) / len(solved) if solved else None
