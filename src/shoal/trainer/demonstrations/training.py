"""The warm start itself: batches of demonstrations through the step that RL trains with, checkpoints, an export.

    resume ─► [ validate, if due ─► train ─► guards ─► row ─► checkpoint, if due ] ─► look back ─► checkpoint ─► export
                        ▲                                          │
                        └────────────────── next step ◄────────────┘

Crash anywhere: the newest checkpoint is loaded and the steps since then are trained again; batches, order and rate
follow from the number of the step, so that on a CPU the weights are the same bit for bit. Told to stop, it saves where
it stands. Divergence ends it before anything is saved: guards judge what a step begins with, and at the end the loss of
the last batch is compared with that of the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.algorithms.registry import loss_named
from shoal.errors import CheckpointError
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.sizing import settle
from shoal.runtime.stop import StopToken
from shoal.trainer.checkpoint import CheckpointStore, restore
from shoal.trainer.demonstrations.choosing import LOSS, Corpus, Course, Numbers
from shoal.trainer.export import ModelCard, export_policy
from shoal.trainer.folder import Progress
from shoal.trainer.guards import Judged, Watch
from shoal.trainer.learner import Learner
from shoal.trainer.record import RunRecord, Trackers, finite
from shoal.trainer.samples import Prepared
from shoal.trainer.step import StepPlan, StepWork, Stopped, look_back, mean_loss, train_samples

log = logging.getLogger(__name__)

VALIDATION, LAST_BATCH, METRICS = "validation_loss", "last_batch_loss", "metrics.jsonl"


@dataclass(frozen=True)
class WarmStartParts:
    """Everything that a warm start works with. `run` names it: what was asked for, in a hash. `card` and `extra` are
    for the export: what it was trained from, and files that go with it."""

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


class WarmStart:
    """One warm start from wherever it stands to its last step. `version` counts the steps done."""

    def __init__(self, parts: WarmStartParts, stop: StopToken) -> None:
        self._parts, self._stop, self._settings = parts, stop, parts.learner.settings
        # An imitation has one loss; which one the settings name for RL does not matter.
        self._learner = replace(parts.learner, loss=loss_named(LOSS))
        self.batches, self.validation = parts.course.timetable(parts.corpus.questions)
        self._chosen = settle(self._settings)
        self._store = CheckpointStore(parts.folder / "checkpoints", self._chosen.keep_checkpoints)
        self._record = RunRecord(parts.folder / METRICS, None, parts.trackers, parts.clock)
        self._watch = Watch(self._settings.guards)
        self._saved: int | None = None  # the version that is in the newest checkpoint
        self.version, self.steps = 0, len(self.batches)

    def run(self, progressed: Callable[[int, int, str], None] = lambda _done, _steps, _note: None) -> bool:
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
            restore(self._learner, stored)
            self.version = self._saved = stored.progress.version
            log.info("resuming after step %d of %d, from %s", self.version, self.steps, stored.folder)
        self._watch.rows = self._record.resume(self.version)

    def _advance(self) -> str:
        """One step; what to say about it."""
        step, clock, every = self.version, self._parts.clock, self._settings.evaluate_every
        measured = self._validated() if every and step % every == 0 else {}
        began_s = clock.monotonic_s()
        metrics = self._train(step)
        step_s = clock.monotonic_s() - began_s
        judged = self._watch.judge(metrics)
        self._refuse(judged)
        times = {"step_s": step_s, "tokens_per_s": metrics["tokens"] / step_s if step_s else 0.0}
        row = finite(step, {**measured, **metrics, **judged.numbers, **times})
        self._record.add(step, row, {})
        self._watch.rows.append({"step": step, **row})
        self.version = step + 1
        if self.version < self.steps and self.version % self._chosen.checkpoint_every == 0:
            self._save()
        return f"loss {metrics['loss']:.4g}" if "loss" in metrics else "update skipped"

    def _train(self, step: int) -> dict[str, float]:
        course = self._parts.course
        self._watch.begin(step)
        factor = course.rate_factor(step, self.steps, self._settings.warmup_steps)
        plan = StepPlan(step=step, temperature=1.0, seed=course.seed, rate_factor=factor, recorded=False)
        samples = [self._parts.corpus.sample(int(number)) for number in self.batches[step]]
        batch = Prepared([[sample] for sample in samples], without_signal=0, rollouts=len(samples), truncated=0)
        metrics = train_samples(self._learner, batch, plan, self._stop.is_set, self._watch.veto)
        return {**metrics, "sequences": float(len(samples))}

    def _look_back(self) -> dict[str, float]:
        """The last version is judged by the batch that it was made of, forward only, before it is saved."""
        step, loss = self.steps - 1, self._loss(self.batches[-1])
        first = next((row["loss"] for row in self._watch.rows if "loss" in row), loss)
        weights = look_back(self._learner, StepWork(step, (), temperature=1.0, max_staleness=0))
        judged = self._watch.conclude(step, {**weights, LAST_BATCH: loss, "rise": loss - first})
        self._record.amend(step, judged.numbers)
        self._refuse(judged)
        return {LAST_BATCH: loss}

    def _refuse(self, judged: Judged) -> None:
        judged.refuse(self._store.folder, [version for version, _ in self._store.places()])

    def _validated(self) -> dict[str, float]:
        """The loss of demonstrations that are never trained on."""
        return {VALIDATION: self._loss(self.validation)} if len(self.validation) else {}

    def _loss(self, numbers: Numbers) -> float:
        return mean_loss(self._learner, [self._parts.corpus.sample(int(each)) for each in numbers], self._stop.is_set)

    def _save(self) -> None:
        """A checkpoint of this version, unless there is one."""
        if self._saved != self.version:
            self._store.save(self._learner, Progress(self._parts.run, self.version), self._parts.files)
            self._saved = self.version

    def _finish(self, seen: Mapping[str, float]) -> None:
        """Measure the last version, then export it. `seen`: what else its row says."""
        parts = self._parts
        self._record.add(self.version, {**self._validated(), **seen}, {})
        progress, metrics = Progress(parts.run, self.version), self._record.latest(self.version)
        files = {**parts.files, **parts.extra, METRICS: (parts.folder / METRICS).read_bytes()}
        card = replace(parts.card, progress=progress, metrics=metrics)
        export_policy(parts.out, self._learner.state(), files, card, self._settings.publish_dtype)
        log.info("done after %d steps: %s", self.version, parts.out)
