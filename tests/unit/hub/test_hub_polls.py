"""Long polls: answered on the change they wait for, at their deadline, and when the hub stops."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, AsyncMock, Mock

import pytest

from kit import eventually
from kit.asgi import in_loop
from kit.hub import Bench, certificate, make_config, ok, worker_key
from kit.storage import Stored
from shoal.errors import ResourceError
from shoal.hub.changes import FORGET_AFTER_MS, Changes, Topic, Waits
from shoal.hub.http.polling import WOKEN, Polls
from shoal.hub.service import Hub, context, retry, upkeep
from shoal.hub.state.commands import Refusal
from shoal.hub.storage import StaleRow
from shoal.ledger import verify
from shoal.protocol import Registration
from shoal.runtime.clock import ManualClock


@pytest.fixture
def begin() -> Iterator[Callable[..., Future[Any]]]:
    """Makes a call in a thread, and promises its answer."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def waiting(bench: Bench, what: str) -> Callable[[], bool]:
    return lambda: any(what in wait.what for wait in bench.status().waits)


def let_run_out(bench: Bench) -> None:
    for _ in range(61):  # a tick in each second: the hub is there, and alice is not heard of
        bench.clock.advance(1)
        bench.hub.upkeep.tick()


def take_two(bench: Bench) -> None:
    ok(bench.announce(0))
    bench.alice.lease(2)


LEASES: dict[str, tuple[Callable[[Bench], object], str, Callable[[Bench], object], list[int]]] = {
    "a policy comes out": (lambda _: None, "no policy has been published yet", lambda bench: bench.announce(0), [0, 1]),
    "a lease runs out, and nobody has to ask": (take_two, "all 2 units of step 0", let_run_out, [0, 1]),
    "another worker has lost one": (take_two, "all 2 units of step 0", lambda bench: bench.alice.ask(held=[]), [1]),
}


@pytest.mark.parametrize("cause", LEASES)
def test_a_worker_that_waits_gets_its_leases_when(bench, begin, cause):
    before, waits_for, change, units = LEASES[cause]
    before(bench)
    poll = begin(lambda: bench.bob.lease(2, wait_s=20))
    eventually(waiting(bench, f"a unit: {waits_for}"))
    change(bench)
    assert [lease.unit for lease in poll.result(10)] == units


@pytest.mark.hub
def test_a_validator_gets_a_submission_when_it_arrives(bench, begin):
    poll = begin(lambda: ok(bench.validator.call("POST", "/audits", {"wait_s": 20})).json())
    eventually(waiting(bench, "submissions"))
    bench.alice.deliver()
    assert len(poll.result(10)["audits"]) == 1


@pytest.mark.hub
def test_the_trainer_gets_its_batch_with_the_last_verdict(bench, begin):
    poll = begin(lambda: bench.batch(0, wait_s=20))
    eventually(waiting(bench, "a batch: step 0: 0 of 2 groups"))
    bench.accept_groups(2)
    assert len(poll.result(10).groups) == 2


def test_a_poll_ends_at_its_deadline_with_a_reason(bench: Bench) -> None:
    before = time.monotonic()
    assert bench.alice.ask(wait_s=0.2).waiting == "no policy has been published yet"
    assert time.monotonic() - before >= 0.2


def test_polls_end_when_the_hub_stops(bench, begin):
    poll = begin(lambda: bench.alice.lease(wait_s=30))
    eventually(waiting(bench, "a unit"))
    bench.hub.context.changes.close()
    assert poll.result(10) == []


@in_loop
async def test_a_client_that_left_is_given_no_work() -> None:
    changes, attempt = Changes(), AsyncMock(return_value=("nothing", False))
    poll = asyncio.create_task(Polls(changes).poll(Topic.LEASES, 20, attempt, is_gone=lambda: True))
    while not attempt.called:
        await asyncio.sleep(0)
    changes.notify(Topic.LEASES)
    assert await asyncio.wait_for(poll, 10) == "nothing"
    attempt.assert_called_once()  # no second attempt for a client that is gone


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
    for number in range(100):  # strangers under ever new names, while nobody asks who waits
        waits.waiting(f"worker {number}", "a unit", 200_000 + number * 1000)
    assert len(waits._entries) == FORGET_AFTER_MS // 1000 + 1


CROWD = 200
WAIT_S = 30.0


class Shop:
    """Things to be had, and how often anybody looked."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.polls = Polls(self.changes)
        self.stock = 0
        self.looks = 0
        self.served: list[int] = []

    def attempt(self, who: int) -> Callable[[], Awaitable[tuple[bool, bool]]]:
        async def look() -> tuple[bool, bool]:
            self.looks += 1
            found = self.stock > 0
            if found:
                self.stock -= 1
                self.served.append(who)
            return found, found

        return look

    async def crowd(self, count: int) -> list[asyncio.Task[bool]]:
        """So many who have looked in vain, and wait."""
        tasks = []
        for who in range(count):
            tasks.append(asyncio.create_task(self.poll(who)))
            while len(self.polls._waiting[Topic.LEASES]) <= who:
                await asyncio.sleep(0)
        self.looks = 0
        return tasks

    async def poll(self, who: int, look_s: float | None = None) -> bool:
        return await self.polls.poll(Topic.LEASES, WAIT_S, self.attempt(who), look_s=look_s)

    def supply(self, count: int) -> None:
        self.stock += count
        self.changes.notify(Topic.LEASES)

    async def settle(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def end(self, tasks: list[asyncio.Task[bool]]) -> None:
        self.changes.close()
        await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


@in_loop
async def test_a_little_goes_to_who_waited_longest_and_wakes_few() -> None:
    shop = Shop()
    tasks = await shop.crowd(CROWD)
    shop.supply(3)
    await shop.settle(lambda: len(shop.served) == 3 and len(shop.polls._waiting[Topic.LEASES]) == CROWD - 3)
    assert shop.served == [0, 1, 2]
    assert shop.looks <= WOKEN + 2 * 3
    await shop.end(tasks)


@in_loop
async def test_plenty_reaches_everybody_from_one_change() -> None:
    shop = Shop()
    tasks = await shop.crowd(CROWD)
    shop.supply(CROWD)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
    assert answers == [True] * CROWD
    assert shop.looks == CROWD


@in_loop
async def test_who_looked_in_vain_stands_behind_the_others() -> None:
    shop = Shop()
    tasks = await shop.crowd(2 * WOKEN)
    shop.changes.notify(Topic.LEASES)  # for nothing: the first ones go to the end of the queue
    await shop.settle(lambda: shop.looks == WOKEN and len(shop.polls._waiting[Topic.LEASES]) == 2 * WOKEN)
    shop.supply(1)
    await shop.settle(lambda: len(shop.served) == 1)
    assert shop.served == [WOKEN]
    await shop.end(tasks)


@in_loop
async def test_a_crowd_that_may_not_take_it_keeps_nothing_from_who_may() -> None:
    shop, asking = Shop(), (Topic.LEASES, WAIT_S, AsyncMock(return_value=(False, False)))
    kept = [asyncio.create_task(shop.polls.poll(*asking, is_held_back=lambda _: True)) for _ in range(CROWD)]
    await shop.settle(lambda: len(shop.polls._waiting[Topic.LEASES]) == CROWD)
    free = asyncio.create_task(shop.poll(7))
    await shop.settle(lambda: len(shop.polls._waiting[Topic.LEASES]) == CROWD + 1)
    shop.supply(1)
    await shop.settle(free.done)
    assert shop.served == [7]
    await shop.end(kept)


@in_loop
async def test_what_changes_while_somebody_looks_is_not_missed() -> None:
    """A change between a look and the wait that follows it, with nobody else there to be woken."""
    shop, looks = Shop(), list[int]()

    async def look() -> tuple[bool, bool]:
        looks.append(1)
        if len(looks) == 1:
            shop.changes.notify(Topic.LEASES)
        return True, len(looks) > 1

    assert await asyncio.wait_for(shop.polls.poll(Topic.LEASES, WAIT_S, look), WAIT_S / 2)


@in_loop
async def test_without_notice_one_looks_again_by_itself() -> None:
    shop = Shop()
    task = asyncio.create_task(shop.poll(0, look_s=0.01))
    await shop.settle(lambda: shop.looks >= 3)
    shop.stock = 1
    assert await asyncio.wait_for(task, WAIT_S)


class TestRetry:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(context, "PAUSE_S", 0.0)

    def test_but_not_for_ever(self) -> None:
        call = Mock(side_effect=StaleRow("always"))
        with pytest.raises(Refusal) as caught:
            retry(call)
        assert (caught.value.status, caught.value.code, call.call_count) == (503, "hub.busy", context.ATTEMPTS)

    def test_routes_retry(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        overtaken = Mock(wraps=bench.hub.membership.register, side_effect=[StaleRow("once"), DEFAULT])
        monkeypatch.setattr(bench.hub.membership, "register", overtaken)
        assert bench.alice.register(name="again").status_code == 200
        assert overtaken.call_count == 2


class TestPosting:
    @pytest.fixture
    def hub(self, tmp_path: Path) -> Iterator[Hub]:
        """With the run and four nodes recorded, and nobody who posts by himself."""
        hub = Hub(make_config(tmp_path / "hub"), ManualClock())
        for key in map(worker_key, range(1, 5)):
            signed = certificate(key, "validator")
            registration = Registration(public_key=key.public_key, role="validator", certificate=signed)
            hub.membership.register(registration)
        yield hub
        hub.close()

    def test_a_long_outbox_is_posted_in_pages(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "POSTED_AT_A_TIME", 2)
        assert Stored(hub.context.storage).outbox_length() == 5
        hub.posting.post()
        page = hub.reporting.ledger_page(-1, 99)
        verify(page.entries, page.head)
        assert [entry.kind for entry in page.entries] == ["run"] + ["node"] * 4
        assert Stored(hub.context.storage).outbox_length() == 0

    def test_only_the_leader_posts(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub.context.storage, "lead", lambda *_: False)
        hub.upkeep.tick()
        assert hub.reporting.ledger_page(-1, 99).entries == ()
        monkeypatch.undo()
        hub.upkeep.tick()
        assert Stored(hub.context.storage).outbox_length() == 0

    def test_a_hub_that_could_not_post_stops_all_the_same(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub.posting, "post", Mock(side_effect=ResourceError("the disk is full")))
        hub.close()
        monkeypatch.undo()
        assert Stored(hub.context.storage).outbox_length() == 5, "for the next start"
