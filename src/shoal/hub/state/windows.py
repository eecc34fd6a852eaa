"""How many leases a node may hold: its window, which widens with every accepted group and halves when leases lapse.

    at first ─────────────────────────► a quarter of `leases_per_node`, at least one
    a group is accepted ──────────────► one more, up to `leases_per_node`
    leases lapse ─────────────────────► half, at least one; as many more leases lapsed in a row
      (ran out, lost by their node, or their node is gone)
    leases are given back ────────────► half, at least one; nothing lapsed, unless the window is one already
    a group is handed in ─────────────► nothing has lapsed in a row any more
    8 lapsed in a row and a window of one ─► suspended
    too many unsure groups (`reputation`) ─► one, until enough are accepted again

What lapses at one time halves once, however many leases it was: a machine that is switched off with eight leases has
failed once. Giving back halves too, because nobody can tell a worker that stops from one that takes units to keep them
from others, and back and forth would be free. By itself it does not suspend: to give back is better than to let lapse,
and a worker that stops every evening must not be shut out for it. But a node whose window is one and that gives back
again and again, with nothing delivered in between, only makes work for the hub: that counts as lapsed. So who takes and
never delivers holds 16, 8, 4, 2, 1 leases, then none for a minute, then one, then none for two minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.hub.state import reputation, sanctions
from shoal.hub.state.commands import Command, SaveNode
from shoal.hub.state.rows import LeaseRow, NodeRow, Rules
from shoal.protocol import NodeState

FIRST_PART = 4
LAPSES_TO_SUSPEND = 8
PACE_WEIGHT = 4
"""The newest measurement counts a quarter in a node's pace."""


def of(rules: Rules, node: NodeRow) -> int:
    """How many leases the node may hold now."""
    if node.doubt >= reputation.DOUBTED:
        return 1
    first = max(1, rules.leases_per_node // FIRST_PART)
    return min(node.window or first, rules.leases_per_node)


def widened(rules: Rules, node: NodeRow) -> NodeRow:
    """The node after a group of it was accepted."""
    return replace(node, window=min(of(rules, node) + 1, rules.leases_per_node))


def halved(rules: Rules, node: NodeRow) -> NodeRow:
    return replace(node, window=max(1, of(rules, node) // 2))


def lapse(rules: Rules, node: NodeRow, count: int, now_ms: int) -> list[Command]:
    """What it costs a node that `count` of its leases lapsed at one time."""
    after = replace(halved(rules, node), lapsed=node.lapsed + count, lapses=node.lapses + count)
    if node.state is NodeState.ACTIVE and after.window == 1 and after.lapses >= LAPSES_TO_SUSPEND:
        return sanctions.suspend(after, f"leases.lapsed: {after.lapses} leases in a row came to nothing", now_ms)
    return [SaveNode(after, node.state)]


def give_back(rules: Rules, node: NodeRow, count: int, now_ms: int) -> list[Command]:
    """What it costs a node to give `count` leases back."""
    if of(rules, node) == 1:
        return lapse(rules, node, count, now_ms)
    return [SaveNode(halved(rules, node), node.state)]


def delivered(node: NodeRow, lease: LeaseRow, now_ms: int) -> NodeRow:
    """The node after it handed something in for `lease`: it is at work, and this is how fast.

    Leases of one request are generated together and come back together, so each has taken its part of the time only.
    """
    took_ms = max(1, (now_ms - lease.issued_at_ms) // max(1, lease.granted))
    pace_ms = took_ms if node.pace_ms == 0 else (node.pace_ms * (PACE_WEIGHT - 1) + took_ms) // PACE_WEIGHT
    return replace(node, lapses=0, pace_ms=max(1, pace_ms))


def count_by_node(leases: Sequence[LeaseRow]) -> dict[str, int]:
    """How many of these leases each node has, in order of node."""
    counts: dict[str, int] = {}
    for lease in leases:
        counts[lease.node] = counts.get(lease.node, 0) + 1
    return dict(sorted(counts.items()))
