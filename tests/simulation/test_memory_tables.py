"""The database in memory after a whole simulated run: its indexes are what its rows say, and an undone write left
nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.hub.state.commands import AddVerdict, RaiseAlarm, Record, SaveLease, SaveNode, SaveSubmission, SaveUnit
from shoal.hub.state.machines import LeaseState, SubmissionState, UnitState
from shoal.hub.state.rows import UnitRow
from shoal.hub.storage import MemoryStorage, StaleRow
from shoal.hub.storage.indexed import Counted, Grouped, Ordered, Unique
from shoal.hub.storage.memory_tables import Tables
from shoal.protocol import NodeState
from shoal.simulator import Scenario, Simulation, WorkerKind


def contents(tables: Tables) -> dict[str, Any]:
    """Rows and indexes as plain values; in groups the order is no matter."""
    found: dict[str, Any] = {"in hand": tables.hands.of("")}
    for name, table in tables.each().items():
        found[name] = dict(table.items())
        for number, index in enumerate(table._indexes):
            found[f"{name}/{number}"] = _plain(index)
    return found


def _plain(index: object) -> Any:
    if isinstance(index, Grouped):
        return {value: set(keys) for value, keys in index._groups.items()}
    if isinstance(index, Ordered):
        return list(index._entries)
    if isinstance(index, Unique):
        return dict(index._keys)
    return dict(index.counts) if isinstance(index, Counted) else None


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> MemoryStorage:
    crews = (
        WorkerKind(6, group_s=12, lives_s=90),
        WorkerKind(2, group_s=8, lies=0.3, fresh_keys=True),
        WorkerKind(1, delivers=False),
    )
    simulation = Simulation(tmp_path_factory.mktemp("run"), Scenario(crews=crews, seconds=200, equal=5))
    simulation.run()
    return simulation.world.storage


def test_indexes_are_what_the_rows_say(storage: MemoryStorage) -> None:
    assert contents(storage._tables) == contents(storage._tables.copy())


def test_a_write_that_fails_leaves_nothing(storage: MemoryStorage, tmp_path: Path) -> None:
    before = contents(storage._tables)
    tables = storage._tables

    def change_everything_and_fail() -> None:
        with storage.write() as transaction:
            number = transaction.progress().next_unit
            transaction.apply([SaveUnit(UnitRow(number, "t"), None)])
            transaction.apply([SaveUnit(UnitRow(number, "t", UnitState.VOID, reason="stale"), UnitState.OPEN)])
            node = transaction.nodes()[-1]
            transaction.apply([SaveNode(replace(node, state=NodeState.SUSPENDED, passed=99), node.state)])
            for held in transaction.holdings():
                transaction.apply([SaveLease(held.lease.to(LeaseState.EXPIRED, 1), held.lease.state)])
            row = transaction.submissions_in([SubmissionState.ACCEPTED], 1)[0]
            transaction.apply([SaveSubmission(replace(row, matures_at_ms=5), row.state)])
            transaction.apply([RaiseAlarm(0, "x", "y", 1), Record("policy", {"version": 1}, 1)])
            transaction.touch_presence(node.node, 10**15)
            transaction.take_nonce(node.node, "nonce", 5)
            transaction.forget_nonces(10**15, 100)
            transaction.put_setting("key", "value")
            transaction.apply([AddVerdict(row.submission, "{}")])  # there is one already

    with pytest.raises(StaleRow):
        change_everything_and_fail()
    assert storage._tables is tables, "undone in place, not by a copy"
    assert contents(storage._tables) == before


def test_a_view_inside_a_write_is_refused(storage: MemoryStorage) -> None:
    with storage.write(), pytest.raises(RuntimeError, match="use the transaction"), storage.read():
        pass
