"""What is counted and kept of callers, shared by all requests of one hub."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from shoal.hub.buckets import Buckets
from shoal.hub.http.limits import Addresses, Intake
from shoal.hub.settings import CONCURRENT_UPLOADS, HubConfig
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.http import HttpRequest

T = TypeVar("T")

KEPT_S = 1.0
THREADS = 24  # as many as a hub has connections to a shared database; most wait for a disk
REGISTRATIONS = 1 / 200  # new keys of an address, by its requests: one a second where 200 requests are allowed
LEAST_INTAKE_BYTES = 64 * 1024 * 1024
READ_AT_ONCE = 4  # of the pages that anyone may read (status, ledger), which cost more than what a stranger may send

log = logging.getLogger("shoal.hub.requests")


class Edge:
    """`addresses` is the server's: without one (in one process, in tests) nobody has an address to be counted by. Rates
    are real time, whatever clock the hub goes by."""

    def __init__(self, config: HubConfig, clock: Clock = SystemClock()) -> None:
        settings, self.clock = config.settings, clock
        self.addresses: Addresses | None = None
        self.requests = Buckets(settings.requests_per_address_s)
        self.keys = Buckets(settings.requests_per_key_s)
        self.newcomers = Buckets(settings.requests_per_address_s * REGISTRATIONS, burst_s=60.0)
        self.intake = Intake(max(LEAST_INTAKE_BYTES, CONCURRENT_UPLOADS * config.submission_limits.compressed_bytes))
        self.uploads = asyncio.Semaphore(CONCURRENT_UPLOADS)  # submissions are in memory while they are checked
        self.reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="hub")
        self._computing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._kept: dict[str, tuple[Any, float]] = {}  # answers, and when their computation began
        self._warned = False

    def in_thread(self, serve: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, serve, *arguments)

    async def shared(self, name: str, client: str, compute: Callable[[], Awaitable[T]]) -> T:
        """An answer for everybody, computed one at a time. Strangers get one that is a second old at most, this
        machine's own processes one that began after they asked."""
        since_s = self.clock.monotonic_s() - (KEPT_S if client else 0.0)
        async with self._computing[name]:
            answer, began_s = self._kept.get(name, (None, -1.0))
            if began_s < since_s or answer is None:
                began_s = self.clock.monotonic_s()
                answer = await compute()
                self._kept[name] = answer, began_s
            return answer  # type: ignore[no-any-return]

    def reading_of(self, client: str) -> asyncio.Semaphore:
        """Nothing is kept of an address once nobody holds its semaphore."""
        return self.reading.setdefault(client, asyncio.Semaphore(READ_AT_ONCE))

    def client_of(self, request: HttpRequest) -> str:
        if self.addresses is None or not request.peer:
            return ""
        hops = request.headers.get("x-forwarded-for", "")
        client = self.addresses.client(self.addresses.forwarded(request.peer, hops))
        if not client and hops and not self._warned and not self.addresses.is_proxy(request.peer):
            self._warned = True
            unnamed = "requests come through a proxy at %s that the hub was not told of: no limit by address holds for "
            log.warning(unnamed + "them; name it in hub.trusted_proxies", request.peer)
        return client
