"""Tasks and prompts may take long to make: the hub makes them while it holds no lock that others wait for."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.hub import FakeEnvironment, Lazy
from kit.machine import Play
from shoal.environments import Split, Task
from shoal.errors import UnusableTask
from shoal.hub import EvaluationPlan
from shoal.hub.service import context
from shoal.hub.service.drawing import MAKING_S
from shoal.hub.state import Pool, PoolRules, Refusal, TaskRow
from shoal.hub.state.draws import task_index
from shoal.protocol import AuditReply, AuditRequest, EvaluationSlice, Lease, Outcome

RUN = {"steps": 6, "groups_per_step": 6, "group_size": 4}
PLAN = EvaluationPlan(every=1, tasks=40)
TASKS = 40


class Slow(FakeEnvironment):
    """An environment that says whenever it has something to do; held-out task 3 cannot be used."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.encoded: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def tasks(self, split: Split) -> Sequence[Task]:
        def made(index: int) -> Task:
            if (split, index) == ("held_out", 3):
                raise UnusableTask("row 3 is empty")
            return self.task(f"{split}-{index}")

        return Lazy(TASKS, made)

    def task(self, task_id: str) -> Task:
        self.made.append(task_id)
        self.meanwhile()
        return Task(task_id, "?", "")

    def encode(self, task: Task) -> list[int]:
        self.encoded.append(task.id)
        self.meanwhile()
        return [5, 6]


def play(folder: Path, **changes: Any) -> tuple[Play, Slow]:
    slow = Slow()
    stage = Play(folder, RUN, {}, environment=slow, encode=slow.encode, **changes)

    def nobody_waits() -> None:
        assert not stage.storage._writers._lock.locked(), "made inside a write transaction"

    slow.meanwhile = nobody_waits
    for _ in range(2):
        stage.join(streak=100)
    stage.announce(0)
    return stage, slow


def measure(stage: Play, evaluate: Any = "idle") -> AuditReply:
    return stage.hub.checking.audits(stage.validator, AuditRequest(max_audits=4, evaluate=evaluate))


def slice_in(reply: AuditReply) -> EvaluationSlice:
    return EvaluationSlice.model_validate(reply.evaluation.document)


def own_task(unit: int) -> str:
    return f"train-{task_index(TASKS, 0, unit)}"


def test_tasks_of_new_units_are_made_before_the_decision(tmp_path: Path) -> None:
    stage, slow = play(tmp_path)
    for worker in stage.workers:
        assert [lease.task for lease in stage.lease(worker, 2)]
    assert [lease.task for lease in stage.leases] == [own_task(unit) for unit in range(4)]
    assert slow.encoded[:4] == [own_task(unit) for unit in range(4)]


def test_so_are_those_of_units_that_are_given_out_again(tmp_path: Path) -> None:
    stage, slow = play(tmp_path)
    before = stage.lease(stage.workers[0], 3)
    stage.restart()
    stage.clock.advance(stage.rules.lease_ms / 1000 + 60)  # they run out in the decision that gives them out again
    del slow.made[:]
    after = stage.lease(stage.workers[1], 3)
    assert [(each.unit, each.task, each.attempt) for each in after] == [(each.unit, each.task, 1) for each in before]
    assert [slow.made.count(lease.task) for lease in before] == [1, 1, 1]


def test_a_unit_that_somebody_else_took_meanwhile_is_not_given_out_twice(tmp_path: Path) -> None:
    stage, slow = play(tmp_path)
    slow.meanwhile, plain = lambda: None, slow.meanwhile

    def overtake() -> None:
        slow.meanwhile = plain
        assert [lease.unit for lease in stage.lease(stage.workers[1], 2)] == [0, 1]

    stage.hub.work.drawing._making = NoLock()  # type: ignore[assignment]
    slow.meanwhile = overtake
    assert [lease.unit for lease in stage.lease(stage.workers[0], 2)] == [2, 3]
    assert [lease.task for lease in stage.leases] == [own_task(unit) for unit in range(4)]


class NoLock:
    """Two requests in one thread, as if they were in two."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_who_is_always_overtaken_is_told_to_ask_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = play(tmp_path)
    monkeypatch.setattr(context, "PAUSE_S", 0.0)
    monkeypatch.setattr(stage.hub.work.drawing, "prepare", lambda _first, _count: None)
    with pytest.raises(Refusal) as refusal:
        stage.lease(stage.workers[0], 2)
    assert (refusal.value.status, refusal.value.code) == (503, "hub.busy")
    monkeypatch.undo()
    assert len(stage.lease(stage.workers[0], 2)) == 2


def test_a_request_makes_tasks_for_a_while_and_gets_what_there_is(tmp_path: Path) -> None:
    stage, slow = play(tmp_path)
    slow.meanwhile = lambda: stage.clock.advance(MAKING_S / 4)  # half of it for a task
    assert [lease.unit for lease in stage.lease(stage.workers[0], 5)] == [0, 1]
    assert [lease.unit for lease in stage.lease(stage.workers[0], 4)] == [2, 3]


def test_rows_that_change_after_the_tasks_were_made_count(tmp_path: Path) -> None:
    stage, slow = play(tmp_path, pools=PoolRules(retire_after=1))
    stage.hub.work.drawing.prepare(0, 2)
    stage.stored.apply([TaskRow(own_task(0), pool=Pool.RETIRED)])
    (lease,) = stage.lease(stage.workers[0], 1)
    assert lease.task != own_task(0)
    assert slow.encoded.count(lease.task) == 1


class TestSlices:
    def test_their_tasks_are_made_before_the_time_of_the_claim_runs(self, tmp_path: Path) -> None:
        stage, slow = play(tmp_path, evaluation=PLAN)
        slow.meanwhile = lambda: stage.clock.advance(60)
        found = slice_in(measure(stage))
        assert found.deadline_ms - stage.hub.context.clock.now_ms() == 5 * stage.rules.audit_ms
        assert [task.task for task in found.tasks] == [f"held_out-{index}" for index in range(32) if index != 3]
        assert stage.hub.work.drawing.unusable == 1

    def test_audits_do_not_wait_for_them(self, tmp_path: Path) -> None:
        stage, slow = play(tmp_path, evaluation=PLAN)
        for lease in stage.lease(stage.workers[0], 2):
            stage.submit(lease)
        del slow.made[:]
        reply = measure(stage)
        assert (len(reply.audits), reply.evaluation, slow.made) == (2, None, [])

    def test_while_one_is_being_made_others_do_not_make_it_too(self, tmp_path: Path) -> None:
        stage, slow = play(tmp_path, evaluation=PLAN)
        replies: list[AuditReply] = []

        def ask_too() -> None:
            slow.meanwhile = lambda: None
            replies.append(measure(stage))

        slow.meanwhile = ask_too
        assert slice_in(measure(stage)).first == 0
        assert [(reply.evaluation, reply.finished) for reply in replies] == [(None, False)]
        assert slow.made.count("held_out-0") == 1


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
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), world=st.integers(0, 10),
    refill_cap=st.sampled_from([0, 1, 4]), audit=st.sampled_from(["all", "reputation"]),
)  # fmt: skip
def test_two_schedules_of_one_world_train_on_the_same(tmp_path_factory, seeds, world, refill_cap, audit):
    """Groups that are pulled are generated again under the same seeds: by reputation, too, it makes no difference."""
    first, second = (Schedule(tmp_path_factory.mktemp("run"), seed, world, refill_cap, audit).run() for seed in seeds)
    assert (first, len(first)) == (second, STEPS)
    if refill_cap == 4:
        assert [len(groups) for groups in first] == [3, 3, 3]


def test_without_refills_a_step_takes_what_there_is(tmp_path: Path) -> None:
    schedule = Schedule(tmp_path, seed=1, world=0, refill_cap=0)
    told = schedule.run()
    units = [range(step * 3, step * 3 + 3) for step in range(3)]
    useful = [[unit for unit in of if rewards_of(unit, step, 0)[0] == 0] for step, of in enumerate(units)]
    assert [[unit for unit, _, _ in groups] for groups in told] == useful
    assert "step 0 was written down with 2 of 3 groups" in schedule.play.hub.reporting.status().alarms
