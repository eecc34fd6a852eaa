"""What one client may cost: connections and bytes per second, counted by address.

    connection ─► Guests.enter ─┬─ one more of this address ─► Guest: a bucket that fills at `rate_bytes_s`
                                └─ too many: None, and the server answers 429

A client that limits itself has one bucket for all that it receives (`Throttle`).
An address of IPv4 is one client. Of IPv6 it is the /64 network, because whoever has one address there has all of them.
And how a relay is set up: the settings of a recipe, and with them what only the machine knows.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shoal.runtime.targets import Reach

BURST_S = 1.0  # what a client that was quiet may be sent at once
SLICES_PER_S = 8
MIN_SLICE_BYTES = 16 * 1024
REMEMBERED = 4096


@dataclass(frozen=True)
class ServerLimits:
    """What a server bears; None is no limit.

    `watch_head_s`: how often a head that another process writes is looked at.
    """

    max_connections: int = 512
    connections_per_client: int | None = None
    rate_bytes_s: float | None = None  # to one client, over all its connections
    idle_s: float = 30.0
    hold_s: float = 8.0  # below the time a client waits for a first byte, so that it hears "busy", not silence
    min_rate_bytes_s: float = 32 * 1024
    watch_head_s: float = 0.05


@dataclass
class Guest:
    """One client: how many connections it has, and how many bytes it may be sent now (below 0: it has to wait)."""

    rate_bytes_s: float | None
    connections: int = 0
    _level_bytes: float = field(init=False)
    _filled_at_s: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self._level_bytes = self._full_bytes

    @property
    def _full_bytes(self) -> float:
        return 0.0 if self.rate_bytes_s is None else self.rate_bytes_s * BURST_S

    def slice_of(self, size_bytes: int) -> int:
        """How much of `size_bytes` to send before the bucket is asked again."""
        if self.rate_bytes_s is None:
            return size_bytes
        return min(size_bytes, max(MIN_SLICE_BYTES, int(self.rate_bytes_s / SLICES_PER_S)))

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take so many bytes out of the bucket; for how long to wait before they are sent."""
        if self.rate_bytes_s is None:
            return 0.0
        self._fill(now_s)
        self._level_bytes -= size_bytes
        return max(0.0, -self._level_bytes / self.rate_bytes_s)

    def is_done(self, now_s: float) -> bool:
        """Whether nothing needs to be remembered of it: gone, and with a full bucket again."""
        self._fill(now_s)
        return self.connections == 0 and self._level_bytes >= self._full_bytes

    def _fill(self, now_s: float) -> None:
        if self.rate_bytes_s is not None:
            gained = (now_s - self._filled_at_s) * self.rate_bytes_s
            self._level_bytes = min(self._full_bytes, self._level_bytes + gained)
            self._filled_at_s = now_s


class Throttle:
    """What this process may receive per second, over all its connections. For any number of threads."""

    def __init__(self, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._bucket = Guest(rate_bytes_s)
        self._lock = threading.Lock()

    def slice_of(self, size_bytes: int) -> int:
        """How much of `size_bytes` to receive before the bucket is asked again."""
        return self._bucket.slice_of(size_bytes)

    def take(self, size_bytes: int) -> float:
        """So many bytes have been received; for how long to receive no more."""
        with self._lock:
            return self._bucket.take(size_bytes, time.monotonic())


class Guests:
    """The clients that are here, or were just now: a bucket is not full again because its owner reconnects.

    >>> guests = Guests(connections_per_client=1, rate_bytes_s=None)
    >>> guests.enter("192.0.2.7", now_s=0.0) is None, guests.enter("192.0.2.7", now_s=0.0) is None
    (False, True)
    """

    def __init__(self, connections_per_client: int | None, rate_bytes_s: float | None) -> None:
        self._most = connections_per_client
        self._rate_bytes_s = rate_bytes_s
        self._guests: dict[str, Guest] = {}

    def enter(self, address: str, now_s: float) -> Guest | None:
        """One more connection of this address; None if it has as many as it may."""
        client = client_of(address)
        guest = self._guests.get(client)
        if guest is None:
            self._tidy(now_s)
            guest = self._guests.setdefault(client, Guest(self._rate_bytes_s))
        if self._most is not None and guest.connections >= self._most:
            return None
        guest.connections += 1
        return guest

    def leave(self, guest: Guest) -> None:
        guest.connections -= 1

    def __len__(self) -> int:
        return len(self._guests)

    def _tidy(self, now_s: float) -> None:
        if len(self._guests) >= REMEMBERED:
            self._guests = {client: guest for client, guest in self._guests.items() if not guest.is_done(now_s)}


def client_of(address: str) -> str:
    """Whom an address belongs to, as far as limits go.

    >>> client_of("::ffff:192.0.2.7"), client_of("2001:db8::1:2:3:4%eth0")
    ('192.0.2.7', '2001:db8::/64')
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


class RelaySettings(BaseModel):
    """How a relay mirrors and serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kept_versions: int = Field(default=3, ge=1, le=1000, description="newest versions kept on disk")
    disk_budget_gb: float | None = Field(
        default=None, gt=0, description="bytes of chunks kept on disk at most; the oldest versions go first"
    )
    connections: int = Field(default=4, ge=1, le=64, description="chunks fetched at the same time")
    max_clients: int = Field(default=512, ge=1, description="connections served at the same time")
    connections_per_client: int | None = Field(
        default=256, ge=1, description="of them to one address (of IPv6: to one /64 network)"
    )
    rate_per_client_mbit: float | None = Field(
        default=None, gt=0, description="what one address is sent per second at most"
    )
    long_poll_s: float = Field(
        default=20.0, ge=0, le=60, description="how long an upstream may hold the question for a newer version"
    )
    poll_s: float = Field(default=1.0, gt=0, description="the pace of asking an upstream that does not hold it")

    @property
    def budget_bytes(self) -> int | None:
        return None if self.disk_budget_gb is None else int(self.disk_budget_gb * 1e9)

    @property
    def limits(self) -> ServerLimits:
        rate = None if self.rate_per_client_mbit is None else self.rate_per_client_mbit * 1e6 / 8
        return ServerLimits(self.max_clients, self.connections_per_client, rate)


@dataclass(frozen=True)
class RelayConfig:
    """`peers` are other relays of the same level; the relay's own address among them is recognised and left out.

    `reach` says which addresses the upstreams may have, if a hub has named them.
    """

    folder: Path
    upstreams: tuple[str, ...]
    run: str
    trusted_key: str
    host: str = "127.0.0.1"
    port: int = 8472
    settings: RelaySettings = field(default_factory=RelaySettings)
    peers: tuple[str, ...] = ()
    witnesses: tuple[str, ...] = ()  # public keys of those whose signed ledger heads are mirrored, too
    reach: Reach | None = None
