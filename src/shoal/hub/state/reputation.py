"""Reputation: how deeply a node's next submission is audited, and what audits do to its record.

    full audit passed ─► streak + 1, passed + 1; its tally joins the record
    light audit passed ─► nothing: it proved nothing
    rejected ─► streak 0; by a strike also passed 0: on probation again; by a statistical one also an empty record
    unsure ─► its tally joins the record; its doubt grows; the streak is cut to 10: the next ones are audited fully

Doubt is a cumulative sum: + 1 for an unsure group that is not our own machinery's fault, - k for one that a full audit
accepted, never below 0, where k is twice the rate at which honest work of that kind is unsure (`Verdict.unsure_rate`),
and 1/64 at least. From `DOUBTED` on a node has one lease at a time (`windows`). Honest work that is unsure at that very
rate gets there once in 60,000 groups (rate 0.5 %), 2,900 (2 %) or 1,600 (5 %), and is there for 0.5 % of its groups at
most; who is always unsure is there after four.

Only full audits raise the streak. If light ones did, a sleeper would need 200 honest submissions to be audited at 5 %,
about 40 of them fully; so it needs about 2,000, because at p = 10/streak the next full audit is streak/10 submissions
away. And a streak cannot be lengthened by what nobody looked at.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.hub.state.rows import PROBATION_AUDITS, NodeRow, Rules
from shoal.protocol import Depth, Severity, Tally, Verdict

ALWAYS_UNTIL = 10
LEAST = 0.05
FORGIVEN_AFTER = 1_000
"""Full audits passed since a statistical strike after which it is forgotten, and how often the node was suspended.
Honest work fails such a check once in 10,000 audits or so: without this every honest node would be banned in the long
run."""
DOUBTED, MOST_DOUBT, LEAST_FORGIVEN = 3.5, 4.5, 1 / 64


def full_audit_probability(rules: Rules, node: NodeRow) -> float:
    """How likely it is that the next submission of `node` is audited fully.

    0 for a validator's own groups: its computing needs no proof. Under `audit = "reputation"`: 1 on probation and up to
    a streak of 10, then 10/streak, and never below 5 %.
    """
    if node.trusted:
        return 0.0
    if rules.audit == "all" or node.on_probation or node.streak <= ALWAYS_UNTIL:
        return 1.0
    return max(LEAST, ALWAYS_UNTIL / node.streak)


def depth_for(rules: Rules, node: NodeRow, fraction: float) -> Depth:
    """The depth that the draw `fraction`, a number in [0, 1), means for this node."""
    return "full" if fraction < full_audit_probability(rules, node) else "light"


def passed(node: NodeRow, verdict: Verdict) -> NodeRow:
    """The node after an accepted submission."""
    after = replace(node, accepted=node.accepted + 1, soft=0)
    if verdict.depth != "full":
        return after
    streak, most = node.streak + 1, node.passed + 1
    if not verdict.measured:  # by limits of its number format alone nobody is more than a newcomer
        most = max(node.passed, min(most, PROBATION_AUDITS - 1))
    return replace(
        after,
        streak=streak,
        passed=most,
        statistical=0 if most >= FORGIVEN_AFTER else node.statistical,
        suspensions=0 if most >= FORGIVEN_AFTER else node.suspensions,
        record=of_late(node.record.plus(verdict.tally)),
        doubt=max(0.0, node.doubt - _forgiven(verdict)),
    )


def unmeasured(node: NodeRow) -> NodeRow:
    """The node as it asks to work as a kind that nobody has measured: a newcomer at most, whatever it was before. By
    limits of its number format alone nothing it does is a statistical failure, so everything is audited fully."""
    return node if node.on_probation else replace(node, passed=PROBATION_AUDITS - 1, streak=0)


def unsure(node: NodeRow, verdict: Verdict, own_fault: bool) -> NodeRow:
    """The node after an unsure audit; `own_fault` if it was not our own machinery that failed."""
    record = of_late(node.record.plus(verdict.tally))  # so that accidents are not for the asking
    if not own_fault:
        return replace(node, unsure=node.unsure + 1, record=record)
    doubt = min(MOST_DOUBT, node.doubt + 1 - _forgiven(verdict))
    return replace(node, unsure=node.unsure + 1, record=record, doubt=doubt, streak=min(node.streak, ALWAYS_UNTIL))


def _forgiven(verdict: Verdict) -> float:
    return min(1.0, max(LEAST_FORGIVEN, 2 * verdict.unsure_rate))


def failed(node: NodeRow, severity: Severity | None, check: str = "", now_ms: int = 0) -> NodeRow:
    """The node after a rejected submission, for the reason `check`. What led to a statistical strike never counts
    again: the next one rests on a record of its own."""
    if severity is Severity.STATISTICAL:
        node = replace(node, record=Tally(), failed_check=check, failed_at_ms=now_ms)
    return replace(
        node,
        rejected=node.rejected + 1,
        certain=node.certain + (severity == Severity.CERTAIN),
        statistical=node.statistical + (severity == Severity.STATISTICAL),
        streak=node.streak if severity is None else 0,
        passed=node.passed if severity is None else 0,
        soft=node.soft + 1 if severity is None else node.soft,
    )


def of_late(record: Tally) -> Tally:
    """The record without channels that are no higher than honest work's: they begin anew.

    So honest work is not saved up to be spent later, and the evidence is always of one stretch of work.

    >>> from shoal.protocol import Sums
    >>> sorted(of_late(Tally(channels={"a": Sums(seen=2, expected=3), "b": Sums(seen=3, expected=2)})).channels)
    ['b']
    """
    above = {name: sums for name, sums in record.channels.items() if sums.seen > sums.expected}
    return record.model_copy(update={"channels": above})
