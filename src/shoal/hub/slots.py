"""How many submissions are stored at a time, and for how long others wait for their turn.

PUT /submissions/…  ─┐                      ┌─► a slot is free ─► stored
POST …/commit ─► one ┴─► wait, with an end ─┤
             of a key                       └─► none in time ─► 503 hub.busy, Retry-After
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.hub.limits import TooMuch
from shoal.hub.state.commands import Refusal

WAIT_S = 15.0
"""Well within what a client waits for an answer. A store that hangs lets go of a slot after its own deadlines."""
AGAIN_S = 2


class Busy(Refusal):
    """503, and after how many seconds to ask again."""

    def __init__(self, sentence: str, retry_after_s: int) -> None:
        super().__init__(503, "hub.busy", sentence)
        self.retry_after_s = retry_after_s


class UploadSlots:
    """Use as an asynchronous context manager: inside, a slot is held."""

    def __init__(self, count: int, wait_s: float = WAIT_S) -> None:
        self._free = asyncio.Semaphore(count)
        self._wait_s = wait_s
        self._committing: set[str] = set()

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Busy("many submissions are being stored just now; hand it in again in a moment", AGAIN_S) from error

    async def __aexit__(self, *_error: object) -> None:
        self._free.release()

    @contextmanager
    def committing(self, key: str) -> Iterator[None]:
        """One commit of a key at a time: each reads a whole upload from the store, whatever it turns out to be."""
        if key in self._committing:
            raise TooMuch("rate.uploads", "another commit of this key is being taken in: one after the other", 1.0)
        self._committing.add(key)
        try:
            yield
        finally:
            self._committing.discard(key)
