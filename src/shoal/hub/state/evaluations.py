"""Evaluation while training: which versions are measured, and by whom.

    version v is announced, and due ─► slices of the held-out tasks ─► open ─ claim ─► claimed ─ report ─► done
                                                                        ▲               │
                                                                        └─ claim ran out, or could not be done ─► void
                                                                                                (after `MOST_TRIES`)
Training waits for none of it. When the next version is due, one that nobody has begun to measure is given up; one that
is begun is finished first: so never more than two are under way.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.hub.state import Command, EvaluationPlan, EvaluationRow, EvaluationState, Moment, Refusal, Save
from shoal.protocol import Evaluation, EvaluationReport, PolicyRef

SLICE = 32  # tasks that a validator answers between two claims of audits
MOST_TRIES = 4
CLAIM_AUDITS = 5  # a slice may take as long as so many audits: its completions are generated, not merely checked
OPEN = frozenset({EvaluationState.OPEN, EvaluationState.CLAIMED})


def is_due(plan: EvaluationPlan, steps: int, version: int) -> bool:
    return plan.every > 0 and (version % plan.every == 0 or version >= steps)


def offer(moment: Moment, policy: PolicyRef, tasks: int, under_way: Sequence[EvaluationRow]) -> list[Command]:
    plan = moment.rules.evaluation
    if plan is None or not is_due(plan, moment.rules.steps, policy.version):
        return []
    begun = {row.version for row in under_way if row.state is not EvaluationState.OPEN}
    commands, end = list[Command](), min(plan.tasks, tasks)
    for row in under_way:
        if row.state in OPEN and (row.incarnation != policy.incarnation or row.version not in begun):
            commands.append(Save(row.to(EvaluationState.VOID, validator=None, claimed_until_ms=None), row.state))
    for first in range(0, end, SLICE):
        row = EvaluationRow(policy.incarnation, policy.version, first, policy.digest, min(SLICE, end - first))
        commands.append(Save(row, None))
    return commands


def claim(moment: Moment, row: EvaluationRow, validator: str) -> Save[EvaluationRow]:
    until_ms = moment.now_ms + CLAIM_AUDITS * moment.rules.audit_ms
    return Save(row.to(EvaluationState.CLAIMED, validator=validator, claimed_until_ms=until_ms), row.state)


def put_back(under_way: Sequence[EvaluationRow], validator: str, now_ms: int) -> list[Save[EvaluationRow]]:
    """Open again what this validator had claimed (it asks again, so it has lost it), and what ran out."""
    claimed = [row for row in under_way if row.state is EvaluationState.CLAIMED]
    return [_failed(row) for row in claimed if row.validator == validator or (row.claimed_until_ms or 0) <= now_ms]


def next_free(under_way: Sequence[EvaluationRow], validator: str, now_ms: int) -> EvaluationRow | None:
    """The slice that this validator may claim now, those included that its asking puts back. A version is finished
    before the next one is begun, for its policy is loaded. One that failed comes after those that did not."""
    back = {each.row.key: each.row for each in put_back(under_way, validator, now_ms)}
    rows, tries = [back.get(row.key, row) for row in under_way], Counter[tuple[int, int]]()
    for row in rows:
        tries[row.key[:2]] = max(tries[row.key[:2]], row.tries)
    free = [row for row in rows if row.state is EvaluationState.OPEN]
    return min(free, key=lambda row: (tries[row.key[:2]], *row.key[:2], row.tries, row.first), default=None)


def _failed(row: EvaluationRow) -> Save[EvaluationRow]:
    state = EvaluationState.VOID if row.tries + 1 >= MOST_TRIES else EvaluationState.OPEN
    return Save(row.to(state, validator=None, claimed_until_ms=None, tries=row.tries + 1), row.state)


def report(
    row: EvaluationRow | None, said: EvaluationReport, validator: str, document: str, now_ms: int
) -> list[Command]:
    """The first report on a slice stands; later ones, also about what was given up, change nothing."""
    if row is None or row.policy != said.policy:
        raise Refusal(404, "evaluation.unknown", f"policy {said.policy.label} has no slice at {said.first} to measure")
    if row.state not in OPEN:
        return []
    if not said.scores:
        return [_failed(row)] if row.state is EvaluationState.CLAIMED and row.validator == validator else []
    if (count := len(said.scores)) > row.tasks:
        raise Refusal(422, "evaluation.scores", f"{count} scores for a slice of {row.tasks} tasks at {said.first}")
    found = {"scores": said.scores, "document": document, "decided_at_ms": now_ms}
    return [Save(row.to(EvaluationState.DONE, validator=validator, claimed_until_ms=None, **found), row.state)]


def results(rows: Iterable[EvaluationRow]) -> list[Evaluation]:
    """Each version in order, of two incarnations the newer one; without those given up."""
    by_version: dict[int, list[EvaluationRow]] = {}
    for row in sorted(rows, key=lambda each: each.key):
        known = by_version.setdefault(row.version, [])
        if known and known[0].incarnation != row.incarnation:
            known.clear()
        known.append(row)
    found = []
    for _version, slices in sorted(by_version.items()):
        scores = [score for row in slices for score in row.scores if score is not None]
        complete = all(row.state not in OPEN for row in slices)
        if scores or not complete:
            made = Evaluation(
                policy=slices[0].policy, tasks=sum(row.tasks for row in slices), scored=len(scores),
                mean=math.fsum(scores) / len(scores) if scores else None, complete=complete,
                partial=any(row.state is EvaluationState.VOID for row in slices),
                decided_at_ms=max(row.decided_at_ms or 0 for row in slices),
            )  # fmt: skip
            found.append(made)
    return found
