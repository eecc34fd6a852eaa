"""Reputation: how deeply a node's next submission is audited, and what audits do to its record.

    full audit passed ─► streak + 1, passed + 1; its tally joins the record
    light audit passed ─► nothing: it proved nothing
    rejected ─► streak 0; by a strike also passed 0: on probation again
    unsure ─► nothing

Only full audits raise the streak. If light ones did, a sleeper would need 200 honest submissions to be audited at 5 %,
about 40 of them fully; so it needs about 2,000, because at p = 10/streak the next full audit is streak/10 submissions
away. And a streak cannot be lengthened by what nobody looked at.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.hub.state.rows import NodeRow, Rules
from shoal.protocol import Depth, Severity, Tally, Verdict

ALWAYS_UNTIL = 10
LEAST = 0.05
FORGIVEN_AFTER = 1_000
"""Full audits passed in a row after which a statistical strike is forgotten, and how often the node was suspended.
Honest work fails such a check once in 10,000 audits or so: without this every honest node would be banned in the long
run."""
RECORD_TOKENS = 65_536


def full_audit_probability(rules: Rules, node: NodeRow) -> float:
    """How likely it is that the next submission of `node` is audited fully.

    Under `audit = "reputation"`: 1 on probation and up to a streak of 10, then 10/streak, and never below 5 %.
    """
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
    streak = node.streak + 1
    return replace(
        after,
        streak=streak,
        passed=node.passed + 1,
        statistical=0 if streak >= FORGIVEN_AFTER else node.statistical,
        suspensions=0 if streak >= FORGIVEN_AFTER else node.suspensions,
        record=of_late(node.record.plus(verdict.tally)),
    )


def failed(node: NodeRow, severity: Severity | None) -> NodeRow:
    """The node after a rejected submission."""
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
    """The record with what is long ago weighing less: all sums are halved once it is of more than 65,536 tokens.

    >>> of_late(Tally(tokens=65_538, outside=7, distance=1.0)).outside
    3
    """
    if record.tokens <= RECORD_TOKENS:
        return record
    return Tally(
        tokens=record.tokens // 2,
        entropy=record.entropy / 2,
        outside=record.outside // 2,
        distance=record.distance / 2,
        accidents=record.accidents // 2,
        proof_values=record.proof_values // 2,
        exponent_mismatches=record.exponent_mismatches // 2,
        mantissa_error=record.mantissa_error / 2,
    )
