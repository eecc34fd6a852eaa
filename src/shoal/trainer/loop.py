"""The trainer process: resume, train every remaining step, export.

                 ┌───────────────────────────── the hub ────────────────────────────┐
                 │ status      batch n (long poll)    rollouts n                    │ report n     announce n+1
                 ▼                  ▼                     ▼                         ▲              ▲
    resume ─► replay ─► publish ─► [ wait ─► train ─► row n ─► copy ┄┄► publisher: report ─► save ─► publish ]
                                      ▲         archive                   thread
                                      └─────────── next step ◄──┘        … after the last: check policy ─► export

The trainer asks for a batch only when it needs it: the hub chooses the batch then, so its rollouts are as new as
possible. It waits up to `batch_deadline_s` for each further accepted group, and logs what the hub waits for. Before it
writes the row of a step it waits until the version that the step began with is published. The order for every
version n, which crash recovery relies on:

    row n-1 in the metrics ─► report n-1 at the hub ─► checkpoint n durable ─► n at the origin ─► n announced ─► row n

So a version is published only after its checkpoint (where one is due) is durable, and the newest checkpoint is at most
one version ahead of the hub. A resume loads it, trains again on the batches that the hub has since written down (their
rows are dropped and reported again), and compares the digests with those that were published.

Guards judge the policy that a step begins with. The last version has no next step: it is checked on its own batch
before it is saved, published and exported.
"""

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from shoal.client import Activity, ClientOptions, HubClient, RegularHeartbeat
from shoal.errors import CheckpointError, DeadlineExceeded, ProtocolError
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.protocol import Batch, EvaluationPage, PolicyManifest, PolicyRef, SigningKey, TrainingBatch
from shoal.runtime import Clock, FolderLock, StopToken, SystemClock, ensure_folder
from shoal.runtime.sizing import RunSize, settle
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.trainer.archive import RolloutArchive
from shoal.trainer.checkpoint import CheckpointStore, StateCopy, check_start_weights, weights_digest
from shoal.trainer.export import ModelCard, beside_the_best, export_policy, hub_name, write_card
from shoal.trainer.folder import Retention, TrainerProgress, refuse_foreign
from shoal.trainer.guards import GuardMonitor, GuardReport
from shoal.trainer.learner import Learner, make_deterministic, new_learner, starting_model
from shoal.trainer.memory import within_memory
from shoal.trainer.publisher import PolicyOrigin, Publisher
from shoal.trainer.ranks import RankGroup, join_ranks, lost_peers
from shoal.trainer.record import RunRecord, Stopwatch, Tracked, Trackers, TrainerHub, open_trackers, require_trackers
from shoal.trainer.settings import TrainerConfig
from shoal.trainer.shards import Actions, lead_ranks
from shoal.trainer.step import StepWork, Stopped

log = logging.getLogger(__name__)

POLL_S = 2.0  # a failed publication or a request to stop is noticed within this time
LAST_WAIT_S = 120.0  # for the score of the last version
LOOK_S = 0.5
HEARTBEAT_S = 5.0
MOST_PARTS, NO_LABEL = 32, re.compile(r"[^\w.-]")
LOCK_WAIT_S = 10.0  # the previous trainer may still be ending


@dataclass(frozen=True)
class TrainingParts:
    """`start` gives a digest of the weights that training begins with."""

    folder: Path
    hub: TrainerHub
    origin: PolicyOrigin
    learner: Learner
    files: Mapping[str, bytes]
    key: SigningKey
    base_model: str = ""
    seed: int = 0
    clock: Clock = field(default_factory=SystemClock)
    trackers: Trackers = field(default_factory=Trackers)
    start: Callable[[], str] = lambda: ""


class TrainingRun:
    def __init__(self, parts: TrainingParts, stop: StopToken) -> None:
        self._parts, self._stop, self._info = parts, stop, parts.hub.run_info()
        settings = self._settings = parts.learner.settings
        self._chosen, lookback = settle(settings, RunSize.of(self._info)), settings.guards.lookback
        kept = Retention(self._chosen.keep_checkpoints, settings.keep_best, self._is_measured, lookback)
        self._store = CheckpointStore(parts.folder / "checkpoints", kept)
        self._record = RunRecord(parts.folder / "metrics.jsonl", parts.hub, parts.trackers, parts.clock)
        self._archive = RolloutArchive(parts.folder / "rollouts", TextTokenizer(parts.files).decode)
        self._actions = Actions()
        self._copied: StateCopy | None = None  # of the version that was handed over last
        self._saved: int | None = None  # the newest version that is in a checkpoint, or on its way into one
        self._last: StepWork | None = None  # what the run's last step was trained on
        self._watch = GuardMonitor(settings.guards)
        self._stopwatch = Stopwatch(parts.clock)
        self.activity = Activity(parts.clock)
        self.version = 0
        self._held_out = HeldOut(settings.evaluate_every, parts.hub.evaluations, parts.clock, stop)

    def _is_measured(self, version: int) -> bool:
        every = self._settings.evaluate_every
        return every > 0 and (version % every == 0 or version == self._info.steps)

    def run(self) -> None:
        refuse_foreign(self._parts.folder / "export")
        self._archive.open()
        published = self._parts.hub.status().policy
        self._publisher = self._resume(published)
        try:
            while published is not None and self.version < published.version:
                self._advance()  # a replay, with the same batches as before
                if self.version < published.version:
                    self._submit_version(publish=False)
            while self.version < self._info.steps:
                self._submit_version()
                self._advance()
            self._check_last_version()
            self._submit_version()
            self._finish()
        except Stopped:
            log.info("the trainer stopped (%s) at version %d", self._stop.reason, self.version)
        finally:
            self._parts.trackers.close()
            self._publisher.close()

    def _resume(self, published: PolicyRef | None) -> Publisher:
        """The publisher continues with the incarnation that was published last."""
        parts, stored, settings, head = self._parts, self._store.newest(), self._settings, self._parts.origin.head()
        incarnation = published.incarnation if published else 0
        held = parts.learner.reference is not None
        check_start_weights(parts.folder, parts.start, begins=stored is None, needed=held)
        if stored is None:
            log.info("no checkpoint: starting from %s", parts.base_model or "the model")
        else:
            progress, seen = stored.progress, published.version if published else -1
            if progress.run != self._info.run or progress.version > seen + 1:
                here = f"version {progress.version} of run {progress.run}"
                seen_there = f"the hub has seen at most version {seen} of run {self._info.run}"
                remedy = "restore the hub's folder, or move the checkpoints away"
                raise CheckpointError(f"{self._store.folder} holds {here}, but {seen_there}: {remedy}")
            self._actions.restore(parts.learner, stored)
            self.version = self._saved = progress.version
            incarnation = max(incarnation, progress.incarnation)
            log.info("resuming at version %d from %s", self.version, stored.folder)
        self._watch.rows = self._record.resume(self.version)
        out = [ref.version for ref in (published, head.policy if head else None) if ref is not None]
        return Publisher(
            origin=parts.origin, hub=parts.hub, record=self._record, store=self._store, files=parts.files,
            dtype=settings.publish_dtype, key=parts.key, run=self._info.run, incarnation=incarnation,
            republished_until=max(out, default=-1), deadline_s=self._chosen.batch_deadline_s, clock=parts.clock,
        )  # fmt: skip

    def _advance(self) -> None:
        """One step: wait for the batch, train, write the row. Saving and publishing begin when it is handed over."""
        step, watch = self.version, self._stopwatch
        with watch.lap("wait_s"):
            batch, rollouts = self._batch_of(step)
        metrics = self._train(batch, rollouts)
        with watch.lap("publish_wait_s"):
            self._publisher.wait()  # the hub is never more than one version behind a checkpoint
        times = {"hidden_s": self._publisher.worked_s, "save_s": self._publisher.saved_s, **watch.row()}
        times["tokens_per_s"] = metrics["tokens"] / times["train_s"] if times["train_s"] else 0.0
        judged = self._watch.judge(metrics)
        self._record.add(step, {**metrics, **times, **judged.numbers}, self._held_out.known(step))
        self._report_alarms(judged)
        self._watch.rows.append({"step": step, **metrics, **judged.numbers})
        self.version = step + 1

    def _report_alarms(self, judged: GuardReport) -> None:
        """A guard may stop the run here, before the version is saved or published. The hub hears the reason first."""
        self._record.warn(judged)
        if judged.stopping:
            self._publisher.wait()
            self._record.report(self._record.take())
            judged.refuse(self._store.folder, [version for version, _ in self._store.sound()])

    def _check_last_version(self) -> None:
        step = self._info.steps - 1
        work = self._last or self._work(*self._batch_of(step))
        with self.activity.busy(doing := f"looking at version {self.version}, the last"):
            seen = self._actions.check_policy(self._parts.learner, work, self._reporting(doing))
        judged = self._watch.check_last_version(step, seen)
        self._record.amend(step, judged.numbers)
        self._report_alarms(judged)
        self._last = None

    def _submit_version(self, publish: bool = True) -> None:
        """Copy this version for the publisher's thread. The next copy waits for it, so the copied memory does not
        change meanwhile."""
        self._publisher.wait()
        # A version that validators measure may become the best one, so it is saved too.
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
        clock, hub = self._parts.clock, self._parts.hub
        deadline_s = self._chosen.batch_deadline_s
        began_s, accepted, waiting = clock.monotonic_s(), 0, "nothing was said"
        while True:  # until it is written down
            self._publisher.check()
            if self._stop.is_set():
                raise Stopped
            left_s = began_s + deadline_s - clock.monotonic_s()
            if left_s <= 0:
                why = f"no batch for step {step}, and no further group accepted within {deadline_s:.0f} s"
                raise DeadlineExceeded(f"{why}; the hub says: {waiting}")
            with self.activity.waiting(f"the batch of step {step}: {waiting}"):
                reply = hub.batch(step, min(POLL_S, left_s))
            if reply.batch is not None:
                break
            waiting = reply.waiting or waiting
            if reply.accepted != accepted:
                began_s, accepted = clock.monotonic_s(), reply.accepted
                self._actions.wait(self._parts.learner)
        batch, rollouts = reply.batch, hub.rollouts(step)
        written, sent = [group.unit for group in batch.groups], [group.unit for group in rollouts.groups]
        if rollouts.step != step or written != sent:
            details = f"sent {sent[:8]} for step {rollouts.step}"
            raise ProtocolError(f"the hub wrote down units {written[:8]} for step {step} but {details}")
        return batch, rollouts

    def _work(self, batch: Batch, rollouts: TrainingBatch) -> StepWork:
        (info, sampling), seed = (self._info, self._info.sampling), self._parts.seed
        bound, longest = info.max_staleness, sampling.max_new_tokens
        return StepWork(batch.step, rollouts.groups, sampling.temperature, bound, seed, longest)

    def _train(self, batch: Batch, rollouts: TrainingBatch) -> dict[str, float]:
        """The batch is archived at the same time, also if training fails: then somebody will want to read it."""
        self._watch.begin(batch.step)
        work = self._work(batch, rollouts)
        self._last = work if batch.step == self._info.steps - 1 else None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive") as beside:
            archived = beside.submit(self._archive.write, batch, rollouts)
            with self.activity.busy(doing := f"training step {batch.step}"), self._stopwatch.lap("train_s"):
                metrics = self._actions.train(self._parts.learner, work, self._reporting(doing), self._watch.veto)
            archived.result()
        metrics["dropped_groups"] += batch.dropped_groups
        if batch.sampled_reward is not None:
            metrics["sampled_reward"] = batch.sampled_reward
        return {**metrics, **_of_rollouts(rollouts)}

    def _reporting(self, doing: str) -> Callable[[], bool]:
        """Whether to stop, asked before each pass: heartbeats count them, so nobody takes a long step for a standstill
        (`run/progress`)."""
        passes = itertools.count(1)

        def interrupted() -> bool:
            self.activity.says(f"{doing}, pass {next(passes)}")
            return self._stop.is_set()

        return interrupted

    def _finish(self) -> None:
        """Nothing that may fail or wait comes before the export."""
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
            progress=TrainerProgress(info.run, self.version, manifest.policy.incarnation),
            base_model=self._parts.base_model, environment=info.environment, digest=manifest.policy.digest,
            ledger_head=manifest.ledger_head, metrics=self._record.latest(self.version), scores=scores,
            chosen="the last of the run" + beside_the_best(self.version, scores),
        )  # fmt: skip


@dataclass
class HeldOut:
    """Held-out scores by version. `page` asks the hub for evaluations from a version on. A score of only a part of the
    tasks (`Evaluation.partial`) is ignored: it would look like a rise or a fall."""

    every: int
    page: Callable[[int], EvaluationPage]
    clock: Clock
    stop: StopToken
    _reported: dict[int, float] = field(default_factory=dict)
    _since: int = 0

    def known(self, version: int) -> dict[int, float]:
        """Scores that are new since the last call, of versions up to this one."""
        if not self.every:
            return {}
        listed = self.page(self._since).evaluations
        found = {each.policy.version: None if each.partial else each.mean for each in listed if each.complete}
        # During a replay, scores of later versions are known already; each is reported with its own row.
        open_ones = [each.policy.version for each in listed if not each.complete or each.policy.version > version]
        self._since = min(open_ones, default=max(found, default=self._since - 1) + 1)
        scores = {number: mean for number, mean in found.items() if mean is not None and number <= version}
        news = dict(scores.items() - self._reported.items())
        self._reported |= news
        return news

    def last(self, version: int) -> float | None:
        """The score of the last version, or None if validators do not measure all of it in time."""
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
    """Failures raise `ShoalError`; stopping does not."""
    settings = config.settings
    require_trackers(settings.tracking)
    make_deterministic(settings)
    ensure_folder(config.folder)
    options = ClientOptions(patience_s=settle(settings).batch_deadline_s)
    with (
        _in_ranks() as ranks,
        FolderLock(config.folder).acquire(stop, LOCK_WAIT_S),
        closing(HubClient(config.hub_url, config.key, stop, config.root_fingerprint, options=options)) as hub,
    ):
        try:
            hub.register("trainer", "trainer", config.certificate)
            with training_parts(config, hub, ranks) as parts:
                run = TrainingRun(parts, stop)
                with RegularHeartbeat(hub, HEARTBEAT_S, run.activity, lambda _reply: None):
                    run.run()
        except DeadlineExceeded:
            if not stop.is_set():
                raise
            log.info("the trainer stopped (%s)", stop.reason)


@contextmanager
def _in_ranks() -> Iterator[RankGroup | None]:
    """The group of processes that `torchrun` started, of which this is rank 0; None in a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    ranks = join_ranks()
    try:
        with lost_peers(ranks):
            yield ranks
    finally:
        ranks.end()


@contextmanager
def training_parts(
    config: TrainerConfig, hub: TrainerHub, ranks: RankGroup | None = None, origin: PolicyOrigin | None = None
) -> Iterator[TrainingParts]:
    """While they are used, a lack of memory is said in words. Without `origin`: the one in `config.origin_folder`."""
    folder = model_folder(config.model)
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with within_memory(config.settings, read_files(folder), ranks.world if ranks else 1, weight_bytes):
        yield _parts(config, hub, ranks, origin)


def _parts(
    config: TrainerConfig, hub: TrainerHub, ranks: RankGroup | None, origin: PolicyOrigin | None
) -> TrainingParts:
    info = hub.run_info()
    waits = settle(config.settings, RunSize.of(info)).batch_deadline_s
    settings = config.settings.model_copy(update={"batch_deadline_s": waits})  # which the other ranks are sent
    loaded = starting_model(config.model, settings, device=None if ranks is None else "cpu")
    learner = new_learner(loaded.model, settings) if ranks is None else lead_ranks(loaded, settings, ranks)
    kept = OriginSettings(keep_versions=max(OriginSettings().keep_versions, info.max_staleness + 2))
    shown = {**settings.model_dump(mode="json"), "model": Path(config.model).name, "seed": config.seed}
    return TrainingParts(
        folder=config.folder, hub=hub,
        origin=origin or Origin(config.origin_folder, info.run, config.key, settings=kept),
        learner=learner, files=loaded.files, key=config.key, base_model=hub_name(config.model), seed=config.seed,
        trackers=open_trackers(settings.tracking, Tracked(config.folder, info.run, shown)),
        start=lambda: weights_digest(config.model),
    )  # fmt: skip


def _of_rollouts(batch: TrainingBatch) -> dict[str, float]:
    """The mean length of a completion, and of each part of the rewards."""
    trained = [rollout for group in batch.groups for rollout in group.rollouts]
    names = sorted({name for each in trained for name in each.parts})[:MOST_PARTS]
    means = {f"part_{NO_LABEL.sub('_', name)}": fmean(each.parts.get(name, 0.0) for each in trained) for name in names}
    return {"completion_tokens": fmean(len(each.tokens) / 4 for each in trained), **means} if trained else {}
