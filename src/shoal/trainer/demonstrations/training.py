"""The warm start: batches of demonstrations through the training step of RL, with checkpoints and an export.

Batches, order and learning rate follow from the step number, so a resume gives the same weights, bit for bit on a CPU.
A stop saves the current state. At the end the loss of the last batch is compared with that of the first step.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.algorithms.registry import LOSSES
from shoal.errors import CheckpointError
from shoal.runtime import Clock, StopToken, SystemClock
from shoal.runtime.sizing import settle
from shoal.trainer.checkpoint import CheckpointStore, restore
from shoal.trainer.demonstrations.selection import LOSS, Corpus, Indices, Schedule
from shoal.trainer.export import ModelCard, export_policy
from shoal.trainer.folder import TrainerProgress
from shoal.trainer.guards import GuardMonitor, GuardReport
from shoal.trainer.learner import Learner
from shoal.trainer.record import RunRecord, Trackers
from shoal.trainer.samples import Prepared
from shoal.trainer.step import StepWork, Stopped, check_policy, mean_loss, train_samples

log = logging.getLogger(__name__)

VALIDATION, LAST_BATCH, METRICS = "validation_loss", "last_batch_loss", "metrics.jsonl"


@dataclass
class SftRun:
    """`version` counts the steps done; `name` is a hash of what was asked for."""

    folder: Path
    out: Path
    name: str
    learner: Learner
    files: Mapping[str, bytes]
    corpus: Corpus
    schedule: Schedule
    card: ModelCard
    stop: StopToken = field(default_factory=StopToken)
    extra: Mapping[str, bytes] = field(default_factory=dict)
    trackers: Trackers = field(default_factory=Trackers)
    clock: Clock = field(default_factory=SystemClock)
    version: int = 0
    _saved: int | None = None  # the version that is in the newest checkpoint

    def __post_init__(self) -> None:
        self._settings = self.learner.settings
        # The loss is always cross-entropy, whatever the settings name for RL.
        self.learner = replace(self.learner, loss=LOSSES[LOSS])
        self.batches, self.validation = self.schedule.batches_of(self.corpus.questions)
        self.steps, self._chosen = len(self.batches), settle(self._settings)
        self._store = CheckpointStore(self.folder / "checkpoints", self._chosen.keep_checkpoints)
        self._record = RunRecord(self.folder / METRICS, None, self.trackers, self.clock)
        self._watch = GuardMonitor(self._settings.guards)

    def run(self, progressed: Callable[[int, int, str], None] = lambda _done, _steps, _note: None) -> bool:
        """False if it was told to stop before. `progressed` is called after every step."""
        self._resume()
        progressed(self.version, self.steps, "")
        try:
            while self.version < self.steps:
                progressed(self.version + 1, self.steps, self._advance())
            seen = self._check_last_version()
            self._save()
            self._record.add(self.version, {**self._validated(), **seen}, {})
        except Stopped:
            self._save()
            log.info("stopped (%s) after %d of %d steps", self.stop.reason, self.version, self.steps)
            return False
        finally:
            self.trackers.close()
        files = {**self.files, **self.extra, METRICS: (self.folder / METRICS).read_bytes()}
        metrics = self._record.latest(self.version)
        card = replace(self.card, progress=TrainerProgress(self.name, self.version), metrics=metrics)
        export_policy(self.out, self.learner.state(), files, card, self._settings.publish_dtype)
        log.info("done after %d steps: %s", self.version, self.out)
        return True

    def _resume(self) -> None:
        stored = self._store.newest()
        if stored is not None:
            if stored.progress.run != self.name:
                details = f"another warm start ({stored.progress.run}); remove {self.folder}, or choose another --out"
                raise CheckpointError(f"the checkpoints in {self._store.folder} are of {details}")
            restore(self.learner, stored.folder)
            self.version = self._saved = stored.progress.version
            log.info("resuming after step %d of %d, from %s", self.version, self.steps, stored.folder)
        self._watch.rows = self._record.resume(self.version)

    def _advance(self) -> str:
        step, every = self.version, self._settings.evaluate_every
        measured = self._validated() if every and step % every == 0 else {}
        began_s = self.clock.monotonic_s()
        metrics = self._train(step)
        step_s = self.clock.monotonic_s() - began_s
        judged = self._watch.judge(metrics)
        self._refuse(judged)
        row = {**measured, **metrics, **judged.numbers, "step_s": step_s, "tokens_per_s": metrics["tokens"] / step_s}
        self._record.add(step, row, {})
        self._watch.rows.append({"step": step, **row})
        self.version = step + 1
        if self.version < self.steps and self.version % self._chosen.checkpoint_every == 0:
            self._save()
        return f"loss {metrics['loss']:.4g}" if "loss" in metrics else "update skipped"

    def _train(self, step: int) -> dict[str, float]:
        self._watch.begin(step)
        factor = self.schedule.rate_factor(step, self.steps, self._settings.warmup_steps)
        work = StepWork(step, seed=self.schedule.seed, rate_factor=factor, recorded=False)
        samples = [self.corpus.sample(int(number)) for number in self.batches[step]]
        batch = Prepared([[sample] for sample in samples], without_signal=0, rollouts=len(samples), truncated=0)
        metrics = train_samples(self.learner, batch, work, self.stop.is_set, self._watch.veto)
        return {**metrics, "sequences": float(len(samples))}

    def _check_last_version(self) -> dict[str, float]:
        step, loss = self.steps - 1, self._loss(self.batches[-1])
        first = next((row["loss"] for row in self._watch.rows if "loss" in row), loss)
        weights = check_policy(self.learner, StepWork(step))
        judged = self._watch.check_last_version(step, {**weights, LAST_BATCH: loss, "rise": loss - first})
        self._record.amend(step, judged.numbers)
        self._refuse(judged)
        return {LAST_BATCH: loss}

    def _refuse(self, judged: GuardReport) -> None:
        judged.refuse(self._store.folder, [version for version, _ in self._store.places()])

    def _validated(self) -> dict[str, float]:
        return {VALIDATION: self._loss(self.validation)} if len(self.validation) else {}

    def _loss(self, numbers: Indices) -> float:
        return mean_loss(self.learner, [self.corpus.sample(int(each)) for each in numbers], self.stop.is_set)

    def _save(self) -> None:
        if self._saved != self.version:
            self._store.save(self.learner, TrainerProgress(self.name, self.version), self.files)
            self._saved = self.version
