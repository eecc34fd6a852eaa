"""The trainer process: the real hub, origin and model put together, under the lock of its folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from shoal.client import ClientOptions, HubClient, RegularHeartbeat
from shoal.errors import DeadlineExceeded
from shoal.models.folder import model_folder, read_files
from shoal.protocol import RunInfo
from shoal.runtime.files import ensure_folder
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.trainer.checkpoint import weights_digest
from shoal.trainer.export import hub_name
from shoal.trainer.learner import make_deterministic, new_learner, starting_model
from shoal.trainer.loop import TrainingParts, TrainingRun
from shoal.trainer.memory import within_memory
from shoal.trainer.ranks import RankGroup, join_ranks, lost_peers
from shoal.trainer.record import Tracked, open_trackers, require_trackers
from shoal.trainer.settings import TrainerConfig
from shoal.trainer.shards import Actions, lead, leading_actions

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
LOCK_WAIT_S = 10.0  # a supervisor may start the next trainer while the last one is still ending


def run_trainer(config: TrainerConfig, stop: StopToken) -> None:
    """Train until the run's last step, or until told to stop. Failures are `ShoalError`s; stopping is none."""
    settings = config.settings
    require_trackers(settings.tracking)
    make_deterministic(settings)
    ensure_folder(config.folder)
    options = ClientOptions(patience_s=settings.batch_deadline_s)
    with (
        _in_ranks() as ranks,
        FolderLock(config.folder).acquire(stop, LOCK_WAIT_S),
        closing(HubClient(config.hub_url, config.key, stop, config.root_fingerprint, options=options)) as hub,
    ):
        try:
            hub.register("trainer", "trainer", config.certificate)
            info = hub.run_info()
            folder = model_folder(config.model)
            weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            with within_memory(settings, read_files(folder), ranks.world if ranks else 1, weight_bytes):
                run = TrainingRun(_parts(config, hub, info, ranks), stop)
                with RegularHeartbeat(hub, HEARTBEAT_S, run.activity, lambda _reply: None):
                    run.run()
        except DeadlineExceeded:
            if not stop.is_set():
                raise
            log.info("the trainer stopped (%s)", stop.reason)


@contextmanager
def _in_ranks() -> Iterator[RankGroup | None]:
    """The other processes that `torchrun` has started, of which this is the first; None without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    ranks = join_ranks()
    try:
        with lost_peers(ranks):
            yield ranks
    finally:
        ranks.end()


def _parts(config: TrainerConfig, hub: HubClient, info: RunInfo, ranks: RankGroup | None) -> TrainingParts:
    settings = config.settings
    if ranks is None:
        loaded, actions = starting_model(config.model, settings), Actions()
        learner = new_learner(loaded.model, settings)
    else:
        loaded, actions = starting_model(config.model, settings, device="cpu"), leading_actions(ranks)
        learner = lead(loaded, settings, ranks)
    kept = OriginSettings(kept_versions=max(OriginSettings().kept_versions, info.max_staleness + 2))
    shown = {**settings.model_dump(mode="json"), "model": Path(config.model).name, "seed": config.seed}
    return TrainingParts(
        folder=config.folder, hub=hub, origin=Origin(config.origin_folder, info.run, config.key, settings=kept),
        learner=learner, files=loaded.files, key=config.key, base_model=hub_name(config.model), seed=config.seed,
        actions=actions, trackers=open_trackers(settings.tracking, Tracked(config.folder, info.run, shown)),
        start=lambda: weights_digest(config.model),
    )  # fmt: skip
