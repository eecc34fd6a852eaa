"""What a worker computes with and how much at once: from what the run takes, and from what this machine has."""

from __future__ import annotations

import logging

from shoal.engines import ENGINES, choose
from shoal.protocol import RunInfo
from shoal.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def fitted(settings: WorkerSettings, engine: str, run: RunInfo) -> WorkerSettings:
    """The settings with the device and the number format chosen, before anything is downloaded.

    A `ConfigError` if the run's validators can judge nothing that this machine computes.
    """
    device, dtype = choose(engine, settings.device, settings.dtype, run.profiles)
    log.info("computing on %s in %s (the run takes %s)", device, dtype, ", ".join(run.profiles))
    if settings.device == "auto" and device != ENGINES[engine].device("auto"):
        log.warning("the GPU is not used: the run takes nothing that it computes; its owner may add a profile for it")
    return settings.model_copy(update={"device": device, "dtype": dtype})
