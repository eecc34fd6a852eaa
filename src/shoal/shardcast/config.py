"""How a relay is set up: the settings of a recipe, and with them what only the machine knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class RelaySettings(BaseModel):
    """How a relay mirrors and serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kept_versions: int = Field(default=3, ge=1, le=1000, description="newest versions kept on disk")
    connections: int = Field(default=4, ge=1, le=64, description="chunks fetched at the same time")
    max_clients: int = Field(default=512, ge=1, description="clients served at the same time")
    long_poll_s: float = Field(
        default=20.0, ge=0, le=60, description="how long an upstream may hold the question for a newer version"
    )
    poll_s: float = Field(default=1.0, gt=0, description="the pace of asking an upstream that does not hold it")


@dataclass(frozen=True)
class RelayConfig:
    folder: Path
    upstreams: tuple[str, ...]
    run: str
    trusted_key: str
    host: str = "127.0.0.1"
    port: int = 8472
    settings: RelaySettings = field(default_factory=RelaySettings)
