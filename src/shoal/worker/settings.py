"""The [worker] section of a recipe, the configuration of one worker, and what fits its machine.

A worker's folder (`node.key`, `heads.jsonl`, `outbox/`, `cache/`) belongs to one process at a time, by its `.lock`: two
processes with one key and one outbox would submit for each other. Credit belongs to `node.key`.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from shoal.client import Intervals
from shoal.engines import ENGINES, BoundedEngine, Engine, check_engine, choose, free_bytes
from shoal.errors import ResourceError
from shoal.protocol import MAX_LEASES_PER_REQUEST, Lease, RunInfo, SignedDocument, SigningKey, load_or_create_key
from shoal.runtime.exchange import HttpClient
from shoal.runtime.limits import ALL_DAY, Hours, MachineLimits, show_bytes

log = logging.getLogger(__name__)


class WorkerSettings(BaseModel, frozen=True, extra="forbid"):
    """How a worker works. The lease says what it generates; `device` and `dtype` change only the rounding."""

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
    """Without `root_fingerprint` the first hub that answers is believed. `http` and `pace` are for tests and
    one-process runs. `cheat` makes the worker dishonest (`adversary`), to attack one's own run. `further_hubs` are
    addresses of the same run; `vouch` is the owner's signed statement that this machine is theirs; `certificate` makes
    it a trusted worker. `hours` and `idle`: when it may work."""

    folder: Path
    settings: WorkerSettings
    engine: str
    hub_url: str
    root_fingerprint: str | None
    name: str
    http: HttpClient | None = None
    cheat: str | None = None
    further_hubs: tuple[str, ...] = ()
    vouch: SignedDocument | None = None
    certificate: SignedDocument | None = None
    limits: MachineLimits = field(default_factory=MachineLimits)
    hours: Hours = ALL_DAY
    idle: bool = False
    pace: Intervals = field(default_factory=Intervals)


def check_choices(engine: str, cheat: str | None, settings: WorkerSettings | None = None) -> None:
    """Raise `ConfigError` for an unknown name, before the node registers."""
    chosen = settings or WorkerSettings()
    check_engine(engine, chosen.device, chosen.dtype)
    if cheat is not None:
        from shoal.adversary import find_cheat

        find_cheat(cheat)


def identity(folder: Path) -> SigningKey:
    return load_or_create_key(folder / "node.key")


def fitted(settings: WorkerSettings, engine: str, run: RunInfo, closed: Collection[str] = ()) -> WorkerSettings:
    """The device and the number format, none of `closed`; `ConfigError` if the run takes work of none."""
    taken = [kind for kind in run.profiles if kind.partition("/")[2] not in closed]
    device, dtype = choose(engine, settings.device, settings.dtype, taken)
    log.info("computing on %s in %s (the run takes %s)", device, dtype, ", ".join(run.profiles))
    if settings.device == "auto" and device != ENGINES[engine].device("auto"):
        log.warning("the GPU is not used: the run takes nothing that it computes; its owner may add a profile for it")
    return settings.model_copy(update={"device": device, "dtype": dtype})


def refuse_too_large(run: RunInfo, device: str, dtype: str, limits: MachineLimits) -> None:
    """Raise `ResourceError` before anything is downloaded if the model does not fit into memory."""
    needed, allowed = run.model.parameters * (2 if dtype == "bfloat16" else 4), min(limits.memory(), free_bytes(device))
    remedy = "allow more (--max-memory), choose another --device, or use another machine"
    _refuse(run, needed, allowed, f"in {dtype}", f"of memory may be used on {device}: {remedy}")


def refuse_too_little_disk(run: RunInfo, folder: Path, limits: MachineLimits) -> None:
    """The same if not even 16-bit weights fit on the disk; the manifest will say what exactly is needed."""
    needed, allowed = 2 * run.model.parameters, limits.disk(folder)
    _refuse(run, needed, allowed, "of disk at least", f"are allowed in {folder}: allow more (--max-disk)")


def _refuse(run: RunInfo, needed: int, allowed: int, how: str, remedy: str) -> None:
    if needed > allowed:
        raise ResourceError(
            f"the model of run {run.run} has {run.model.parameters:,} weights, which take {show_bytes(needed)} {how}, "
            f"and {show_bytes(allowed)} {remedy}"
        )


def units_that_fit(engine: Engine, leases: Sequence[Lease]) -> int:
    """How many such units fit into memory together: what does not fit is generated later and keeps others waiting. At
    least one: a group is split if necessary."""
    if not isinstance(engine, BoundedEngine):
        return MAX_LEASES_PER_REQUEST
    longest = max(len(lease.prompt_ids) + lease.sampling.max_new_tokens for lease in leases)
    return max(1, engine.rows_at_once(longest) // max(len(lease.seeds) for lease in leases))
