"""Long polls: answered on the change they wait for, at their deadline, and when the hub stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from kit.hub import Bench, fresh_request, ok
from shoal.hub.changes import Changes, Topic, long_poll
from shoal.hub.waits import FORGET_AFTER_MS, Waits


class Background:
    """A call in a thread, and what it answered."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.answer: Any = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        self.answer = call()

    def result(self) -> Any:
        self._thread.join(10)
        assert not self._thread.is_alive(), "the poll did not end"
        return self.answer


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def waiting(bench: Bench, what: str) -> Callable[[], bool]:
    return lambda: any(what in wait.what for wait in bench.status().waits)


def test_a_worker_gets_its_lease_when_a_policy_comes_out(bench: Bench) -> None:
    poll = Background(lambda: bench.alice.lease(fresh_request(), wait_s=20))
    until(waiting(bench, "a unit: no policy has been published yet"))
    ok(bench.announce(0))
    assert [lease.unit for lease in poll.result()] == [0]


def test_a_validator_gets_a_submission_when_it_arrives(bench: Bench) -> None:
    ok(bench.announce(0))
    (lease,) = bench.alice.lease(fresh_request())
    poll = Background(lambda: ok(bench.validator.call("POST", "/audits", {"wait_s": 20})).json())
    until(waiting(bench, "submissions"))
    ok(bench.alice.submit(lease))
    assert len(poll.result()["audits"]) == 1


def test_the_trainer_gets_its_batch_with_the_last_verdict(bench: Bench) -> None:
    ok(bench.announce(0))
    poll = Background(lambda: bench.batch(0, wait_s=20))
    until(waiting(bench, "a batch: step 0: 0 of 2 groups"))
    bench.accept_groups(2)
    assert len(poll.result().groups) == 2


def test_a_worker_gets_what_another_let_run_out(bench: Bench) -> None:
    ok(bench.announce(0))
    bench.alice.lease(fresh_request(), 2)
    poll = Background(lambda: bench.bob.lease(fresh_request(), 2, wait_s=20))
    until(waiting(bench, "a unit: all 2 units"))
    for _ in range(61):  # a tick in each second: the hub is there, and alice is not heard of
        bench.clock.advance(1)
        bench.app.state.hub.upkeep.tick()
    assert [lease.unit for lease in poll.result()] == [0, 1], "the upkeep noticed, nobody had to ask"


def test_a_worker_gets_what_another_lost(bench: Bench) -> None:
    ok(bench.announce(0))
    bench.alice.lease(fresh_request(), 2)
    poll = Background(lambda: bench.bob.lease(fresh_request(), wait_s=20))
    until(waiting(bench, "a unit: all 2 units of step 0"))
    ok(bench.alice.call("POST", "/leases", {"request": fresh_request(), "max_units": 1, "held": []}))
    assert [lease.unit for lease in poll.result()] == [1]


def test_a_poll_ends_at_its_deadline_with_a_reason(bench: Bench) -> None:
    before = time.monotonic()
    reply = ok(bench.alice.call("POST", "/leases", {"request": fresh_request(), "wait_s": 0.2})).json()
    assert reply["waiting"] == "no policy has been published yet"
    assert time.monotonic() - before >= 0.2


def test_polls_end_when_the_hub_stops(bench: Bench) -> None:
    poll = Background(lambda: bench.alice.lease(fresh_request(), wait_s=30))
    until(waiting(bench, "a unit"))
    bench.app.state.hub.context.changes.close()
    assert poll.result() == []


def test_a_client_that_left_is_given_no_work() -> None:
    granted = []

    async def scene() -> None:
        changes = Changes()

        async def attempt() -> tuple[str, bool]:
            granted.append("try")
            return "nothing", False

        async def is_gone() -> bool:
            return True

        poll = asyncio.create_task(long_poll(changes, Topic.LEASES, 20, attempt, is_gone))
        while not granted:
            await asyncio.sleep(0)
        changes.notify(Topic.LEASES)
        assert await asyncio.wait_for(poll, 10) == "nothing"

    asyncio.run(scene())
    assert granted == ["try"], "no second attempt for a client that is gone"


def test_a_change_between_the_look_and_the_wait_is_not_missed() -> None:
    async def scene() -> float:
        changes = Changes()
        seen = changes.count(Topic.AUDITS)
        changes.notify(Topic.AUDITS)
        before = time.monotonic()
        await changes.wait(Topic.AUDITS, seen, 20)
        return time.monotonic() - before

    assert asyncio.run(scene()) < 10


def test_waits_count_from_the_first_poll_in_a_row_and_are_forgotten() -> None:
    waits = Waits()
    waits.waiting("worker a", "a unit: x", 1_000)
    waits.waiting("worker a", "a unit: y", 21_000)
    (wait,) = waits.current(21_000)
    assert (wait.what, wait.since_ms) == ("a unit: y", 1_000)
    assert waits.current(21_001 + FORGET_AFTER_MS) == []
    waits.waiting("worker a", "a unit: z", 100_000)
    assert waits.current(100_000)[0].since_ms == 100_000
    waits.done("worker a")
    assert waits.current(100_000) == []
