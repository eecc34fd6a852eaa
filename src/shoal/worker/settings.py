"""What a worker can be told: the [worker] section of a recipe, and who it is in which run.

A worker's folder: its identity, its outbox, its cache of weights. One process at a time.

node.key           who this node is; credit belongs to it, so keep it
heads.jsonl        receipts with the ledger heads that they name, the newest thousand or more (`outbox`)
outbox/            finished work not yet promised by a hub
cache/             weights
.lock              held while a worker runs here: two with one key and one outbox would answer for each other
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field

from shoal.adversary import find_cheat
from shoal.client import Pace
from shoal.engines import check_engine
from shoal.protocol import SignedDocument, SigningKey, load_or_create_key
from shoal.protocol.lease import MAX_LEASES_PER_REQUEST
from shoal.runtime.limits import MachineLimits


class WorkerSettings(BaseModel):
    """How a worker works. What it generates is all in the lease; `device` and `dtype` change no more than rounding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    units_per_lease: int = Field(8, ge=1, le=MAX_LEASES_PER_REQUEST, description="most groups in one engine call")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to generate; auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="what to compute in; auto: the fastest that this machine has and the run takes work of"
    )
    memory_share: float = Field(
        1.0, gt=0, le=1, description="part of the GPU's memory that it may take; for several roles on one GPU"
    )


@dataclass(frozen=True)
class WorkerConfig:
    """One worker: its folder (key, outbox, cache), its engine, and the hub it works for.

    Without `root_fingerprint` the first hub that answers is believed. `http` and `pace` are given only by tests and
    one-process runs. `cheat` makes it a dishonest one (`adversary`), to attack one's own run. `further_hubs` are
    addresses of the same run; `vouch` is an owner's word that this machine is theirs; `limits` what it may take of it.
    """

    folder: Path
    settings: WorkerSettings
    engine: str
    hub_url: str
    root_fingerprint: str | None
    name: str
    http: httpx.Client | None = None
    cheat: str | None = None
    further_hubs: tuple[str, ...] = ()
    vouch: SignedDocument | None = None
    limits: MachineLimits = field(default_factory=MachineLimits)
    pace: Pace = field(default_factory=Pace)


def check_choices(engine: str, cheat: str | None, settings: WorkerSettings | None = None) -> None:
    """Raise `ConfigError` for a name that is not there. Before anything else happens: nobody registers in vain."""
    chosen = settings or WorkerSettings()
    check_engine(engine, chosen.device, chosen.dtype)
    if cheat is not None:
        find_cheat(cheat)


def identity(folder: Path) -> SigningKey:
    return load_or_create_key(folder / "node.key")
