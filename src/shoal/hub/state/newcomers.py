"""Newcomers: nodes on probation share a bounded part of the run, so that a flood of fresh keys starves nobody.

docs/concepts/leases.md lists the rules and what each stops. They hold only while established nodes are here; with
`newcomer_share = 1` none holds. A newcomer can still delay a synchronous step by as long as its lease lasts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.hub.state import pacing
from shoal.hub.state.rows import InHand, Moment, NodeRow, SubmissionRow

HERE_MS = 30_000
"""An established node that was heard of within this time is here; one that asked for work within it is asking."""
SLACK = 2 * 6 * 16
"""The most units that two hubs of one database give out at the same moment (six decisions each, 16 units): while more
units than that are left to a bound, it is checked without a lock."""
FIRST_UNITS = 1
"""Units in hand of a key that has passed no audit. They count until they are judged: rubbish is submitted at once."""


@dataclass(frozen=True)
class Crowd:
    """What all nodes on probation have in hand; whether established nodes are here, and asking; how many networks go
    before this node's (`ahead`), and how many addresses and keys of its own (`ahead_inside`); how many units its
    address has `taken` since a group from there was accepted."""

    in_hand: InHand = field(default_factory=InHand)
    established: bool = False
    asking: bool = False
    ahead: int = 0
    ahead_inside: int = 0
    taken: int = 0


def most_in_hand(moment: Moment) -> int:
    share = moment.rules.newcomer_share
    return max(int(share > 0), int(share * pacing.cap(moment.rules, moment.progress)))


def room_for(moment: Moment, node: NodeRow, crowd: Crowd) -> int | None:
    own = own_room(moment, node, crowd)
    bounds = [] if own is None else [own]
    if is_bounded(moment, node, crowd):
        bounds.append(most_in_hand(moment) - counted(moment, node, crowd))
    return max(0, min(bounds)) if bounds else None


def counted(moment: Moment, node: NodeRow, crowd: Crowd) -> int:
    """How many units newcomers have in hand, as counted for this node: each other network counts at most half of the
    share, and so do the long leases of all other networks together. An address that wastes units gets no such
    reduction: for it all units count."""
    most, networks = half(most_in_hand(moment)), crowd.in_hand.networks
    if _rounds(crowd, most):
        return sum(networks.values())
    units = sum(count if network in ("", node.network) else min(count, most) for network, count in networks.items())
    return units - max(0, _long_elsewhere(node, crowd, most) - most) - _excess(node, crowd, most)


def half(units: int) -> int:
    return max(1, units // 2)


def own_room(moment: Moment, node: NodeRow, crowd: Crowd) -> int | None:
    if not node.unproven or moment.rules.newcomer_share >= 1:
        return None
    own = FIRST_UNITS - crowd.in_hand.own
    return min(own, _network_room(moment, node, crowd)) if node.network else own


def _all_together(moment: Moment, crowd: Crowd) -> int:
    return most_in_hand(moment) if crowd.established else pacing.cap(moment.rules, moment.progress)


def _network_room(moment: Moment, node: NodeRow, crowd: Crowd) -> int:
    most = half(_all_together(moment, crowd))
    rounds, unproven = _rounds(crowd, most), crowd.in_hand.unproven.get(node.network, 0)
    return max(1, most >> 2 * rounds) - unproven if rounds else most - unproven + _excess(node, crowd, most)


def _long_elsewhere(node: NodeRow, crowd: Crowd, most: int) -> int:
    return sum(min(units, most) for network, units in crowd.in_hand.long.items() if network not in ("", node.network))


def _excess(node: NodeRow, crowd: Crowd, most: int) -> int:
    """By how many the long leases of new keys of the node's network exceed half of its `most` units."""
    return max(0, crowd.in_hand.long.get(node.network, 0) - half(most)) if node.network else 0


def _rounds(crowd: Crowd, most: int) -> int:
    """How often this node's address has taken half of its network's units without an accepted group."""
    return crowd.taken // half(most)


def is_brief(moment: Moment, node: NodeRow, crowd: Crowd) -> bool:
    if not node.unproven or not node.network or moment.rules.newcomer_share >= 1:
        return False
    most, own = _all_together(moment, crowd), crowd.in_hand.long.get(node.network, 0)
    of_a_network = half(half(most))
    return own >= of_a_network or own + _long_elsewhere(node, crowd, of_a_network) >= half(most)


def left_by_turns(moment: Moment, node: NodeRow, crowd: Crowd, free: int) -> int:
    """How many of `free` units are left for this node's network once each network that goes first has one."""
    if not node.on_probation or moment.rules.newcomer_share >= 1:
        return free
    if is_bounded(moment, node, crowd):
        free = min(free, most_in_hand(moment) - counted(moment, node, crowd))
    return max(0, free - crowd.ahead)


def left_inside(moment: Moment, node: NodeRow, crowd: Crowd, left: int) -> int:
    """How many units of those `left` for its network remain once each address and key that goes first has one."""
    if not node.on_probation or not node.network or moment.rules.newcomer_share >= 1:
        return left
    if node.unproven:
        left = min(left, _network_room(moment, node, crowd))
    return max(0, left - crowd.ahead_inside)


def is_bounded(moment: Moment, node: NodeRow, crowd: Crowd) -> bool:
    return node.on_probation and crowd.established and moment.rules.newcomer_share < 1


def is_tight(moment: Moment, node: NodeRow, crowd: Crowd) -> bool:
    """Whether decisions at the same moment could together exceed what newcomers, or one network's, may have."""
    left = [most_in_hand(moment) - counted(moment, node, crowd)] if is_bounded(moment, node, crowd) else []
    if node.unproven and node.network and moment.rules.newcomer_share < 1:
        left.append(_network_room(moment, node, crowd))
    return min(left, default=SLACK) < SLACK


def choose(
    established: Sequence[SubmissionRow], newcomers: Sequence[SubmissionRow], saved: float, count: int, share: float
) -> tuple[list[SubmissionRow], float]:
    """The `count` submissions that are audited next, and the tokens `saved` for newcomers after that. Each audit of an
    established node's group saves tokens for newcomers, so that these get `share` of all audited tokens; a newcomer's
    group is next once its tokens are saved. If one side has nothing to audit, the other gets the rest."""
    if not newcomers:
        return list(established[:count]), 0.0
    first, second = deque(established[:count]), deque(newcomers)
    most = max(max(1, row.tokens) for row in (*first, *second))
    chosen: list[SubmissionRow] = []
    while len(chosen) < count and (first or second):
        if second and (not first or saved >= max(1, second[0].tokens)):
            chosen.append(second.popleft())
            saved = max(0.0, saved - max(1, chosen[-1].tokens))
        else:
            chosen.append(first.popleft())
            saved += max(1, chosen[-1].tokens) * share / (1 - share)
    return chosen, min(
        saved, most / (1 - share)
    )  # at most the largest group's, or a long pause of newcomers would be paid back at once
