"""The trainer process, and what it does from wherever the run stands to its last step.

                 ┌───────────────────────────── the hub ────────────────────────────┐
                 │ status      batch n (long poll)    rollouts n                    │ report n     announce n+1
                 ▼                  ▼                     ▼                         ▲              ▲
    resume ─► replay ─► publish ─► [ wait ─► train ─► row n ─► copy ┄┄► publisher: report ─► save ─► publish ]
                                      ▲         archive                   thread
                                      └─────────── next step ◄──┘               … the last: look back ─► export

The batch is only asked for when it is wanted: the hub writes it down then, and rollouts would be older than they need
be. The trainer waits for it up to `batch_deadline_s`, naming what the hub waits for, and before it writes the row of a
step for the version that the step began with to be out. The order that a crash anywhere relies on, for every version n:

    row n-1 in the metrics ─► report n-1 at the hub ─► checkpoint n durable ─► n at the origin ─► n announced ─► row n

So a version goes out only if its checkpoint (where one is due) is durable, and the newest checkpoint is at most one
version ahead of the hub. A resume loads it, trains on the batches written down since then again (their rows are
dropped, and reported again), and compares what comes out with what was published.

Guards judge what a step begins with. So that nothing ends as a model unjudged, the last version looks back at the batch
that it was made of before it is saved, published and exported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.client import Activity, ClientOptions, HubClient, RegularHeartbeat
from shoal.errors import CheckpointError, DeadlineExceeded, ProtocolError
from shoal.models.folder import model_folder, read_files
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import Batch, EvaluationPage, PolicyManifest, PolicyRef, RunInfo, SigningKey, TrainingBatch
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.files import ensure_folder
from shoal.runtime.lock import FolderLock
from shoal.runtime.sizing import RunSize, settle
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.trainer.archive import RolloutArchive
from shoal.trainer.checkpoint import CheckpointStore, Copied, hold_start, weights_digest
from shoal.trainer.export import ModelCard, beside_the_best, export_policy, hub_name, write_card
from shoal.trainer.folder import Progress, Retention, refuse_foreign
from shoal.trainer.guards import Judged, Watch
from shoal.trainer.learner import Learner, make_deterministic, new_learner, starting_model
from shoal.trainer.memory import within_memory
from shoal.trainer.publisher import Publisher
from shoal.trainer.ranks import RankGroup, join_ranks, lost_peers
from shoal.trainer.record import RunRecord, Stopwatch, Tracked, Trackers, open_trackers, require_trackers
from shoal.trainer.settings import TrainerConfig
from shoal.trainer.shards import Actions, lead
from shoal.trainer.step import StepWork, Stopped

log = logging.getLogger(__name__)

POLL_S = 2.0  # a failed publication, or a request to stop, is noticed within this
LAST_WAIT_S = 120.0  # for the score of the last version
LOOK_S = 0.5
HEARTBEAT_S = 5.0
LOCK_WAIT_S = 10.0  # a supervisor may start the next trainer while the last one is still ending


@dataclass(frozen=True)
class TrainingParts:
    """Everything that a training run talks to. The process puts real ones together; tests pass others."""

    folder: Path
    hub: HubClient
    origin: Origin
    learner: Learner
    files: Mapping[str, bytes]
    key: SigningKey
    base_model: str = ""
    seed: int = 0
    clock: Clock = field(default_factory=SystemClock)
    trackers: Trackers = field(default_factory=Trackers)
    start: Callable[[], str] = lambda: ""  # tells the weights that the run begins with from others


class TrainingRun:
    """One run from wherever it stands to its last step. `version` counts the steps done."""

    def __init__(self, parts: TrainingParts, stop: StopToken) -> None:
        self._parts, self._stop, self._info = parts, stop, parts.hub.run_info()
        settings = self._settings = parts.learner.settings
        self._chosen, lookback = settle(settings, RunSize.of(self._info)), settings.guards.lookback
        kept = Retention(self._chosen.keep_checkpoints, settings.keep_best, self._is_measured, lookback)
        self._store = CheckpointStore(parts.folder / "checkpoints", kept)
        self._record = RunRecord(parts.folder / "metrics.jsonl", parts.hub, parts.trackers, parts.clock)
        self._archive = RolloutArchive(parts.folder / "rollouts", TextTokenizer(parts.files).decode)
        self._actions = Actions()
        self._copied: Copied | None = None  # of the version that was handed over last
        self._saved: int | None = None  # the newest version that is in a checkpoint, or on its way into one
        self._last: StepWork | None = None  # what the run's last step was trained on
        self._watch = Watch(settings.guards)
        self._stopwatch = Stopwatch(parts.clock)
        self.activity = Activity(parts.clock)
        self.version = 0
        self._held_out = HeldOut(settings.evaluate_every, parts.hub.evaluations, parts.clock, stop)

    def _is_measured(self, version: int) -> bool:
        """Whether a version gets a held-out score sooner or later."""
        every = self._settings.evaluate_every
        return every > 0 and (version % every == 0 or version == self._info.steps)

    def run(self) -> None:
        """The story: resume, catch up with what the hub has seen, continue to the last step, export."""
        refuse_foreign(self._parts.folder / "export")
        self._archive.open()
        published = self._parts.hub.status().policy
        self._publisher = self._resume(published)
        try:
            while published is not None and self.version < published.version:
                self._advance()  # a replay: the batches are those of the first time
                if self.version < published.version:
                    self._hand_over(publish=False)
            while self.version < self._info.steps:
                self._hand_over()
                self._advance()
            self._look_back()
            self._hand_over()
            self._finish()
        except Stopped:
            log.info("the trainer stopped (%s) at version %d", self._stop.reason, self.version)
        finally:
            self._parts.trackers.close()
            self._publisher.close()

    def _resume(self, published: PolicyRef | None) -> Publisher:
        """Load the newest checkpoint, if there is one; a publisher that continues with its incarnation."""
        parts, stored, settings, head = self._parts, self._store.newest(), self._settings, self._parts.origin.head()
        incarnation = published.incarnation if published else 0
        held = parts.learner.reference is not None
        hold_start(parts.folder, parts.start, begins=stored is None, needed=held)
        if stored is None:
            log.info("no checkpoint: starting from %s", parts.base_model or "the model")
        else:
            progress, seen = stored.progress, published.version if published else -1
            if progress.run != self._info.run or progress.version > seen + 1:
                here = f"version {progress.version} of run {progress.run}"
                told = f"the hub has seen version {seen} of run {self._info.run} at most: restore the hub's folder, or"
                raise CheckpointError(f"{self._store.folder} holds {here}, but {told} move the checkpoints away")
            self._actions.restore(parts.learner, stored)
            self.version = self._saved = progress.version
            incarnation = max(incarnation, progress.incarnation)
            log.info("resuming at version %d from %s", self.version, stored.folder)
        self._watch.rows = self._record.resume(self.version)
        out = [ref.version for ref in (published, head.policy if head else None) if ref is not None]
        return Publisher(
            origin=parts.origin, hub=parts.hub, record=self._record, store=self._store, files=parts.files,
            dtype=settings.publish_dtype, key=parts.key, run=self._info.run, incarnation=incarnation,
            republished_until=max(out, default=-1), deadline_s=settings.batch_deadline_s, clock=parts.clock,
        )  # fmt: skip

    def _advance(self) -> None:
        """One step: wait for the batch, train, write the row. Saving and publishing begin when it is handed over."""
        step, watch = self.version, self._stopwatch
        with watch.lap("wait_s"):
            batch, rollouts = self._batch_of(step)
        metrics = self._train(batch, rollouts)
        with watch.lap("publish_wait_s"):
            self._publisher.wait()  # so that the hub is never more than one version behind a checkpoint
        times = {"hidden_s": self._publisher.worked_s, "save_s": self._publisher.saved_s, **watch.row()}
        times["tokens_per_s"] = metrics["tokens"] / times["train_s"] if times["train_s"] else 0.0
        judged = self._watch.judge(metrics)
        self._record.add(step, {**metrics, **times, **judged.numbers}, self._held_out.known(step))
        self._heed(judged)
        self._watch.rows.append({"step": step, **metrics, **judged.numbers})
        self.version = step + 1

    def _heed(self, judged: Judged) -> None:
        """A guard may end the run here, before the version is saved or published; the hub hears why first."""
        self._record.warn(judged)
        if judged.stopping:
            self._publisher.wait()
            self._record.report(self._record.take())
            judged.refuse(self._store.folder, [version for version, _ in self._store.sound()])

    def _look_back(self) -> None:
        """The last version is judged as if a step began with it: by the batch that it was made of, forward only."""
        step = self._info.steps - 1
        work = self._last or self._work(*self._batch_of(step))
        with self.activity.busy(f"looking at version {self.version}, the last"):
            seen = self._actions.look_back(self._parts.learner, work, self._stop.is_set)
        judged = self._watch.conclude(step, seen)
        self._record.amend(step, judged.numbers)
        self._heed(judged)
        self._last = None

    def _hand_over(self, publish: bool = True) -> None:
        """Copy this version; the publisher's thread reports the rows before it, saves it if that is due, and publishes
        it. Nothing that it uses changes before it is done: the next copy waits for it."""
        self._publisher.wait()
        # Whether it is to be in a checkpoint and is in none; one that is measured may be the best.
        version, may_be_best = self.version, self._settings.keep_best > 0 and self._is_measured(self.version)
        asked_for = version % self._chosen.checkpoint_every == 0 or version == self._info.steps
        save = version != self._saved and (asked_for or may_be_best)
        with self._stopwatch.lap("copy_s"):
            self._copied = self._actions.copy(self._parts.learner, save)
        if self._copied.captured is not None:
            self._saved = self.version
        rows, scores = self._record.take(), dict(self._record.scores)
        self._publisher.submit(self.version, self._copied, rows, scores, publish)

    def _batch_of(self, step: int) -> tuple[Batch, TrainingBatch]:
        """The written-down batch of a step and its rollouts."""
        clock, hub = self._parts.clock, self._parts.hub
        deadline_s = self._settings.batch_deadline_s
        began_s, waiting = clock.monotonic_s(), "nothing was said"
        while True:  # until it is written down
            self._publisher.check()
            if self._stop.is_set():
                raise Stopped
            left_s = began_s + deadline_s - clock.monotonic_s()
            if left_s <= 0:
                raise DeadlineExceeded(f"no batch for step {step} within {deadline_s:.0f} s; the hub says: {waiting}")
            with self.activity.waiting(f"the batch of step {step}: {waiting}"):
                reply = hub.batch(step, min(POLL_S, left_s))
            if reply.batch is not None:
                break
            waiting = reply.waiting or waiting
        batch, rollouts = reply.batch, hub.rollouts(step)
        written, sent = [group.unit for group in batch.groups], [group.unit for group in rollouts.groups]
        if rollouts.step != step or written != sent:
            told = f"sent {sent[:8]} for step {rollouts.step}"
            raise ProtocolError(f"the hub wrote down units {written[:8]} for step {step} but {told}")
        return batch, rollouts

    def _work(self, batch: Batch, rollouts: TrainingBatch) -> StepWork:
        (info, sampling), seed = (self._info, self._info.sampling), self._parts.seed
        bound, longest = info.max_staleness, sampling.max_new_tokens
        return StepWork(batch.step, rollouts.groups, sampling.temperature, bound, seed, longest)

    def _train(self, batch: Batch, rollouts: TrainingBatch) -> dict[str, float]:
        """Train on a batch. It is archived meanwhile, also if training fails: one will want to look at it then."""
        self._watch.begin(batch.step)
        work = self._work(batch, rollouts)
        self._last = work if batch.step == self._info.steps - 1 else None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive") as beside:
            archived = beside.submit(self._archive.write, batch, rollouts)
            with self.activity.busy(f"training step {batch.step}"), self._stopwatch.lap("train_s"):
                metrics = self._actions.train(self._parts.learner, work, self._stop.is_set, self._watch.veto)
            archived.result()
        metrics["dropped_groups"] += batch.dropped_groups
        if batch.sampled_reward is not None:
            metrics["sampled_reward"] = batch.sampled_reward
        return metrics

    def _finish(self) -> None:
        """The last version is out: export it, then measure it. Nothing that may fail or wait comes before."""
        manifest = self._publisher.wait()
        assert manifest is not None, "a version was handed over before"
        assert self._copied is not None
        folder, dtype = self._parts.folder / "export", self._settings.publish_dtype
        export_policy(folder, self._copied.weights, self._parts.files, self._card(manifest), dtype)
        if self._settings.evaluate_every:
            with self.activity.waiting(f"the score of version {self.version}"):
                score = self._held_out.last(self.version)
            own = {} if score is None else {"held_out": score}
            self._record.add(self.version, own, self._held_out.known(self.version))
            self._record.report(self._record.take())
            write_card(folder, self._card(manifest), dtype)
        self._store.prune_finished(self._record.scores)
        log.info("the run is complete: version %d is exported to %s", self.version, folder)

    def _card(self, manifest: PolicyManifest) -> ModelCard:
        info, scores = self._info, self._record.scores
        return ModelCard(
            progress=Progress(info.run, self.version, manifest.policy.incarnation), base_model=self._parts.base_model,
            environment=info.environment, digest=manifest.policy.digest, ledger_head=manifest.ledger_head,
            metrics=self._record.latest(self.version), scores=scores,
            chosen="the last of the run" + beside_the_best(self.version, scores),
        )  # fmt: skip


@dataclass
class HeldOut:
    """The greedy scores on held-out tasks, by validators: `page` asks the hub for those of versions from a number on. A
    score of a part of the tasks (`Evaluation.partial`) is none: it would be read as a rise or a fall."""

    every: int
    page: Callable[[int], EvaluationPage]
    clock: Clock
    stop: StopToken
    _told: dict[int, float] = field(default_factory=dict)
    _since: int = 0

    def known(self, version: int) -> dict[int, float]:
        """The row of this version is about to be written: its score, and those of earlier ones that came since."""
        if not self.every:
            return {}
        listed = self.page(self._since).evaluations
        found = {each.policy.version: None if each.partial else each.mean for each in listed if each.complete}
        # What a replay has not come to yet is known already; it is told with its own row.
        open_ones = [each.policy.version for each in listed if not each.complete or each.policy.version > version]
        self._since = min(open_ones, default=max(found, default=self._since - 1) + 1)
        told = {number: mean for number, mean in found.items() if mean is not None and number <= version}
        news = dict(told.items() - self._told.items())
        self._told |= news
        return news

    def last(self, version: int) -> float | None:
        """The run is over: the score of its last version, if validators measure all of it."""
        until_s = self.clock.monotonic_s() + LAST_WAIT_S
        while self.every and self.clock.monotonic_s() < until_s:
            listed = self.page(version).evaluations
            found = next((each for each in listed if each.policy.version == version), None)
            if found is None or found.partial:
                break
            if found.complete:
                return found.mean
            if self.stop.wait(LOOK_S):
                raise Stopped
        log.info("validators have not measured all of version %d: it stays unscored", version)
        return None


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
    loaded = starting_model(config.model, settings, device=None if ranks is None else "cpu")
    learner = new_learner(loaded.model, settings) if ranks is None else lead(loaded, settings, ranks)
    kept = OriginSettings(keep_versions=max(OriginSettings().keep_versions, info.max_staleness + 2))
    shown = {**settings.model_dump(mode="json"), "model": Path(config.model).name, "seed": config.seed}
    return TrainingParts(
        folder=config.folder, hub=hub, origin=Origin(config.origin_folder, info.run, config.key, settings=kept),
        learner=learner, files=loaded.files, key=config.key, base_model=hub_name(config.model), seed=config.seed,
        trackers=open_trackers(settings.tracking, Tracked(config.folder, info.run, shown)),
        start=lambda: weights_digest(config.model),
    )  # fmt: skip
