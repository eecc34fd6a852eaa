"""An honest newcomer among throwaway keys: the real services, under the simulator's clock.

Four established machines and one newcomer take 10 s for a group. Beside them come twelve fresh keys of another network,
of three others, or of its own, that want the newcomers' share for nothing. They leave the honest newcomer at least half
of what it gets undisturbed.
A slow machine, whose group takes three times `lease_s`, gets in beside fast ones, too.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shoal.hub import HubSettings, RunSettings
from shoal.hub.state.rows import NodeRow
from shoal.protocol import LeaseRelease, ProofParameters
from shoal.simulator import Scenario, Simulation, WorkerKind
from shoal.simulator.simulation import TOKENS, Generating, SimulatedWorker

HOME, ADDRESS, FLOOD = "192.0.2.0/24", "192.0.2.7", "198.51.100.0/24"
THREE = (FLOOD, "203.0.113.0/24", "2001:db8:1::/48")
SECONDS = 300.0
KEYS = 12


class GivesBack(SimulatedWorker):
    """Takes units and gives them back a second later, with a fresh key once it is suspended."""

    def _take(self, lease: dict[str, Any], life: int) -> None:
        self._work[lease["lease"]] = Generating(lease, self._world.now_s + 1)
        self._world.at(1.0, lambda: self._give_back(lease["lease"]))

    def _give_back(self, name: str) -> None:
        row = self._world.signed_in(self.node)
        self._world.hub.work.release(row, LeaseRelease(leases=(name,)))
        self._work.clear()
        if row.suspensions:
            self.node = ""
            self._life += 1
            self.arrive()
        else:
            self.ask()


class AllAtOnce(SimulatedWorker):
    """Like an engine that decodes all rollouts together: progress is there only with a whole chunk of each of them."""

    def _progress(self) -> dict[str, int]:
        run = self._world.scenario.run
        wanted, chunks = TOKENS * run.group_size, run.max_new_tokens // ProofParameters().rows
        said = super()._progress()
        return {name: tokens * chunks // wanted * wanted // max(1, chunks) for name, tokens in said.items()}


class Registers:
    """Registers a key every second and never asks for anything."""

    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation.world

    def arrive(self) -> None:
        self._world.counts["registered"] += 1
        self._world.register(self._world.key(f"idle/{self._world.counts['registered']}"))
        self._world.at(1.0, self.arrive)


Flood = Callable[[Simulation, str], None]


def come(simulation: Simulation, spec: WorkerKind, kind: type[SimulatedWorker] = SimulatedWorker) -> None:
    for _ in range(spec.count):
        simulation.world.at(0, kind(simulation.world, spec).arrive)


FLOODS: dict[str, Flood] = {
    "sit on leases": lambda simulation, network: come(simulation, WorkerKind(KEYS, delivers=False, network=network)),
    "pretend to make progress": lambda simulation, network: come(
        simulation, WorkerKind(KEYS, delivers=False, pretends=True, network=network)
    ),
    "submit rubbish at once": lambda simulation, network: come(
        simulation, WorkerKind(KEYS, group_s=0.1, lies=1.0, fresh_keys=True, network=network)
    ),
    "give leases back": lambda simulation, network: come(simulation, WorkerKind(KEYS, network=network), GivesBack),
    "register only": lambda simulation, _network: simulation.world.at(0, Registers(simulation).arrive),
}


def newcomer_after(
    flood: Flood | None, networks: tuple[str, ...] = (FLOOD,), established: int = 4, group_s: float = 10,
    lease_s: float = 60, seconds: float = SECONDS, tokens: int = 16, kind: type[SimulatedWorker] = SimulatedWorker,
) -> NodeRow:  # fmt: skip
    """The honest newcomer when the time is over. It comes two seconds after the flood."""
    spec = WorkerKind(1, group_s=group_s, spread=0.0, network=HOME, address=ADDRESS)
    workers = (WorkerKind(established, group_s=10, proven=True),)
    scenario = Scenario(
        workers=workers, seconds=seconds,
        run=RunSettings(steps=10**6, groups_per_step=8, group_size=16, max_staleness=1, max_new_tokens=tokens),
        hub=HubSettings(lease_s=lease_s), train_s=1.0, heartbeat_s=1.0, arrive_s=2.0,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        simulation = Simulation(Path(folder), scenario)
        for network in networks:
            if flood is not None:
                flood(simulation, network)
        worker = kind(simulation.world, spec)
        simulation.world.at(2.0, worker.arrive)
        simulation.run()
        return simulation.world.known(worker.node)


@cache
def undisturbed(established: int = 4, seconds: float = SECONDS) -> int:
    return newcomer_after(None, established=established, seconds=seconds).accepted


@pytest.mark.parametrize("name", FLOODS)
def test_flood_from_another_network_leaves_a_newcomer_half(name: str) -> None:
    assert newcomer_after(FLOODS[name]).accepted >= undisturbed() / 2 > 10


@pytest.mark.parametrize("established", [4, 0])
@pytest.mark.parametrize("name", ["sit on leases", "pretend to make progress"])
def test_flood_from_three_networks_leaves_a_newcomer_half(name: str, established: int) -> None:
    """They have all that newcomers may have when it comes; half of that ends after `lease_s`, whatever they show."""
    found = newcomer_after(FLOODS[name], THREE, established)
    assert found.accepted >= undisturbed(established) / 2 > 10


@pytest.mark.parametrize("name", ["sit on leases", "pretend to make progress", "submit rubbish at once"])
def test_flood_from_the_newcomers_network_leaves_it_half(name: str) -> None:
    assert newcomer_after(FLOODS[name], (HOME,)).accepted >= undisturbed() / 2 > 10


@pytest.mark.parametrize("name", ["sit on leases", "pretend to make progress", "submit rubbish at once"])
def test_flood_in_a_young_run_leaves_a_newcomer_half(name: str) -> None:
    assert newcomer_after(FLOODS[name], established=0).accepted >= undisturbed(0) / 2 > 10


@pytest.mark.parametrize("flood", [None, FLOODS["pretend to make progress"]], ids=["alone", "in a flood"])
def test_slow_newcomer_gets_in_beside_fast_nodes(flood: Flood | None) -> None:
    row = newcomer_after(flood, group_s=30, lease_s=10)
    assert row.accepted >= 3
    assert (row.rejected, row.lapsed, row.suspensions) == (0, 0, 0)


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_slow_newcomer_with_few_chunks_gets_in(tokens: int) -> None:
    """Chunks have 32 tokens: with 64 the first is there after 1.5 times `lease_s`, with fewer there is none in time."""
    row = newcomer_after(None, group_s=30, lease_s=10, seconds=450, tokens=tokens, kind=AllAtOnce)
    assert row.accepted >= 10, "past probation"
    assert (row.rejected, row.lapsed, row.suspensions) == (0, 0, 0)
