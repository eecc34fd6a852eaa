"""How much one caller may ask for: who an address is, the bytes that are being received, and what all requests share.

An IPv4 address is one client, an IPv6 /64 network another (`client_of`). This machine's processes have no address here.
"""

import asyncio
import ipaddress
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from shoal.errors import ConfigError
from shoal.hub.buckets import Buckets
from shoal.hub.settings import CONCURRENT_UPLOADS, HubConfig
from shoal.hub.state.commands import Refusal
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.http import HttpRequest, client_of

T = TypeVar("T")

OWN_ADDRESSES = ("", "127.0.0.1", "::1")
SHARE_OF_ONE = 4  # one caller may have a quarter of all that may be received at a time
KEPT_S = 1.0
TURN_WAIT_S = 15.0  # well within what a client waits for an answer
DECIDING = 6  # others find a thread and a connection meanwhile
THREADS = 24  # as many as a hub has connections to a shared database; most wait for a disk
REGISTRATIONS = 1 / 200  # new keys of an address, by its requests: one a second where 200 requests are allowed
LEAST_INTAKE_BYTES = 64 * 1024 * 1024
READ_AT_ONCE = 4  # of the pages that anyone may read (status, ledger), which cost more than what a stranger may send

log = logging.getLogger("shoal.hub.requests")


def too_much(code: str, sentence: str, wait_s: float) -> Refusal:
    return Refusal(429, code, sentence, retry_after_s=max(1, math.ceil(wait_s)))


_client_of = lru_cache(4096)(client_of)  # asked with every request


class Addresses:
    """Whom an address belongs to; "" for those without a limit."""

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        try:
            self._proxies = [ipaddress.ip_network(text, strict=False) for text in trusted_proxies]
        except ValueError as error:
            sentence = f"hub.trusted_proxies: {error}; each is an address or a network such as 10.0.0.0/8"
            raise ConfigError(sentence) from error

    def client(self, address: str) -> str:
        client = _client_of(address)
        return "" if address in OWN_ADDRESSES or client in OWN_ADDRESSES else client

    def forwarded(self, peer: str, hops: str) -> str:
        """The address that the trusted proxy `peer` speaks for: the last of its X-Forwarded-For that is no trusted
        proxy. What comes before that may be made up."""
        named = [hop.strip() for hop in hops.split(",") if hop.strip()] if hops and self.is_proxy(peer) else []
        return next((hop for hop in reversed(named) if not self.is_proxy(hop)), named[0] if named else peer)

    def is_proxy(self, address: str) -> bool:
        if not self._proxies:
            return False
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed  # of a socket for IPv6 and IPv4 alike
        return any(parsed in network for network in self._proxies)


class Intake:
    """The bytes of request bodies in memory, in all and by sender. They count as they arrive, not as announced: to keep
    others out, a sender has to send them all. A body that is alone is never refused."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held: Counter[str] = Counter()
        self.held_bytes = self.received_bytes = 0

    def add(self, who: str, size_bytes: int, body_bytes: int) -> None:
        self.received_bytes += size_bytes
        self.held_bytes += size_bytes
        self.held[who] += size_bytes
        if self.held_bytes > max(body_bytes, self.most_bytes):
            raise Refusal(503, "hub.busy", "the hub is receiving as much as it can hold: try again in a moment")
        if self.held[who] > max(body_bytes, self.most_bytes // SHARE_OF_ONE):
            raise too_much("rate.uploads", "too much is being sent at once: send one body after the other", 1.0)

    def release(self, who: str, body_bytes: int) -> None:
        self.held_bytes -= body_bytes
        self.held[who] -= body_bytes
        if self.held[who] <= 0:
            del self.held[who]


class Edge:
    """Rates are real time, whatever clock the hub goes by."""

    def __init__(self, config: HubConfig, clock: Clock = SystemClock()) -> None:
        settings, self.clock = config.settings, clock
        self.addresses = Addresses(settings.trusted_proxies)
        self.requests = Buckets(settings.requests_per_address_s)
        self.keys = Buckets(settings.requests_per_key_s)
        self.newcomers = Buckets(settings.requests_per_address_s * REGISTRATIONS, burst_s=60.0)
        self.intake = Intake(max(LEAST_INTAKE_BYTES, CONCURRENT_UPLOADS * config.submission_limits.compressed_bytes))
        self.uploads = asyncio.Semaphore(CONCURRENT_UPLOADS)  # submissions are in memory while they are checked
        self.deciding = asyncio.Semaphore(DECIDING)  # on leases, over a shared database
        self.reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="hub")
        self._computing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._kept: dict[str, tuple[Any, float]] = {}  # answers, and when their computation began
        self._warned = False

    def in_thread(self, serve: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, serve, *arguments)

    async def in_turn(self, places: asyncio.Semaphore, compute: Callable[[], Awaitable[T]]) -> T:
        """Hold one of the places while working, never while waiting for somebody's bytes."""
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                await places.acquire()
        except TimeoutError as error:
            sentence = "the hub has as much to do as it can just now; send the same again in a moment"
            raise Refusal(503, "hub.busy", sentence, retry_after_s=2) from error
        try:
            return await compute()
        finally:
            places.release()

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
        hops = request.headers.get("x-forwarded-for", "")
        client = self.addresses.client(self.addresses.forwarded(request.peer, hops))
        if not client and hops and not self._warned and not self.addresses.is_proxy(request.peer):
            self._warned = True
            unnamed = "requests come through a proxy at %s that the hub was not told of: no limit by address holds for "
            log.warning(unnamed + "them; name it in hub.trusted_proxies", request.peer)
        return client
