"""Staleness 0: what a step is trained on does not depend on who was fast, slow, or failed on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.machine import Play
from shoal.protocol import Lease, Outcome

STEPS = 3
PROVEN = 200  # audited fully one time in twenty


def rewards_of(unit: int, version: int, world: int) -> tuple[float, ...]:
    """What the group of a unit earns: fixed by the world, useful two times out of three."""
    useful = (unit * 7 + version * 3 + world) % 3 != 0
    return (0.0, 1.0 + unit) if useful else (1.0, 1.0)


class Schedule:
    """Plays a run to its end in a random order, with failures that cost time but no unit."""

    def __init__(self, folder: Path, seed: int, world: int, refill_cap: int, audit: str = "all") -> None:
        self.random = random.Random(seed)
        self.world = world
        run = {"steps": STEPS, "groups_per_step": 3, "max_staleness": 0}
        self.play = Play(folder, run, {"refill_cap": refill_cap, "audit": audit})
        for _ in range(self.random.randint(1, 3)):
            self.play.join(streak=self.random.choice([0, PROVEN]))
        self.step = 0
        self.told: list[list[tuple[int, int, tuple[float, ...]]]] = []

    def run(self) -> list[list[tuple[int, int, tuple[float, ...]]]]:
        """Per step: (unit, version, rewards) of its groups."""
        self.play.announce(0)
        moves: list[Callable[[], None]] = [
            self._lease, self._submit, self._judge, self._train, self._wait, self._generate,
        ]  # fmt: skip
        for _ in range(20_000):
            if self.step == STEPS:
                return self.told
            self.random.choices(moves, weights=[4, 4, 4, 1, 1, 1])[0]()
        raise AssertionError(f"stuck at step {self.step}: {self.play.hub.reporting.status().waits}")

    def _lease(self) -> None:
        self.play.lease(self.random.choice(self.play.workers), self.random.randint(1, 3))

    def _submit(self) -> None:
        if self.play.leases:
            lease = self.play.leases.pop(self.random.randrange(len(self.play.leases)))
            if self.random.random() < 0.8:
                self.play.submit(lease)
            elif self.random.random() < 0.5:
                self.play.release(lease)

    def _judge(self) -> None:
        audits = self.play.claim(self.random.randint(1, 4))
        self.random.shuffle(audits)
        for audit in audits:
            lease = Lease.model_validate(audit.lease.document)
            others = [Outcome.UNSURE, Outcome.REJECTED]  # without a severity: caught, and it works on
            well = audit.trusted or self.random.random() < 0.8
            outcome = Outcome.ACCEPTED if well else self.random.choice(others)
            self.play.judge(audit, outcome, rewards_of(lease.unit, lease.policy.version, self.world))

    def _train(self) -> None:
        batch = self.play.batch(self.step)
        if batch is not None:
            self.told.append([(group.unit, group.policy.version, group.rewards) for group in batch.groups])  # type: ignore[union-attr]
            self.step += 1
            self.play.announce(self.step)

    def _generate(self) -> None:
        """What nobody could judge twice comes from the validator."""
        for lease in self.play.entrust():
            if self.random.random() < 0.8:  # or its claim runs out
                self.play.submit(lease)

    def _wait(self) -> None:
        self.play.clock.advance(self.random.choice([1, 61]))
        self.play.hub.upkeep.tick()


@settings(max_examples=6, deadline=None)
@given(
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    world=st.integers(0, 10),
    refill_cap=st.sampled_from([0, 1, 4]),
    audit=st.sampled_from(["all", "reputation"]),
)
def test_two_schedules_of_one_world_train_on_the_same(
    tmp_path_factory: pytest.TempPathFactory, seeds: tuple[int, int], world: int, refill_cap: int, audit: str
) -> None:
    """Groups that are pulled are generated again under the same seeds: by reputation, too, it makes no difference."""
    first, second = (Schedule(tmp_path_factory.mktemp("run"), seed, world, refill_cap, audit).run() for seed in seeds)
    assert first == second
    assert len(first) == STEPS
    if refill_cap == 4:
        assert [len(groups) for groups in first] == [3, 3, 3]


def test_without_refills_a_step_takes_what_there_is(tmp_path: Path) -> None:
    schedule = Schedule(tmp_path, seed=1, world=0, refill_cap=0)
    told = schedule.run()
    useful = [
        [unit for unit in range(step * 3, step * 3 + 3) if rewards_of(unit, step, 0)[0] == 0] for step in range(3)
    ]
    assert [[unit for unit, _, _ in groups] for groups in told] == useful
    assert "step 0 was written down with 2 of 3 groups" in schedule.play.hub.reporting.status().alarms
