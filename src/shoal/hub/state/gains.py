"""Gains: what follows when the evidence says that tolerance was used to buy reward (`protocol.branches`).

    a node's evidence suffices ─► the validator rejects the group: a strike; the node's evidence begins anew
    its owner's does ──────────► groups of all nodes of that owner with tokens that pass by tolerance are unsure
    that of newer nodes does ──► the same for nodes on probation, and an alarm: nobody gains by changing keys

Owners and newer nodes are trusted again once the evidence has fallen to 10³: unsure groups are looked at, too. What a
node is struck for is taken out of the others' evidence, so that one cheater does not shut out all newcomers.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.hub.state.commands import Command, RaiseAlarm
from shoal.hub.state.rows import Moment, NodeRow
from shoal.protocol import Outcome, Verdict
from shoal.protocol.branches import ENOUGH, FORGOTTEN, GainEvidence
from shoal.protocol.signing import Message

STEERED = "sampling.steered"
POOLED_AUDITS = 128
"""Full audits until a node's evidence is its own alone: about as many as that takes to suffice."""
NEWER = "gains/newer"


class Suspicion(Message):
    """The evidence of several nodes together, and whether it has sufficed and is not forgotten yet."""

    evidence: GainEvidence = GainEvidence()
    distrusted: bool = False

    def after(self, verdict: Verdict) -> Suspicion:
        if verdict.outcome == Outcome.REJECTED:
            return self._counted(self.evidence.without(ENOUGH)) if verdict.reason == STEERED else self
        return self._counted(self.evidence.after(verdict.branches.differences))

    def _counted(self, evidence: GainEvidence) -> Suspicion:
        still = self.distrusted and evidence.value > FORGOTTEN
        return Suspicion(evidence=evidence, distrusted=still or evidence.suffices)


def groups_of(node: NodeRow) -> dict[str, str]:
    """Whose evidence a node's work counts for beside its own: the settings that hold it, and what they are called."""
    found = {f"gains/{node.owner}": "its owner"} if node.owner else {}
    return found | ({NEWER: "newcomers"} if node.passed < POOLED_AUDITS else {})


def counts(verdict: Verdict) -> bool:
    """Whether the verdict says anything of branches."""
    return bool(verdict.branches.differences) or verdict.reason == STEERED


def counted(node: NodeRow, verdict: Verdict) -> NodeRow:
    """The node with what the branches of its submission showed."""
    if verdict.outcome == Outcome.REJECTED:
        return replace(node, gains=GainEvidence()) if verdict.reason == STEERED else node
    return replace(node, gains=node.gains.after(verdict.branches.differences))


def alarm(moment: Moment, whose: str) -> Command:
    step = moment.progress.next_step
    message = (
        f"step {step}: tokens that pass only by the tolerance are chosen for their reward, by nodes of "
        f"{'one owner' if whose == 'its owner' else 'newcomers'}; their groups with such tokens are given out again"
    )
    return RaiseAlarm(step, STEERED, message, moment.now_ms)
