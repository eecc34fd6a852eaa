"""How a relay is set up: the settings of a recipe, and with them what only the machine knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shoal.runtime.targets import Reach
from shoal.shardcast.limits import ServerLimits


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
