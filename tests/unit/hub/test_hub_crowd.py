"""A crowd of long polls: a change wakes a few of them, who waited longest comes first, nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal.hub.changes import WOKEN, Changes, Topic, long_poll

CROWD = 200
WAIT_S = 30.0


class Shop:
    """Things to be had, and how often anybody looked."""

    def __init__(self) -> None:
        self.changes = Changes()
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
            while len(self.changes._waiters[Topic.LEASES]) <= who:
                await asyncio.sleep(0)
        self.looks = 0
        return tasks

    async def poll(self, who: int, look_s: float | None = None) -> bool:
        return await long_poll(self.changes, Topic.LEASES, WAIT_S, self.attempt(who), _here, look_s)

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


async def _here() -> bool:
    return False


def test_a_little_goes_to_who_waited_longest_and_wakes_few() -> None:
    async def run() -> None:
        shop = Shop()
        tasks = await shop.crowd(CROWD)
        shop.supply(3)
        await shop.settle(lambda: len(shop.served) == 3 and len(shop.changes._waiters[Topic.LEASES]) == CROWD - 3)
        assert shop.served == [0, 1, 2]
        assert shop.looks <= WOKEN + 2 * 3
        await shop.end(tasks)

    asyncio.run(run())


def test_plenty_reaches_everybody_from_one_change() -> None:
    async def run() -> None:
        shop = Shop()
        tasks = await shop.crowd(CROWD)
        shop.supply(CROWD)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
        assert answers == [True] * CROWD
        assert shop.looks == CROWD

    asyncio.run(run())


def test_who_looked_in_vain_stands_behind_the_others() -> None:
    async def run() -> None:
        shop = Shop()
        tasks = await shop.crowd(2 * WOKEN)
        shop.changes.notify(Topic.LEASES)  # for nothing: the first ones go to the end of the queue
        await shop.settle(lambda: shop.looks == WOKEN and len(shop.changes._waiters[Topic.LEASES]) == 2 * WOKEN)
        shop.supply(1)
        await shop.settle(lambda: len(shop.served) == 1)
        assert shop.served == [WOKEN]
        await shop.end(tasks)

    asyncio.run(run())


def test_a_crowd_that_may_not_take_it_keeps_nothing_from_who_may() -> None:
    async def run() -> None:
        shop = Shop()

        async def in_vain() -> tuple[bool, bool]:
            return False, False

        kept = [
            asyncio.create_task(
                long_poll(shop.changes, Topic.LEASES, WAIT_S, in_vain, _here, is_held_back=lambda _found: True)
            )
            for _ in range(CROWD)
        ]
        await shop.settle(lambda: len(shop.changes._waiters[Topic.LEASES]) == CROWD)
        free = asyncio.create_task(shop.poll(7))
        await shop.settle(lambda: len(shop.changes._waiters[Topic.LEASES]) == CROWD + 1)
        shop.supply(1)
        await shop.settle(free.done)
        assert shop.served == [7]
        await shop.end(kept)

    asyncio.run(run())


def test_what_changes_while_somebody_looks_is_not_missed() -> None:
    """A change between a look and the wait that follows it, with nobody else there to be woken."""

    async def run() -> None:
        shop = Shop()
        seen = shop.changes.count(Topic.LEASES)
        shop.supply(1)
        await asyncio.wait_for(shop.changes.wait(Topic.LEASES, seen, WAIT_S), WAIT_S / 2)

    asyncio.run(run())


def test_a_stop_wakes_all_of_a_crowd() -> None:
    async def run() -> None:
        shop = Shop()
        await shop.end(await shop.crowd(CROWD))
        assert shop.served == []

    asyncio.run(run())


def test_without_notice_one_looks_again_by_itself() -> None:
    async def run() -> None:
        shop = Shop()
        task = asyncio.create_task(shop.poll(0, look_s=0.01))
        await shop.settle(lambda: shop.looks >= 3)
        shop.stock = 1
        assert await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())
