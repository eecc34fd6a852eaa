"""What a server bears, what a client may receive per second, and how a relay is set up.

An address of IPv4 is one client. Of IPv6 it is the /64 network, because whoever has one address there has all of them.
"""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shoal.runtime.targets import Reach

BURST_S = 1.0  # what may be received at once after a pause
SLICES_PER_S = 8
MIN_SLICE_BYTES = 16 * 1024


@dataclass(frozen=True)
class ServerLimits:
    """What a server bears; None is no limit. `watch_head_s`: how often a head that another process writes is read."""

    max_connections: int = 512
    connections_per_client: int | None = None
    idle_s: float = 30.0
    hold_s: float = 8.0  # below the time a client waits for a first byte, so that it hears "busy", not silence
    min_rate_bytes_s: float = 32 * 1024
    watch_head_s: float = 0.05


class Throttle:
    """What this process may receive per second, over all its connections: a bucket. For any number of threads."""

    def __init__(self, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._level_bytes = self._full_bytes = rate_bytes_s * BURST_S
        self._filled_at_s = float("-inf")
        self._lock = threading.Lock()

    def slice_of(self, size_bytes: int) -> int:
        """How much of `size_bytes` to receive before the bucket is asked again."""
        return min(size_bytes, max(MIN_SLICE_BYTES, int(self.rate_bytes_s / SLICES_PER_S)))

    def take(self, size_bytes: int, now_s: float) -> float:
        """So many bytes have been received; for how long to receive no more."""
        with self._lock:
            gained = (now_s - self._filled_at_s) * self.rate_bytes_s
            self._level_bytes = min(self._full_bytes, self._level_bytes + gained) - size_bytes
            self._filled_at_s = now_s
            return max(0.0, -self._level_bytes / self.rate_bytes_s)


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
    connections_per_client: int | None = Field(
        default=256, ge=1, description="connections served to one address (of IPv6: to one /64 network)"
    )

    @property
    def budget_bytes(self) -> int | None:
        return None if self.disk_budget_gb is None else int(self.disk_budget_gb * 1e9)

    @property
    def limits(self) -> ServerLimits:
        return ServerLimits(connections_per_client=self.connections_per_client)


@dataclass(frozen=True)
class RelayConfig:
    """`peers` are other relays of the same level; the relay's own address among them is recognised and left out.
    `reach`: which addresses upstreams may have, if a hub has named them. An upstream may hold the question for a newer
    version for `long_poll_s`; one that does not is asked every `poll_s`."""

    folder: Path
    upstreams: tuple[str, ...]
    run: str
    trusted_key: str
    host: str = "127.0.0.1"
    port: int = 8472
    settings: RelaySettings = field(default_factory=RelaySettings)
    peers: tuple[str, ...] = ()
    reach: Reach | None = None
    long_poll_s: float = 20.0
    poll_s: float = 1.0
