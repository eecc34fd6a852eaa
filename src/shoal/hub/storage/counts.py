"""Counts over all rows, kept by the one process that writes to an SQLite file.

    where the run stands (`Progress`)     kept while units are leased and submitted; read again after anything else
    how many units are alive, by state    kept until an accepted one changes: it may have been in a batch, or not
    what newcomers have in hand           a sum for each network; a node whose rows changed is read again, alone
    nodes                                 rows as they were read or written last: every request asks for one

What a failed transaction has changed is read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from shoal.hub.state import rows
from shoal.hub.state.commands import AddBatch, AddPolicy, Command, Save
from shoal.hub.state.rows import NodeRow, Progress, UnitRow, UnitState
from shoal.hub.storage.reader import IN_HAND, NEWCOMER, UNJUDGED
from shoal.hub.storage.writer import Writer

NODES_KEPT = 20_000


class Hands:
    """Units in hand of each node on probation, and sums by network: all, those of unproven nodes, and of these the ones
    that are not brief. Nodes in `changed` are to be read again."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.changed = set(nodes)
        self._nodes: dict[str, tuple[str, list[int]]] = {}
        self._networks: dict[str, list[int]] = {}

    def refresh(self, read: Callable[[str], tuple[str, list[int]] | None]) -> None:
        for node in self.changed:
            self._add(self._nodes.pop(node, None), -1)
            now = read(node)
            if now is not None and any(now[1]):
                self._nodes[node] = now
                self._add(now, 1)
        self.changed.clear()

    def _add(self, held: tuple[str, list[int]] | None, sign: int) -> None:
        if held is not None:
            network, counts = held
            before = self._networks.pop(network, [0, 0, 0])
            after = [one + sign * other for one, other in zip(before, counts, strict=True)]
            if any(after):
                self._networks[network] = after

    def of(self, node: str) -> rows.InHand:
        own = self._nodes[node][1][0] if node in self._nodes else 0
        parts = ({network: sums[place] for network, sums in self._networks.items()} for place in range(3))
        return rows.InHand(own, *parts)


class Counts:
    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.alive: Counter[UnitState] | None = None
        self.hands: Hands | None = None
        self.nodes: dict[str, NodeRow] = {}

    def forget(self) -> None:
        self.progress = self.alive = self.hands = None
        self.nodes.clear()


class CountingWriter(Writer):
    def __init__(self, connection: Connection, counts: Counts) -> None:
        super().__init__(connection)
        self._counts = counts
        self._changed: set[str] = set()  # nodes, by this transaction
        self._is_moved = False

    def undone(self) -> None:
        if self._is_moved:
            self._counts.progress = self._counts.alive = None
        if self._counts.hands is not None:
            self._counts.hands.changed |= self._changed
        for node in self._changed:
            self._counts.nodes.pop(node, None)

    def node(self, node: str) -> NodeRow | None:
        known = self._counts.nodes.get(node)
        if known is None and (known := super().node(node)) is not None:
            if len(self._counts.nodes) >= NODES_KEPT:
                self._counts.nodes.clear()
            self._counts.nodes[node] = known
        return known

    def progress(self, counted: bool = True) -> Progress:  # noqa: ARG002  it is kept
        if self._counts.progress is None:
            self._counts.progress = super().progress()
        return self._counts.progress

    def alive_counts(self) -> dict[UnitState, int]:
        if self._counts.alive is None:
            self._counts.alive = Counter(super().alive_counts())
        return dict(+self._counts.alive)

    def newcomers_in_hand(self, node: str) -> rows.InHand:
        if self._counts.hands is None:
            self._counts.hands = Hands(holder for (holder,) in self._rows(_HOLDERS))
        self._counts.hands.refresh(self._hand)
        return self._counts.hands.of(node)

    def _hand(self, node: str) -> tuple[str, list[int]] | None:
        found = self._rows(_HAND, node=node)
        if not found:
            return None
        network, passed, leased, brief, submitted = found[0]
        units = leased + submitted
        return network, [units, 0, 0] if passed else [units, units, leased - brief]

    def _apply(self, command: Command) -> None:
        super()._apply(command)
        if isinstance(command, AddBatch | AddPolicy):
            self._counts.progress, self._is_moved = None, True
        elif isinstance(command, Save) and isinstance(command.row, UnitRow):
            self._unit_moved(command.row, command.was)
        elif isinstance(command, Save) and _moves_units(command):
            self._changed.add(command.row.node)
            self._counts.nodes.pop(command.row.node, None)
            if self._counts.hands is not None:
                self._counts.hands.changed.add(command.row.node)

    def _unit_moved(self, row: UnitRow, was: Any) -> None:
        counts, self._is_moved = self._counts, True
        is_new, is_kept = was is None, was in rows.UNDECIDED_UNITS
        if counts.progress is not None:
            if row.alive and is_new and row.unit == counts.progress.next_unit:
                counts.progress = replace(counts.progress, next_unit=row.unit + 1, alive=counts.progress.alive + 1)
            elif not (row.alive and is_kept):
                counts.progress = None
        if not (is_new or is_kept):
            counts.alive = None
        elif counts.alive is not None:
            if is_kept:
                counts.alive[UnitState(was)] -= 1
            counts.alive[row.state] += row.alive


_HOLDERS = f"SELECT DISTINCT node FROM ({IN_HAND}) AS hands"
_LEASED = f"SELECT count(*) FROM leases WHERE leases.node = :node AND leases.state = '{rows.LeaseState.ACTIVE}'"
_HAND = f"""SELECT nodes.network, nodes.passed, ({_LEASED}), ({_LEASED} AND leases.brief),
    (SELECT count(*) FROM submissions WHERE submissions.node = :node AND {UNJUDGED})
    FROM nodes WHERE nodes.node = :node AND {NEWCOMER}"""


def _moves_units(command: Save[Any]) -> bool:
    """Whether a node may have more or fewer units in hand, or count otherwise."""
    row, was = command.row, command.was
    if isinstance(row, rows.LeaseRow):
        return was is not row.state
    if isinstance(row, rows.SubmissionRow):
        return (was in rows.UNDECIDED_SUBMISSIONS) != (row.state in rows.UNDECIDED_SUBMISSIONS)
    return isinstance(row, NodeRow)
