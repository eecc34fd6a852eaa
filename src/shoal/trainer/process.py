"""The trainer process: the real hub, origin, model and evaluator put together, under the lock of its folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from shoal.client import ClientOptions, HubClient, RegularHeartbeat
from shoal.engines.asking import Asking
from shoal.engines.dialogue import Talks
from shoal.errors import ConfigError, DeadlineExceeded, ShoalError
from shoal.protocol import RunInfo
from shoal.rewards import DirectScorer, Scorer, ScoringPool
from shoal.runtime.files import ensure_folder
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.trainer.checkpoint import weights_digest
from shoal.trainer.export import hub_name
from shoal.trainer.held_out import Evaluator, GreedyEvaluator
from shoal.trainer.learner import make_deterministic, new_learner, starting_model
from shoal.trainer.loop import TrainingParts, TrainingRun
from shoal.trainer.memory import within_memory
from shoal.trainer.ranks import RankGroup, join_ranks, lost_peer
from shoal.trainer.record import Tracked, Trackers, open_trackers, require_trackers
from shoal.trainer.settings import TrainerConfig, in_group
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
        closing(_scorer(config, stop)) as scorer,
    ):
        try:
            hub.register("trainer", "trainer", config.certificate)
            info = hub.run_info()
            with within_memory(config.model, settings, ranks.world if ranks else 1):
                run = TrainingRun(_parts(config, hub, info, scorer, ranks), stop)
                with RegularHeartbeat(hub, HEARTBEAT_S, run.activity, lambda _reply: None):
                    run.run()
        except DeadlineExceeded:
            if not stop.is_set():
                raise
            log.info("the trainer stopped (%s)", stop.reason)


@contextmanager
def _in_ranks() -> Iterator[RankGroup | None]:
    """The other processes that `torchrun` has started, of which this is the first; None without it."""
    if not in_group():
        yield None
        return
    ranks = join_ranks()
    try:
        yield ranks
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        raise ShoalError(f"the trainer has lost another of its {ranks.world} processes: {error}") from error
    finally:
        ranks.end()


def _scorer(config: TrainerConfig, stop: StopToken) -> Scorer:
    """What scores the trainer's own evaluations. Processes start when the first one is made."""
    if config.scored_by is None:
        return DirectScorer(config.environment)
    return ScoringPool(config.scored_by, config.environment, stop)


def _parts(
    config: TrainerConfig, hub: HubClient, info: RunInfo, scorer: Scorer, ranks: RankGroup | None
) -> TrainingParts:
    """Of several processes none has the whole model, so that none of them can generate with it."""
    settings = config.settings
    evaluate: Evaluator = lambda: None  # noqa: E731
    if ranks is None:
        loaded, actions = starting_model(config.model, settings), Actions()
        learner = new_learner(loaded.model, settings)
        evaluate = GreedyEvaluator(
            loaded.model,
            loaded.tokenizer,
            config.environment,
            info.sampling,
            settings.evaluate_tasks,
            Asking(loaded.files, config.environment, info.sampling.max_new_tokens).ids,
            Talks(config.environment, loaded.files, info.sampling),
            scorer,
        )
    elif settings.evaluate_by == "trainer" and settings.evaluate_every:
        raise ConfigError(
            f"a trainer of {ranks.world} processes cannot evaluate by itself; set trainer.evaluate_by to "
            '"validators", or trainer.evaluate_every to 0'
        )
    else:
        loaded, actions = starting_model(config.model, settings, device="cpu"), leading_actions(ranks)
        learner = lead(loaded, settings, ranks)
    return TrainingParts(
        folder=config.folder,
        hub=hub,
        origin=_origin(config, info),
        learner=learner,
        files=loaded.files,
        key=config.key,
        evaluate=evaluate,
        base_model=hub_name(config.model),
        seed=config.seed,
        actions=actions,
        trackers=_trackers(config, info),
        held_out_tasks=len(config.environment.tasks("held_out")),
        start=lambda: weights_digest(config.model),
    )


def _trackers(config: TrainerConfig, info: RunInfo) -> Trackers:
    shown = {**config.settings.model_dump(mode="json"), "model": Path(config.model).name, "seed": config.seed}
    return open_trackers(config.settings.tracking, Tracked(config.folder, info.run, shown))


def _origin(config: TrainerConfig, info: RunInfo) -> Origin:
    kept = OriginSettings(kept_versions=max(OriginSettings().kept_versions, info.max_staleness + 2))
    return Origin(config.origin_folder, info.run, config.key, settings=kept)
