"""The warm start itself: batches of demonstrations through the step that RL trains with, checkpoints, an export.

    resume ─► [ validate, if due ─► train ─► guards ─► row ─► checkpoint, if due ] ─► look back ─► checkpoint ─► export
                        ▲                                          │
                        └────────────────── next step ◄────────────┘

Crash anywhere: the newest checkpoint is loaded and the steps since then are trained again; batches, order and rate
follow from the number of the step, so that on a CPU the weights are the same bit for bit. Told to stop, it saves where
it stands. Divergence ends it before anything is saved: guards judge what a step begins with, and the last version looks
back at its batch (`closing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shoal.algorithms.packing import micro_batches, packs
from shoal.algorithms.registry import loss_named
from shoal.errors import CheckpointError
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.sizing import settle
from shoal.runtime.stop import StopToken
from shoal.trainer.checkpoint import CheckpointStore, Progress, restore
from shoal.trainer.demonstrations.corpus import Corpus
from shoal.trainer.demonstrations.course import Numbers, Timetable, decay_factor
from shoal.trainer.demonstrations.settings import LOSS, Course
from shoal.trainer.export import ModelCard, export_policy, latest_metrics
from shoal.trainer.forward import lay, score
from shoal.trainer.guards import Watch
from shoal.trainer.learner import Learner
from shoal.trainer.record import finite
from shoal.trainer.samples import Prepared
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepPlan, StepWork, Stopped, look_back, train_samples
from shoal.trainer.tracking import Trackers

log = logging.getLogger(__name__)

VALIDATION, LAST_BATCH = "validation_loss", "last_batch_loss"


@dataclass(frozen=True)
class WarmStartParts:
    """Everything that a warm start works with. `run` names it: what was asked for, in a hash.

    `card` and `extra` are for the export: what it was trained from, and files that go with it.
    """

    folder: Path
    out: Path
    run: str
    learner: Learner
    files: Mapping[str, bytes]
    corpus: Corpus
    course: Course
    card: ModelCard
    extra: Mapping[str, bytes] = field(default_factory=dict)
    trackers: Trackers = field(default_factory=Trackers)
    clock: Clock = field(default_factory=SystemClock)


Progressed = Callable[[int, int, str], None]


class WarmStart:
    """One warm start from wherever it stands to its last step. `version` counts the steps done."""

    def __init__(self, parts: WarmStartParts, stop: StopToken) -> None:
        # An imitation has one loss; which one the settings name for RL does not matter.
        self._parts = replace(parts, learner=replace(parts.learner, loss=loss_named(LOSS)))
        self._stop = stop
        self._times = Timetable.of(parts.course, parts.corpus)
        self._chosen = settle(self._settings)
        self._store = CheckpointStore(parts.folder / "checkpoints", self._chosen.keep_checkpoints)
        self._metrics = MetricsLog(parts.folder / "metrics.jsonl")
        self._watch = Watch(self._settings.guards)
        self._saved: int | None = None  # the version that is in the newest checkpoint
        self.version = 0

    @property
    def _settings(self) -> TrainerSettings:
        return self._parts.learner.settings

    @property
    def steps(self) -> int:
        return len(self._times.batches)

    def run(self, progressed: Progressed = lambda _done, _steps, _note: None) -> bool:
        """Train and export; false if it was told to stop before the end. `progressed` hears of every step."""
        self._resume()
        progressed(self.version, self.steps, "")
        try:
            while self.version < self.steps:
                progressed(self.version + 1, self.steps, self._advance())
            seen = self._look_back()
            self._save()
            self._finish(seen)
        except Stopped:
            self._save()
            log.info("stopped (%s) after %d of %d steps", self._stop.reason, self.version, self.steps)
            return False
        finally:
            self._parts.trackers.close()
        return True

    def _resume(self) -> None:
        stored = self._store.newest()
        if stored is not None:
            if stored.progress.run != self._parts.run:
                raise CheckpointError(
                    f"the checkpoints in {self._store.folder} are of another warm start ({stored.progress.run}); "
                    f"remove {self._parts.folder}, or choose another --out"
                )
            restore(self._parts.learner, stored)
            self.version = self._saved = stored.progress.version
            log.info("going on after step %d of %d, from %s", self.version, self.steps, stored.folder)
        self._metrics.rewind(self.version)
        rows = self._metrics.rows()
        self._watch.rows = list(rows)
        self._parts.trackers.begin(self.version, rows)

    def _advance(self) -> str:
        """One step; what to say about it."""
        step = self.version
        measured = self._validated(step) if self._due(self._settings.evaluate_every, step) else {}
        measured |= {LAST_BATCH: self._mean_loss(self._times.batches[-1])} if step == 0 else {}
        began_s = self._parts.clock.monotonic_s()
        metrics = self._train(step)
        step_s = self._parts.clock.monotonic_s() - began_s
        judged = self._watch.judge(metrics)
        judged.refuse(self._store.folder, self._kept())
        times = {"step_s": step_s, "tokens_per_s": metrics["tokens"] / step_s if step_s else 0.0}
        self._record(step, {**measured, **metrics, **judged.numbers, **times})
        self.version = step + 1
        if self._due(self._chosen.checkpoint_every, self.version) and self.version < self.steps:
            self._save()
        return f"loss {metrics['loss']:.4g}" if "loss" in metrics else "update skipped"

    def _look_back(self) -> dict[str, float]:
        """The last version is judged by the batch that it was made of, forward only, before it is saved."""
        step, folder, kept = self.steps - 1, self._store.folder, self._kept()
        loss = self._mean_loss(self._times.batches[step])
        weights = look_back(self._parts.learner, StepWork(step, (), temperature=1.0, max_staleness=0))
        rows = {int(row["step"]): row for row in self._watch.rows}
        known = {"rise_by_step": rows.get(step, {}).get("loss"), "rise_by_run": rows.get(0, {}).get(LAST_BATCH)}
        rises = {name: loss - before for name, before in known.items() if before is not None}
        judged = self._watch.conclude(step, {**weights, LAST_BATCH: loss, **rises})
        if judged.numbers and self._metrics.amend(step, judged.numbers) is not None:
            self._parts.trackers.amend(step, judged.numbers)
        judged.refuse(folder, kept)
        return {LAST_BATCH: loss}

    def _kept(self) -> list[int]:
        return [version for version, _ in self._store.places()]

    def _train(self, step: int) -> dict[str, float]:
        course, settings = self._parts.course, self._settings
        factor = decay_factor(course.decay, step, self.steps, settings.warmup_steps) * self._watch.begin(step)
        plan = StepPlan(step=step, temperature=1.0, seed=course.seed, rate_factor=factor, recorded=False)
        batch = self._prepared(self._times.batches[step])
        metrics = train_samples(self._parts.learner, batch, plan, self._stop.is_set, self._watch.veto)
        return {**metrics, "sequences": float(batch.rollouts)}

    def _prepared(self, numbers: Numbers) -> Prepared:
        samples = [self._parts.corpus.sample(int(number)) for number in numbers]
        return Prepared(groups=[[each] for each in samples], without_signal=0, rollouts=len(samples), truncated=0)

    def _validated(self, version: int) -> dict[str, float]:
        """The loss of demonstrations that are never trained on, by the version."""
        if not len(self._times.validation):
            return {}
        value = self._mean_loss(self._times.validation)
        log.info("version %d: validation loss %.4g", version, value)
        return {VALIDATION: value}

    @torch.no_grad()
    def _mean_loss(self, numbers: Numbers) -> float:
        learner, samples = self._parts.learner, [self._parts.corpus.sample(int(number)) for number in numbers]
        lengths, budget = [sample.length for sample in samples], self._settings.micro_batch_tokens
        bins = packs(lengths, budget, learner.cost, 1) if learner.packed else micro_batches(lengths, budget)
        total = 0.0
        for rows in bins:
            if self._stop.is_set():
                raise Stopped
            laid = lay([samples[row] for row in rows], learner.device, packed=learner.packed)
            total -= float(score(learner.model, laid, 1.0).logprobs.double().sum())
        return total / sum(sample.trained for sample in samples)

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        row = self._metrics.append(step, {**finite(step, metrics), "at_ms": float(self._parts.clock.now_ms())})
        self._watch.rows.append(row)
        self._parts.trackers.write(row)
        shown = ("loss", VALIDATION, "grad_norm", "learning_rate")
        log.info("step %d: %s", step, ", ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics))

    def _save(self) -> None:
        """A checkpoint of this version, unless there is one."""
        if self._saved != self.version:
            self._store.save(self._parts.learner, Progress(self._parts.run, self.version), self._parts.files)
            self._saved = self.version

    def _finish(self, seen: Mapping[str, float]) -> None:
        """Measure the last version, then export it. `seen`: what else its row says."""
        parts = self._parts
        self._record(self.version, {**self._validated(self.version), **seen})
        card = replace(
            parts.card,
            progress=Progress(parts.run, self.version),
            metrics=latest_metrics(self._metrics, self.version),
        )
        files = {**parts.files, **parts.extra, self._metrics.path.name: self._metrics.path.read_bytes()}
        export_policy(parts.out, parts.learner.state(), files, card, self._settings.publish_dtype)
        log.info("done after %d steps: %s", self.version, parts.out)

    def _due(self, every: int, number: int) -> bool:
        return every > 0 and number % every == 0
