"""How much work comes too late to be trained on, with and without pacing by the fleet's speed?

    python benchmarks/wasted_work.py [--seconds 1800] [--staleness 1,2,4] [--seed 0]

The real hub services over a storage in memory, under the simulator's clock. A step has 128 groups and trains for 5 s,
one validator audits 16 groups a second, nobody is on probation. Everybody asks for 8 groups at a time and generates
them in one call, which takes 8 times as long as one group:

    fast      8 machines,  2 s for a group
    middling  8 machines,  8 s for a group
    slow      4 machines, 40 s for a group

`unpaced` is the alternative: everybody gets as many units as it asks for, whatever it takes (leases last while their
worker goes on, as always). A group is wasted if it is accepted when its policy is too old for the next step, or refused
because its unit had gone to somebody else. Both columns are of the same run of this script, under the same seed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from shoal.engines.groups import submission_of
from shoal.engines.protocol import Completion
from shoal.hub import HubSettings, RunSettings
from shoal.hub.changes import Topic
from shoal.hub.service.reporting import read_figures
from shoal.hub.state import pacing
from shoal.hub.state.commands import Refusal
from shoal.protocol import Heartbeat, Lease, LeaseRequest, pack
from shoal.simulator import Scenario
from shoal.simulator.simulation import TOKENS, SimulatedTrainer, SimulatedValidator
from shoal.simulator.world import World

FLEET = (("fast", 8, 2.0), ("middling", 8, 8.0), ("slow", 4, 40.0))
UNITS = 8
GROUPS_PER_STEP, GROUP_SIZE = 128, 2
TRAIN_S, AUDIT_S = 5.0, 1 / 16
_DRAWN = Completion(np.arange(TOKENS, dtype=np.int32), np.full(TOKENS, -0.5, dtype=np.float32), "eos")


class Machine:
    """A worker that generates all that it was leased in one call, and submits it at the end."""

    def __init__(self, world: World, kind: str, number: int, group_s: float) -> None:
        self._world, self.kind = world, kind
        self._group_s = group_s
        self._key = world.key(f"{kind}/{number}")
        self._asked = 0
        self._began_s = 0.0
        self._leases: list[Lease] = []
        self.node = ""

    def arrive(self) -> None:
        self.node = self._world.register(self._key)
        self._world.prove(self.node)
        self._beat()
        self.ask()

    def _beat(self) -> None:
        done = (self._world.now_s - self._began_s) / (self._group_s * max(1, len(self._leases)))
        tokens = min(TOKENS * GROUP_SIZE, int(TOKENS * GROUP_SIZE * done))
        progress = {lease.lease: tokens for lease in self._leases}
        self._world.hub.membership.heartbeat(self._world.signed_in(self.node), Heartbeat(progress=progress))
        self._world.at(self._world.scenario.heartbeat_s, self._beat)

    def ask(self) -> None:
        self._asked += 1
        request = LeaseRequest(request=f"{self.node[:16]}-{self._asked:08d}", max_units=UNITS, held=())
        reply = self._world.hub.work.lease(self._world.signed_in(self.node), request)
        self._leases = [Lease.model_validate(signed.document) for signed in reply.leases]
        if not self._leases:
            self._world.wait(Topic.LEASES, self)
            return
        self._began_s = self._world.now_s
        takes_s = self._group_s * len(self._leases) * self._world.random.uniform(0.9, 1.1)
        self._world.at(takes_s, self._submit)

    def _submit(self) -> None:
        for lease in self._leases:
            body = pack(submission_of(lease, [_DRAWN] * len(lease.seeds), "none"), level=1)
            try:
                self._world.hub.work.submit(self._world.signed_in(self.node), lease.lease, body)
                self._world.counts[f"{self.kind} submitted"] += 1
            except Refusal as refusal:
                self._world.counts[refusal.code] += 1
        self.ask()


@dataclass(frozen=True)
class Result:
    figures: dict[str, float]
    """The hub's own, as in `/metrics`."""
    submissions: int
    steps_per_min: float
    credit: dict[str, int]
    """What each kind of machine earned, one of them with the other."""


def measure(staleness: int, paced: bool, seconds: float, seed: int) -> Result:
    scenario = Scenario(
        workers=(),
        seed=seed,
        seconds=seconds,
        run=RunSettings(
            steps=10**6, groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_staleness=staleness,
            max_new_tokens=TOKENS,
        ),
        hub=HubSettings(),
        heartbeat_s=5.0,
        audit_s=AUDIT_S,
        train_s=TRAIN_S,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, _as_many_as_asked_for(not paced):
        world = World(Path(folder), scenario)
        fleet = [Machine(world, kind, each, group_s) for kind, count, group_s in FLEET for each in range(count)]
        for actor in (SimulatedTrainer(world), SimulatedValidator(world, 0), *fleet):
            world.at(world.random.uniform(0, 1), actor.arrive)
        outcome = world.run(lambda: False)
        with world.storage.read() as reader:
            accepted, rows = reader.submission_counts()["accepted"], {row.node: row for row in reader.nodes()}
        credit = {kind: sum(rows[each.node].credit for each in fleet if each.kind == kind) for kind, _, _ in FLEET}
        figures = {
            figure.name: figure.values[()]
            for figure in read_figures(world.hub.context, world.hub.work.late)
            if () in figure.values
        }
        return Result(figures, accepted + world.hub.work.late, outcome.steps / seconds * 60, credit)


@contextmanager
def _as_many_as_asked_for(unpaced: bool) -> Iterator[None]:
    if not unpaced:
        yield
        return
    with patch.object(pacing, "lease_size", lambda _moment, _tempo, _pace_ms, _held, count: count):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1800, help="simulated")
    parser.add_argument("--staleness", default="1,2,4")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        "| staleness | | groups generated | too old | unit taken | wasted | leases lapsed | steps/min | credit of the "
        "middling, the slow |\n|--:|---|--:|--:|--:|--:|--:|--:|---|"
    )
    for staleness in map(int, options.staleness.split(",")):
        fractions = []
        for paced in (False, True):
            found = measure(staleness, paced, options.seconds, options.seed)
            figures, credit = found.figures, found.credit
            fractions.append(figures["wasted_fraction"])
            print(
                f"| {staleness} | {'paced' if paced else 'unpaced'} | {found.submissions:,} "
                f"| {figures['wasted_groups']:,.0f} | {figures['late_submissions']:.0f} | {fractions[-1]:.1%} "
                f"| {figures['lapsed_leases']:.0f} | {found.steps_per_min:.1f} "
                f"| {credit['middling']:,}, {credit['slow']:,} |",
                flush=True,
            )
        if fractions[0]:
            print(f"| {staleness} | paced / unpaced | | | | {fractions[1] / fractions[0]:.2f} | | | |", flush=True)


if __name__ == "__main__":
    main()
