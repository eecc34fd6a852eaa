"""How much one caller may ask for: buckets by key and by address, and the bytes that are being received.

A bucket fills at its rate and holds ten seconds' worth. All of it is forgotten in the order of last use: whoever comes
with a million addresses costs no more memory than with a thousand. An address of IPv4 is one client; of IPv6 it is the
/64 network (`shardcast.limits.client_of`). This machine's own processes (127.0.0.1, ::1) count under no address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.hub.state.commands import Refusal
from shoal.shardcast.limits import client_of

BURST_S = 10.0
REMEMBERED = 4096
OWN_ADDRESSES = ("127.0.0.1", "::1")
SHARE_OF_ONE = 4
"""One caller may have a quarter of all that may be received at a time."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def too_much(code: str, sentence: str, wait_s: float) -> Refusal:
    return Refusal(429, code, sentence, retry_after_s=max(1, math.ceil(wait_s)))


@dataclass
class _Bucket:
    level: float
    filled_at_s: float


class Buckets:
    """A bucket for each caller. Threads may share it. A rate of 0 is no limit.

    >>> buckets = Buckets(rate_s=1.0, burst_s=2.0)
    >>> [buckets.take("alice", now_s=0.0) for _ in range(3)]
    [0.0, 0.0, 1.0]
    """

    def __init__(self, rate_s: float, burst_s: float = BURST_S, remembered: int = REMEMBERED) -> None:
        self._rate_s = rate_s
        self._full = max(1.0, rate_s * burst_s)
        self._remembered = remembered
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, who: str, now_s: float) -> float:
        """How long until one may be taken; nothing is taken and nothing remembered."""
        with self._lock:
            bucket = self._buckets.get(who)
            return 0.0 if bucket is None else self._missing_s(self._filled(bucket, now_s))

    def take(self, who: str, now_s: float) -> float:
        """Take one, if there is one; else for how long to wait."""
        if self._rate_s <= 0:
            return 0.0
        with self._lock:
            bucket = self._buckets.setdefault(who, _Bucket(self._full, now_s))
            self._buckets.move_to_end(who)
            while len(self._buckets) > self._remembered:
                self._buckets.popitem(last=False)
            bucket.level, bucket.filled_at_s = self._filled(bucket, now_s), now_s
            missing_s = self._missing_s(bucket.level)
            if missing_s == 0.0:
                bucket.level -= 1.0
            return missing_s

    def _filled(self, bucket: _Bucket, now_s: float) -> float:
        return min(self._full, bucket.level + max(0.0, now_s - bucket.filled_at_s) * self._rate_s)

    def _missing_s(self, level: float) -> float:
        return 0.0 if level >= 1.0 else (1.0 - level) / self._rate_s


class Turns:
    """So many at a time of one address; the others of the same address wait for their turn. On one event loop only."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._queues: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        turn, here = self._queues.get(client) or (asyncio.Semaphore(self._at_once), 0)
        self._queues[client] = (turn, here + 1)
        try:
            async with turn:
                yield
        finally:
            turn, here = self._queues.pop(client)
            if here > 1:
                self._queues[client] = (turn, here - 1)

    def __len__(self) -> int:
        return len(self._queues)


class Addresses:
    """Whom an address belongs to; the empty text for those that no limit is for.

    >>> addresses = Addresses(["10.0.0.0/8"])
    >>> addresses.client("127.0.0.1"), addresses.client("::ffff:192.0.2.7"), addresses.is_proxy("10.1.2.3")
    ('', '192.0.2.7', True)
    """

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        self._proxies = [_network(text) for text in trusted_proxies]

    def client(self, address: str) -> str:
        client = client_of(address)
        return "" if address in OWN_ADDRESSES or client in OWN_ADDRESSES or not client else client

    def is_proxy(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed  # of a socket for IPv6 and IPv4 alike
        return any(parsed in network for network in self._proxies)


def network_of(client: str) -> str:
    """The network that an address, as limits count it, is in: /24 of IPv4, /48 of IPv6; nothing of nobody's.

    >>> network_of("192.0.2.7"), network_of("2001:db8:1:2::/64"), network_of("")
    ('192.0.2.0/24', '2001:db8:1::/48', '')
    """
    try:
        found = ipaddress.ip_network(client, strict=False)
    except ValueError:
        return client
    return str(found.supernet(new_prefix=24 if found.version == 4 else 48))


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"hub.trusted_proxies: {text!r} is neither an address nor a network such as 10.0.0.0/8 ({error})"
        ) from error


class Intake:
    """The bytes of bodies that are being received: held in memory until they are checked, so they are counted.

    Counted as they arrive, not as they are announced: who wants to keep others out has to send it all.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held: Counter[str] = Counter()
        self.held_bytes = self.received_bytes = 0

    def receiving(self, who: str) -> Receiving:
        """A body of `who`'s begins; whoever handles the request closes it when the request is done with."""
        return Receiving(self, who)


class Receiving:
    """One body on its way in, and in memory until it is closed."""

    def __init__(self, intake: Intake, who: str) -> None:
        self._intake, self._who, self.size_bytes = intake, who, 0

    def add(self, size_bytes: int) -> None:
        """So many more. What fits alone always may: a body is never refused for its own size here."""
        intake, self.size_bytes = self._intake, self.size_bytes + size_bytes
        intake.received_bytes += size_bytes
        intake.held_bytes += size_bytes
        intake.held[self._who] += size_bytes
        own = intake.held[self._who]
        if intake.held_bytes > max(self.size_bytes, intake.most_bytes):
            raise Refusal(503, "hub.busy", "the hub is receiving as much as it can hold: try again in a moment")
        if own > max(self.size_bytes, intake.most_bytes // SHARE_OF_ONE):
            raise too_much("rate.uploads", "too much is being sent at once: send one body after the other", 1.0)

    def close(self) -> None:
        self._intake.held_bytes -= self.size_bytes
        self._intake.held[self._who] -= self.size_bytes
        if self._intake.held[self._who] <= 0:
            del self._intake.held[self._who]
        self.size_bytes = 0
