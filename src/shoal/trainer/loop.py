"""The trainer process.

                 ┌───────────────────────────── the hub ─────────────────────────────┐
                 │ status      batch n (long poll)    rollouts n     report n        │ announce n+1
                 ▼                  ▼                     ▼              ▲           ▲
    resume ─► replay ─► publish ─► [ wait ─► train ─► row ─► checkpoint ─► snapshot ┄► publisher ] ─► export
                                      ▲                                          thread        │
                                      └───────────────────── next step ◄───────────────────────┘

Who waits for whom: the trainer waits for the batch of its step (up to `batch_deadline_s`, naming what the hub waits
for), and before it saves a step for the version before it to be out. So the hub is never more than one version behind
the newest checkpoint. Workers never wait for the trainer as long as the staleness bound has room. What a step is
trained on is put down for people first (`archive`). Held-out scores come from validators meanwhile (`held_out`).

Crash anywhere: the newest checkpoint is loaded, the batches written down since then are trained on again, and what
comes out is compared with what was published (`publisher`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.client import Activity, ClientOptions, HubClient, RegularHeartbeat
from shoal.engines.asking import Asking
from shoal.engines.turns import Talks
from shoal.errors import CheckpointError, DeadlineExceeded, ProtocolError, ShoalError
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import to_torch
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import (
    Batch,
    BatchReply,
    BroadcastHead,
    EvaluationPage,
    NodeView,
    PolicyManifest,
    PolicyRef,
    Role,
    RunInfo,
    RunStatus,
    SignedDocument,
    SigningKey,
    StepReport,
    TrainingBatch,
)
from shoal.rewards import DirectScorer, Scorer, ScoringPool
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.crash import point
from shoal.runtime.files import ensure_folder
from shoal.runtime.lock import FolderLock
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.trainer.archive import RolloutArchive
from shoal.trainer.checkpoint import CheckpointStore, Progress, restore
from shoal.trainer.config import TrainerConfig
from shoal.trainer.destination import refuse_foreign
from shoal.trainer.evaluate import Evaluator, GreedyEvaluator
from shoal.trainer.export import ModelCard, export_policy, latest_metrics, write_card
from shoal.trainer.held_out import ByTrainer, ByValidators, HeldOut
from shoal.trainer.learner import Learner, choose_device, make_deterministic, new_learner
from shoal.trainer.publisher import PolicyHub, PolicyOrigin, Publication, Publisher, Snapshot, take_snapshot
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, Stopped, train_step

log = logging.getLogger(__name__)

POLL_S = 2.0  # a failed publication, or a request to stop, is noticed within this
HEARTBEAT_S = 5.0
LOCK_WAIT_S = 10.0  # a supervisor may start the next trainer while the last one is still ending


class TrainerHub(PolicyHub, Protocol):
    """The part of the hub that a trainer uses (`client.HubClient`)."""

    def run_info(self) -> RunInfo: ...

    def status(self) -> RunStatus: ...

    def register(self, name: str, role: Role, certificate: SignedDocument | None) -> NodeView: ...

    def batch(self, step: int, wait_s: float) -> BatchReply: ...

    def rollouts(self, step: int) -> TrainingBatch: ...

    def report(self, report: StepReport) -> None: ...

    def evaluations(self, since: int) -> EvaluationPage: ...


class TrainerOrigin(PolicyOrigin, Protocol):
    """The origin as a trainer sees it (`shardcast.Origin`)."""

    def head(self) -> BroadcastHead | None: ...


@dataclass(frozen=True)
class TrainingParts:
    """Everything that a training run talks to. The process puts real ones together; tests hand in others."""

    folder: Path
    hub: TrainerHub
    origin: TrainerOrigin
    learner: Learner
    files: Mapping[str, bytes]
    key: SigningKey
    evaluate: Evaluator
    base_model: str = ""
    seed: int = 0
    clock: Clock = field(default_factory=SystemClock)


def run_trainer(config: TrainerConfig, stop: StopToken) -> None:
    """Train until the run's last step, or until told to stop. Failures are `ShoalError`s; stopping is none."""
    settings = config.settings
    make_deterministic(settings)
    ensure_folder(config.folder)
    options = ClientOptions(patience_s=settings.batch_deadline_s)
    with (
        FolderLock(config.folder).acquire(stop, LOCK_WAIT_S),
        closing(HubClient(config.hub_url, config.key, stop, config.root_fingerprint, options=options)) as hub,
        closing(_scorer(config, stop)) as scorer,
    ):
        try:
            hub.register("trainer", "trainer", config.certificate)
            info = hub.run_info()
            loaded = load_model(config.model, device=choose_device(settings.device))
            run = TrainingRun(_parts(config, hub, info, loaded, scorer), stop)
            with RegularHeartbeat(hub, HEARTBEAT_S, run.activity, lambda _reply: None):
                run.run()
        except DeadlineExceeded:
            if not stop.is_set():
                raise
            log.info("the trainer stopped (%s)", stop.reason)


def _scorer(config: TrainerConfig, stop: StopToken) -> Scorer:
    """What scores the trainer's own evaluations. Processes start when the first one is made."""
    if config.scored_by is None:
        return DirectScorer(config.environment)
    return ScoringPool(config.scored_by, config.environment, stop)


def _parts(config: TrainerConfig, hub: HubClient, info: RunInfo, loaded: LoadedModel, scorer: Scorer) -> TrainingParts:
    kept = OriginSettings(
        kept_versions=max(OriginSettings().kept_versions, info.max_staleness + 2),
        anchor_every=config.settings.anchor_every,
    )
    evaluate = GreedyEvaluator(
        loaded.model,
        loaded.tokenizer,
        config.environment,
        info.sampling,
        config.settings.evaluate_tasks,
        Asking(loaded.files, config.environment, info.sampling.max_new_tokens).ids,
        Talks(config.environment, loaded.files, info.sampling),
        scorer,
    )
    return TrainingParts(
        folder=config.folder,
        hub=hub,
        origin=Origin(config.origin_folder, info.run, config.key, settings=kept),
        learner=new_learner(loaded.model, config.settings),
        files=loaded.files,
        key=config.key,
        evaluate=evaluate,
        base_model=Path(config.model).name,
        seed=config.seed,
    )


class TrainingRun:
    """One run from wherever it stands to its last step. `version` counts the steps done."""

    def __init__(self, parts: TrainingParts, stop: StopToken) -> None:
        self._parts = parts
        self._stop = stop
        self._info = parts.hub.run_info()
        self._store = CheckpointStore(parts.folder / "checkpoints", self._settings.keep_checkpoints)
        self._metrics = MetricsLog(parts.folder / "metrics.jsonl")
        self._archive = RolloutArchive(parts.folder / "rollouts", TextTokenizer(parts.files).decode)
        self._row_at_s = parts.clock.monotonic_s()
        self.activity = Activity(parts.clock)
        self.version = 0
        self._held_out = self._measuring()

    @property
    def _settings(self) -> TrainerSettings:
        return self._parts.learner.settings

    def _measuring(self) -> HeldOut:
        every = self._settings.evaluate_every
        if self._settings.evaluate_by == "trainer":
            return ByTrainer(self._evaluate, every)
        return ByValidators(self._parts.hub.evaluations, self._evaluate, every, self._parts.clock, self._stop)

    def run(self) -> None:
        """The story: resume, catch up with what the hub has seen, go on to the last step, export."""
        refuse_foreign(self._parts.folder / "export")
        self._archive.open()
        published = self._parts.hub.status().policy
        publisher = self._publisher(self._resume(published), published)
        try:
            while published is not None and self.version < published.version:
                self._advance(publisher)  # a replay: the batches are those of the first time
            publisher.submit(self._snapshot())
            while self.version < self._info.steps:
                self._advance(publisher)
                publisher.submit(self._snapshot())
            self._finish(publisher.wait())
        except Stopped:
            log.info("the trainer stopped (%s) at version %d", self._stop.reason, self.version)
        finally:
            publisher.close()

    def _resume(self, published: PolicyRef | None) -> int:
        """Load the newest checkpoint, or save the starting policy as one; returns the incarnation to go on with."""
        parts, stored = self._parts, self._store.newest()
        incarnation = published.incarnation if published else 0
        if stored is None:
            log.info("no checkpoint: starting from %s", parts.base_model or "the model")
            self._store.save(parts.learner, Progress(self._info.run, 0, incarnation), parts.files)
        else:
            self._refuse_foreign_checkpoint(stored.progress, published)
            restore(parts.learner, stored)
            self.version = stored.progress.version
            incarnation = max(incarnation, stored.progress.incarnation)
            log.info("resuming at version %d from %s", self.version, stored.folder)
        self._metrics.rewind(self.version, keep=("held_out",))
        return incarnation

    def _refuse_foreign_checkpoint(self, progress: Progress, published: PolicyRef | None) -> None:
        hub_version = published.version if published else -1
        if progress.run != self._info.run:
            raise CheckpointError(
                f"the checkpoints in {self._store.folder} belong to run {progress.run}, the hub's run is "
                f"{self._info.run}; point the trainer at the folder of this run, or move the checkpoints away"
            )
        if progress.version > hub_version + 1:
            raise CheckpointError(
                f"the newest checkpoint is version {progress.version}, but the hub has seen version {hub_version} at "
                "most; restore the hub's folder, or move the checkpoints away to train on what the hub has"
            )

    def _publisher(self, incarnation: int, published: PolicyRef | None) -> Publisher:
        head = self._parts.origin.head()
        seen = [ref.version for ref in (published, head.policy if head else None) if ref is not None]
        return Publisher(
            Publication(
                origin=self._parts.origin,
                hub=self._parts.hub,
                key=self._parts.key,
                run=self._info.run,
                incarnation=incarnation,
                republished_until=max(seen, default=-1),
                deadline_s=self._settings.batch_deadline_s,
                clock=self._parts.clock,
            )
        )

    def _advance(self, publisher: Publisher) -> None:
        """One step: wait for the batch, train, write the row, save. Publishing is the caller's."""
        step = self.version
        held_out = _named(self._held_out.before(step))
        batch, rollouts, wait_s = self._next_batch(publisher)
        self._archive.write(batch, rollouts)
        metrics = self._train(batch, rollouts)
        publisher.wait()  # so that the hub is never more than one version behind a checkpoint
        self._record(step, {**held_out, **metrics, **self._times(wait_s)})
        point("trainer.step.recorded")
        self.version = step + 1
        if self._due(self._settings.checkpoint_every, self.version) or self.version == self._info.steps:
            self._store.save(self._parts.learner, self._progress(publisher.incarnation), self._parts.files)

    def _next_batch(self, publisher: Publisher) -> tuple[Batch, TrainingBatch, float]:
        """The written-down batch of the next step and its rollouts, and how long they took to come."""
        clock, hub, step = self._parts.clock, self._parts.hub, self.version
        deadline_s = self._settings.batch_deadline_s
        began_s, waiting = clock.monotonic_s(), "nothing was said"
        while True:
            publisher.check()
            if self._stop.is_set():
                raise Stopped
            left_s = began_s + deadline_s - clock.monotonic_s()
            if left_s <= 0:
                raise DeadlineExceeded(f"no batch for step {step} within {deadline_s:.0f} s; the hub says: {waiting}")
            with self.activity.waiting(f"the batch of step {step}: {waiting}"):
                reply = hub.batch(step, min(POLL_S, left_s))
            if reply.batch is not None:
                rollouts = hub.rollouts(step)
                _refuse_mixed_up(reply.batch, rollouts)
                return reply.batch, rollouts, clock.monotonic_s() - began_s
            waiting = reply.waiting or waiting

    def _train(self, batch: Batch, rollouts: TrainingBatch) -> dict[str, float]:
        clock = self._parts.clock
        work = StepWork(
            step=batch.step,
            groups=rollouts.groups,
            temperature=self._info.sampling.temperature,
            max_staleness=self._info.max_staleness,
            seed=self._parts.seed,
        )
        began_s = clock.monotonic_s()
        with self.activity.busy(f"training step {batch.step}"):
            metrics = train_step(self._parts.learner, work, self._stop.is_set)
        train_s = clock.monotonic_s() - began_s
        metrics["dropped_groups"] += batch.dropped_groups
        if batch.sampled_reward is not None:
            metrics["sampled_reward"] = batch.sampled_reward
        return {**metrics, "train_s": train_s, "tokens_per_s": metrics["tokens"] / train_s if train_s else 0.0}

    def _times(self, wait_s: float) -> dict[str, float]:
        """How the time since the last row was spent; saving and taking snapshots count as neither."""
        now_s = self._parts.clock.monotonic_s()
        step_s, self._row_at_s = now_s - self._row_at_s, now_s
        return {"wait_s": wait_s, "step_s": step_s, "idle_fraction": wait_s / step_s if step_s else 0.0}

    def _evaluate(self) -> float | None:
        """The score of the model as it is; None if it cannot be had. No evaluation ends training."""
        with self.activity.busy(f"evaluating version {self.version}"):
            try:
                return self._parts.evaluate()
            except (ShoalError, RuntimeError, OSError) as error:  # RuntimeError: torch, also when memory is short
                if self._stop.is_set():
                    raise
                log.warning("version %d could not be measured on held-out tasks: %s", self.version, error)
                return None

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        """To the file first: it is what a resume relies on; the hub keeps the newest report of a step.

        What validators have measured of this version goes into its row; of earlier ones into the rows that are there.
        """
        known = self._held_out.known(step)
        metrics = {**_named(known.pop(step, None)), **metrics}
        for earlier, score in known.items():
            self._report(self._metrics.amend(earlier, _named(score)))
        self._report(self._metrics.append(step, {**metrics, "at_ms": float(self._parts.clock.now_ms())}))
        shown = ("sampled_reward", "reward_mean", "held_out", "loss", "grad_norm", "idle_fraction")
        log.info("step %d: %s", step, ", ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics))

    def _report(self, row: Mapping[str, float] | None) -> None:
        if row is not None:
            measured = {name: value for name, value in row.items() if name != "step"}
            self._parts.hub.report(StepReport(step=int(row["step"]), metrics=measured))

    def _finish(self, manifest: PolicyManifest | None) -> None:
        """The last version is out: export it, then measure it. Nothing that may fail or wait comes before."""
        assert manifest is not None, "a version was submitted before"
        folder, dtype = self._parts.folder / "export", self._settings.publish_dtype
        snapshot = self._snapshot()
        tensors = {view.name: to_torch(view) for view in snapshot.tensors}
        export_policy(folder, tensors, snapshot.files, self._card(manifest), dtype)
        if self._settings.evaluate_every:
            with self.activity.waiting(f"the score of version {self.version}"):
                score = self._held_out.last(self.version)
            self._record(self.version, _named(score))
            write_card(folder, self._card(manifest), dtype)
        log.info("the run is complete: version %d is exported to %s", self.version, folder)

    def _card(self, manifest: PolicyManifest) -> ModelCard:
        return ModelCard(
            progress=self._progress(manifest.policy.incarnation),
            base_model=self._parts.base_model,
            environment=self._info.environment,
            digest=manifest.policy.digest,
            ledger_head=manifest.ledger_head,
            metrics=latest_metrics(self._metrics, self.version),
        )

    def _snapshot(self) -> Snapshot:
        dtype = self._settings.publish_dtype
        return take_snapshot(self._parts.learner.model, self.version, self._parts.files, dtype)

    def _progress(self, incarnation: int) -> Progress:
        return Progress(self._info.run, self.version, incarnation)

    def _due(self, every: int, number: int) -> bool:
        return every > 0 and number % every == 0


def _named(score: float | None) -> dict[str, float]:
    return {} if score is None else {"held_out": score}


def _refuse_mixed_up(batch: Batch, rollouts: TrainingBatch) -> None:
    written, sent = [group.unit for group in batch.groups], [group.unit for group in rollouts.groups]
    if rollouts.step != batch.step or written != sent:
        raise ProtocolError(
            f"the hub wrote down units {written[:8]} for step {batch.step} but sent {sent[:8]} for step {rollouts.step}"
        )
