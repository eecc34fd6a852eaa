"""Limits of servers and clients, and the configuration of a relay."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shoal.runtime.targets import Reach
from shoal.shardcast.connection import Throttle, Timeouts

# Eight chunks at a time over a slow link all arrive late; so a source begins with few, and gets as many as its link
# bears at this rate each.
FEW_ATTEMPTS, ATTEMPT_BYTES_S = 3, 128 * 1024


@dataclass(frozen=True)
class PoolSettings:
    """`min_rate_bytes_s`: a source that is slower is left in the middle of a chunk."""

    connections: int = 8
    min_rate_bytes_s: float = 32 * 1024
    timeouts: Timeouts = field(default_factory=Timeouts)

    @classmethod
    def throttled(cls, rate_bytes_s: float | None, reach: Reach | None = None) -> PoolSettings:
        """Settings for a limited rate: fewer connections, and no source is left because this side is slow."""
        if rate_bytes_s is None:
            return cls(timeouts=Timeouts(reach=reach))
        connections = max(1, min(cls.connections, int(rate_bytes_s / ATTEMPT_BYTES_S)))
        least = min(cls.min_rate_bytes_s, rate_bytes_s / connections / 4)
        return cls(connections, least, Timeouts(throttle=Throttle(rate_bytes_s), reach=reach))


def client_of(address: str) -> str:
    """The client of an address for limits; of IPv6 the /64 network, since a client has all addresses in it.

    >>> client_of("::ffff:192.0.2.7"), client_of("2001:db8::1:2:3:4%eth0")
    ('192.0.2.7', '2001:db8::/64')
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


class RelaySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_versions: int = Field(default=3, ge=1, le=1000, description="newest versions kept on disk")
    disk_budget_gb: float | None = Field(
        default=None, gt=0, description="bytes of chunks kept on disk at most; the oldest versions go first"
    )
    connections: int = Field(default=4, ge=1, le=64, description="chunks fetched at the same time")
    connections_per_client: int | None = Field(
        default=256, ge=1, description="connections served to one address (of IPv6: to one /64 network)"
    )


@dataclass(frozen=True)
class RelayConfig:
    """`peers` are relays of the same level; the relay's own address among them is left out. `reach`: allowed addresses
    of upstreams, if a hub has named them. Long polls last `long_poll_s`; an upstream without them is asked every
    `poll_s`."""

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
