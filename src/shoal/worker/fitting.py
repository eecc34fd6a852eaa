"""What a worker computes with and how much at once: from what the run takes, and from what this machine has."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from shoal.engines import ENGINES, Engine, choose
from shoal.engines.memory import free_bytes
from shoal.engines.protocol import BoundedEngine
from shoal.errors import ResourceError
from shoal.protocol import Lease, RunInfo
from shoal.protocol.lease import MAX_LEASES_PER_REQUEST
from shoal.runtime.limits import MachineLimits, show_bytes
from shoal.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def fitted(settings: WorkerSettings, engine: str, run: RunInfo, closed: Collection[str] = ()) -> WorkerSettings:
    """The settings with the device and the number format chosen, before anything is downloaded; none of `closed`.

    A `ConfigError` if the run's validators can judge nothing that this machine computes.
    """
    taken = [kind for kind in run.profiles if kind.partition("/")[2] not in closed]
    device, dtype = choose(engine, settings.device, settings.dtype, taken)
    log.info("computing on %s in %s (the run takes %s)", device, dtype, ", ".join(run.profiles))
    if settings.device == "auto" and device != ENGINES[engine].device("auto"):
        log.warning("the GPU is not used: the run takes nothing that it computes; its owner may add a profile for it")
    return settings.model_copy(update={"device": device, "dtype": dtype})


def refuse_too_large(run: RunInfo, device: str, dtype: str, limits: MachineLimits) -> None:
    """Raise `ResourceError` before anything is downloaded if the model, as announced, takes more than it may."""
    needed = run.model.parameters * (2 if dtype == "bfloat16" else 4)
    allowed = min(limits.memory(), free_bytes(device))
    if needed > allowed:
        raise ResourceError(
            f"the model of run {run.run} has {run.model.parameters:,} weights, which take "
            f"{show_bytes(needed)} in {dtype}, and {show_bytes(allowed)} of memory may be used on {device}: "
            "allow more (--max-memory), choose another --device, or use another machine"
        )


def refuse_too_little_disk(run: RunInfo, folder: Path, limits: MachineLimits) -> None:
    """Raise `ResourceError` if not even 16-bit weights fit on the disk; what exactly is needed, a manifest tells."""
    needed, allowed = 2 * run.model.parameters, limits.disk(folder)
    if needed > allowed:
        raise ResourceError(
            f"the model of run {run.run} has {run.model.parameters:,} weights, which take at least "
            f"{show_bytes(needed)} of disk, and {show_bytes(allowed)} are allowed in {folder}: allow more (--max-disk)"
        )


def units_that_fit(engine: Engine, leases: Sequence[Lease]) -> int:
    """How many units like these are worth asking for together, by memory: what does not fit is drawn one after the
    other, and keeps others waiting. At least one, for a group is split where it must be."""
    if not isinstance(engine, BoundedEngine):
        return MAX_LEASES_PER_REQUEST
    longest = max(len(lease.prompt_ids) + lease.sampling.max_new_tokens for lease in leases)
    return max(1, engine.rows_at_once(longest) // max(len(lease.seeds) for lease in leases))
