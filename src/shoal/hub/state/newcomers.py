"""Newcomers: nodes on probation share a bounded part of the run, so that a flood of fresh keys starves nobody.

    units      together they may have `newcomer_share` of the units that may be alive in hand: leased, or handed in and
               not judged yet. Who hands in rubbish at once must not get the next unit before the first is judged.
    again      a unit that was given out before goes to an established node while one is asking, and has delivered of
               late: a newcomer can delay a unit once, not as often as there are keys.
    audits     together they get `newcomer_share` of the audits that are claimed, and what established nodes leave.

All this holds only while established nodes are here. At the start of a run, or when they are gone, newcomers take all.
A synchronous step needs every one of its units: newcomers who sit on theirs can still delay each by one `lease_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.hub.state import pacing
from shoal.hub.state.rows import Moment, NodeRow, SubmissionRow

HERE_MS = 30_000
"""An established node that was heard of within this time is here; one that asked for work within it is asking."""


@dataclass(frozen=True)
class Crowd:
    """Nodes on probation, all together: the units in their hands; whether established nodes are here, and asking."""

    in_hand: int = 0
    established: bool = False
    asking: bool = False


def most_in_hand(moment: Moment) -> int:
    """How many units newcomers together may have in hand while established nodes are here: at least one, if any."""
    share = moment.rules.newcomer_share
    return max(int(share > 0), int(share * pacing.cap(moment.rules, moment.progress)))


def room_for(moment: Moment, node: NodeRow, crowd: Crowd) -> int | None:
    """How many more units this node may take as far as newcomers' share goes; None if there is no bound."""
    if not is_bounded(moment, node, crowd):
        return None
    return max(0, most_in_hand(moment) - crowd.in_hand)


def may_try_again(moment: Moment, node: NodeRow, crowd: Crowd) -> bool:
    """Whether this node may take a unit that somebody else had before."""
    return not (is_bounded(moment, node, crowd) and crowd.asking)


def is_bounded(moment: Moment, node: NodeRow, crowd: Crowd) -> bool:
    return node.on_probation and crowd.established and moment.rules.newcomer_share < 1


@dataclass(frozen=True)
class Queue:
    """Submissions that wait for an audit, each part lowest unit first; `owed` audits are saved up for newcomers."""

    established: Sequence[SubmissionRow]
    newcomers: Sequence[SubmissionRow]
    owed: float = 0.0


def choose(queue: Queue, count: int, share: float) -> tuple[list[SubmissionRow], float]:
    """Which `count` submissions are audited next, and what is owed to newcomers after that.

    What a share of a small claim leaves over is saved up: a validator that takes one at a time takes every fourth from
    newcomers, if they get a quarter. What one side leaves the other takes.
    """
    if not queue.newcomers:
        return list(queue.established[:count]), 0.0
    owed = min(queue.owed + share * count, count + 1.0)
    quota = min(len(queue.newcomers), int(owed), count)
    established = queue.established[: count - quota]
    newcomers = queue.newcomers[: count - len(established)]
    return [*established, *newcomers], max(0.0, owed - len(newcomers))
