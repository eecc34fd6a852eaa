"""The sums that the writer of an SQLite database keeps are what its rows say, during a run and after a failure."""

from pathlib import Path

import pytest

from shoal.hub.state.commands import AddPolicy, AddVerdict, Save
from shoal.hub.state.rows import InHand, LeaseState, RunProgress, UnitRow
from shoal.hub.storage import SqliteStorage, StaleRow
from shoal.protocol import NodeState, PolicyRef
from shoal.simulator import Scenario, Simulation, WorkerKind

CREWS = (
    WorkerKind(6, group_s=12, lives_s=90, network="10.0.0.0/24"),
    WorkerKind(2, group_s=8, lies=0.3, fresh_keys=True, network="10.0.1.0/24"),
    WorkerKind(2, delivers=False, network="10.0.2.0/24"),
    WorkerKind(1, group_s=9, proven=True),
)


def kept(storage: SqliteStorage, node: str) -> tuple[RunProgress, InHand]:
    with storage.write() as transaction:
        return transaction.progress(), transaction.newcomers_in_hand(node)


def counted(storage: SqliteStorage, node: str) -> tuple[RunProgress, InHand]:
    with storage.read() as reader:
        return reader.progress(), reader.newcomers_in_hand(node)


def present(sums: tuple[RunProgress, InHand]) -> tuple[RunProgress, InHand]:
    """Without the networks that have nothing in hand: they may be left out."""
    progress, hands = sums
    networks, unproven, long = (
        {network: units for network, units in part.items() if units}
        for part in (hands.networks, hands.unproven, hands.long)
    )
    return progress, InHand(hands.own, networks, unproven, long)


def require_equal(storage: SqliteStorage, node: str) -> InHand:
    sums = kept(storage, node)
    with storage.write() as transaction:
        alive = transaction.alive_counts()
    with storage.read() as reader:
        assert alive == reader.alive_counts()
    assert present(sums) == present(counted(storage, node))
    return sums[1]


def test_kept_sums_equal_the_rows_during_a_run(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, Scenario(workers=CREWS, seconds=200, equal=5, restarts_s=70))
    world = simulation.world
    seen: list[InHand] = []

    def look() -> bool:
        if world.events % 7 == 0:
            seen.append(require_equal(world.storage, simulation.workers[world.events % len(CREWS)].node))
        return False

    world.run(look)
    assert len(seen) > 100
    assert max(len(hands.networks) for hands in seen) == 3
    assert any(hands.own for hands in seen)
    assert any(hands.unproven != hands.networks for hands in seen), "nobody passed an audit"


def test_failed_write_leaves_the_kept_sums(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, Scenario(workers=CREWS, seconds=60))
    simulation.run()
    storage, node = simulation.world.storage, simulation.workers[0].node
    before = kept(storage, node)

    def change_everything_and_fail() -> None:
        with storage.write() as transaction:
            number = transaction.progress().next_unit
            transaction.apply([Save(UnitRow(number, "t"), None)])
            row = transaction.node(node)
            assert row is not None
            transaction.apply([Save(row.to(NodeState.SUSPENDED, passed=99), row.state)])
            held = transaction.holdings()
            transaction.apply(
                [Save(each.lease.to(LeaseState.EXPIRED, ended_at_ms=1), each.lease.state) for each in held]
            )
            transaction.apply([AddPolicy(PolicyRef(incarnation=9, version=9, digest="d" * 64), 1)])
            assert (transaction.progress(), transaction.newcomers_in_hand(node)) != before
            transaction.apply([AddVerdict("absent", "{}")])

    with pytest.raises(StaleRow):
        change_everything_and_fail()
    assert kept(storage, node) == before
    require_equal(storage, node)
