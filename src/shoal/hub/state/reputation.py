"""How deeply a node's next submission is audited, and what audits do to its record.

    full audit passed ─► streak + 1, passed + 1; its tally joins the record
    light audit passed ─► nothing: it proved nothing
    rejected ─► streak 0; by a strike also passed 0: on probation again; by a statistical one also an empty record
    unsure ─► its tally joins the record; its doubt grows; the streak is cut to 10: the next ones are audited fully

Doubt is a cumulative sum, never below 0: + 1 for an unsure group that is not our machinery's fault, - k for one that a
full audit accepted; k is twice the rate at which honest work of that kind is unsure (`Verdict.unsure_rate`). From
`DOUBTED` on a node has one lease at a time. Honest work gets there once in 60,000 groups at a rate of 0.5 %, in 1,600
at 5 %; a node that is always unsure after seven at most. Only full audits raise the streak, so that a sleeper needs
about 2,000 honest submissions to be audited at 5 %.

Kinds: if machines of one kind (`engine/device/number format`) fail a statistical check together, the kind differs
(driver, library, policy): what the check says of it is unsure, with an alarm. That takes at least `MANY` independent
nodes of the kind that failed this check within `WITHIN_MS`, and more of them than pass audits. A node with
`PROBATION_AUDITS` accepted groups counts by itself; all others of one network once together. It protects no cheat:
unsure work is neither trained on nor paid, certain failures ban, and so does `STEERED`: no driver knows the reward.

Gains: what follows when the evidence says that tolerance was used to buy reward (`protocol.verdict`).

    a node's evidence suffices ─► the validator rejects the group: a strike; the node's evidence begins at zero
    its owner's does ──────────► groups of all nodes of that owner with tokens that pass by tolerance are unsure
    that of newer nodes does ──► the same for nodes on probation, and an alarm: nobody gains by changing keys

They are trusted again once the evidence has fallen to 10³. What a node is struck for is taken out of the others'
evidence, so that one cheater does not shut out all newcomers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.hub.state.commands import RaiseAlarm, alarm
from shoal.hub.state.rows import PROBATION_AUDITS, Moment, NodeRow, Rules
from shoal.protocol import ENOUGH, FORGOTTEN, Depth, GainEvidence, Message, Outcome, Severity, Tally, Verdict

ALWAYS_UNTIL, LEAST = 10, 0.05
FORGIVEN_AFTER = 1_000
"""Full audits after which a statistical strike is forgotten, and how often the node was suspended. Honest work fails
such a check once in 10,000 audits or so: without this every honest node would be banned in the long run."""
DOUBTED, MOST_DOUBT, LEAST_FORGIVEN, MOST_FORGIVEN = 3.5, 4.5, 1 / 64, 1 / 2
MANY, WITHIN_MS = 3, 3_600_000
STEERED = "sampling.steered"
POOLED_AUDITS = 128  # full audits after which evidence is not pooled: about as many as evidence needs to suffice
NEWER = "gains/newer"


def full_audit_probability(rules: Rules, node: NodeRow) -> float:
    """Of the next submission of `node`; 0 for a validator's own groups: its computing needs no proof. A trusted worker
    with an unsure group is audited fully until it has passed for it: else all its samples could be unsure."""
    if node.is_ours:
        return 0.0
    if node.certified:
        return 1.0 if node.doubt else rules.trusted_audit
    if rules.audit == "all" or node.on_probation or node.streak <= ALWAYS_UNTIL:
        return 1.0
    return max(LEAST, ALWAYS_UNTIL / node.streak)


def depth_for(rules: Rules, node: NodeRow, fraction: float) -> Depth:
    return "full" if fraction < full_audit_probability(rules, node) else "light"


def passed(node: NodeRow, verdict: Verdict) -> NodeRow:
    after = replace(node, accepted=node.accepted + 1, soft=0)
    if verdict.depth != "full":
        return after
    most = node.passed + 1
    if not verdict.measured:  # by limits of its number format alone nobody is more than a newcomer
        most = max(node.passed, min(most, PROBATION_AUDITS - 1))
    if most >= FORGIVEN_AFTER:
        after = replace(after, statistical=0, suspensions=0)
    doubt = max(0.0, node.doubt - _forgiven(verdict))
    record = recent(node.record.plus(verdict.tally))
    return replace(after, streak=node.streak + 1, passed=most, record=record, doubt=doubt)


def unmeasured(node: NodeRow) -> NodeRow:
    """A node of a kind that nobody measured counts as on probation, so that all its work is audited fully: limits of a
    number format alone allow no statistical failure."""
    return node if node.on_probation or node.certified else replace(node, passed=PROBATION_AUDITS - 1, streak=0)


def unsure(node: NodeRow, verdict: Verdict, own_fault: bool) -> NodeRow:
    """`own_fault` if it was not our own machinery that failed."""
    record = recent(node.record.plus(verdict.tally))  # or a node could cause accidents at no risk
    after = replace(node, unsure=node.unsure + 1, record=record)
    if not own_fault:
        return after
    doubt = min(MOST_DOUBT, node.doubt + 1 - _forgiven(verdict))
    return replace(after, doubt=doubt, streak=min(node.streak, ALWAYS_UNTIL))


def _forgiven(verdict: Verdict) -> float:
    return min(MOST_FORGIVEN, max(LEAST_FORGIVEN, 2 * verdict.unsure_rate))


def failed(node: NodeRow, severity: Severity | None, check: str = "", now_ms: int = 0) -> NodeRow:
    """A statistical strike empties the record, so that a second strike needs evidence from later work only."""
    if severity is None:
        return replace(node, rejected=node.rejected + 1, soft=node.soft + 1)
    node = replace(node, rejected=node.rejected + 1, streak=0, passed=0)
    if severity is Severity.CERTAIN:
        return replace(node, certain=node.certain + 1)
    return replace(node, statistical=node.statistical + 1, record=Tally(), failed_check=check, failed_at_ms=now_ms)


def recent(record: Tally) -> Tally:
    """Channels at or below what is expected of honest work restart at zero: honest work cannot be saved up, and the
    evidence always covers one uninterrupted stretch of work."""
    above = {name: sums for name, sums in record.channels.items() if sums.seen > sums.expected}
    return record.model_copy(update={"channels": above})


def failing_kind(moment: Moment, node: NodeRow, same_kind: Sequence[NodeRow], verdict: Verdict) -> RaiseAlarm | None:
    """The alarm if most machines of this kind fail this statistical check. `same_kind` are the workers of the kind that
    failed it, or passed audits, within `WITHIN_MS`."""
    if verdict.outcome != Outcome.REJECTED or verdict.severity is not Severity.STATISTICAL:
        return None
    if node.is_ours or verdict.reason == STEERED:
        return None
    since_ms = moment.now_ms - WITHIN_MS
    failing, passing = [node], list[NodeRow]()
    for row in {row.node: row for row in same_kind if row.node != node.node}.values():
        if row.failed_check == verdict.reason and row.failed_at_ms >= since_ms:
            failing.append(row)
        elif row.passed > 0:
            passing.append(row)
    if (failures := independent(failing)) < MANY or failures <= independent(passing):
        return None
    what = f"most machines of kind {node.kind} fail {verdict.reason}, so their work is unsure"
    message = f"{what}: calibrate that kind again, and pardon who was banned for it before (`shoal admin pardon`)"
    return alarm(moment, f"kind.{verdict.reason}.{node.kind}", message)


def independent(nodes: Iterable[NodeRow]) -> int:
    rows = list(nodes)
    proven = sum(row.accepted >= PROBATION_AUDITS for row in rows)
    return proven + len({row.network for row in rows if row.accepted < PROBATION_AUDITS})


class Suspicion(Message):
    """The evidence of several nodes, and whether it has sufficed and is not forgotten yet."""

    evidence: GainEvidence = GainEvidence()
    distrusted: bool = False

    def after(self, verdict: Verdict) -> Suspicion:
        if verdict.outcome != Outcome.REJECTED:
            evidence = self.evidence.after(verdict.branches.differences)
        elif verdict.reason == STEERED:
            evidence = self.evidence.without(ENOUGH)
        else:
            return self
        still = self.distrusted and evidence.value > FORGOTTEN
        return Suspicion(evidence=evidence, distrusted=still or evidence.suffices)


def evidence_groups(node: NodeRow) -> dict[str, str]:
    found = {f"gains/{node.owner}": "its owner"} if node.owner else {}
    return found | ({NEWER: "newcomers"} if node.passed < POOLED_AUDITS else {})


def counted(node: NodeRow, verdict: Verdict) -> NodeRow:
    if verdict.outcome == Outcome.REJECTED:
        return replace(node, gains=GainEvidence()) if verdict.reason == STEERED else node
    return replace(node, gains=node.gains.after(verdict.branches.differences))
