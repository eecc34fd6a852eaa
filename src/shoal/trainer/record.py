"""The metric rows of a run: written to metrics.jsonl at once, sent to trackers, reported to the hub one version later.

A resume relies on the file alone. A tracker (`trainer.tracking`: TensorBoard, Weights & Biases) that fails is warned
about once and then left out. After a resume no step appears twice, and untracked steps are sent.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.errors import ConfigError
from shoal.protocol import (
    BatchReply,
    EvaluationPage,
    LedgerHead,
    PolicyRef,
    RunInfo,
    SignedDocument,
    StepReport,
    TrainingBatch,
)
from shoal.runtime import Clock, ensure_folder, install_command, write_atomically
from shoal.runtime.extensions import resolve, unpinned
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.folder import scores_of
from shoal.trainer.guards import ALARM, CALM, RULES, GuardReport

log = logging.getLogger(__name__)

ALWAYS = ("wait_s", "train_s", "copy_s", "publish_wait_s")
PROJECT = "shoal"
ANSWER_S = 30.0  # longest wait for Weights & Biases
NOT_SHOWN = ("step", "at_ms")
SHOWN = ("sampled_reward", "reward_mean", "held_out", "loss", "validation_loss", "grad_norm", "idle_fraction")
Row = Mapping[str, float]


class PublishedPolicy(Protocol):
    @property
    def policy(self) -> PolicyRef | None: ...


class TrainerHub(Protocol):
    """What training asks of a hub: `HubClient`, or the one of a run without others (`run/solo`)."""

    # fmt: off
    def run_info(self) -> RunInfo: ...
    def status(self) -> PublishedPolicy: ...
    def batch(self, step: int, wait_s: float) -> BatchReply: ...
    def rollouts(self, step: int) -> TrainingBatch: ...
    def report(self, report: StepReport) -> None: ...
    def ledger_head(self) -> LedgerHead: ...
    def announce(self, signed: SignedDocument) -> None: ...
    def evaluations(self, since: int = 0) -> EvaluationPage: ...
    # fmt: on


class Stopwatch:
    """Adds up times by name until `row` is called. `idle_fraction`: waiting for rollouts. `overhead_fraction`: neither
    training nor waiting for rollouts (copying, publishing, files, the hub)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._laps: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self._laps[name] += self._clock.monotonic_s() - began_s

    def row(self) -> dict[str, float]:
        now_s = self._clock.monotonic_s()
        step_s, self._began_s = now_s - self._began_s, now_s
        laps = {**dict.fromkeys(ALWAYS, 0.0), **self._laps}
        self._laps.clear()
        lost_s, whole_s = max(0.0, step_s - laps["train_s"] - laps["wait_s"]), step_s or 1.0
        fractions = {"idle_fraction": laps["wait_s"] / whole_s, "overhead_fraction": lost_s / whole_s}
        return {**laps, "step_s": step_s, **fractions}


@dataclass(frozen=True)
class Tracked:
    """What trackers are told of the run. `run` is its name there, the same after a resume."""

    folder: Path
    run: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """`begin` gets the rows of earlier steps, `write` the row of a step, `amend` later numbers of an earlier step. An
    exception removes the tracker, and training continues."""

    def begin(self, rows: Sequence[Row]) -> None: ...
    def write(self, row: Row) -> None: ...
    def amend(self, step: int, numbers: Row) -> None: ...
    def close(self) -> None: ...


class Trackers:
    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        self._trackers = dict(trackers or {})

    def begin(self, rows: Sequence[Row]) -> None:
        self._each(lambda tracker: tracker.begin(rows))

    def write(self, row: Row) -> None:
        self._each(lambda tracker: tracker.write(row))

    def amend(self, step: int, numbers: Row) -> None:
        self._each(lambda tracker: tracker.amend(step, numbers))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - training must not depend on a tracker
                del self._trackers[name]
                message = "%s gets no more metrics until the trainer restarts (%s: %s); metrics.jsonl has them all"
                log.warning(message, name, type(error).__name__, error)


def require_trackers(words: Iterable[str]) -> None:
    for word in words:
        if word not in TRACKERS:
            resolve("trainer.tracking", "tracker", word)
        elif find_spec(word) is None:
            install = f"install it with: {install_command(word)}, or leave it out"
            raise ConfigError(f'trainer.tracking names "{word}", which is not installed: {install}')


class TensorBoard:
    """Event files in `tensorboard/`. Each start writes them again, with the rows of earlier steps."""

    def __init__(self, tracked: Tracked) -> None:
        self._folder = tracked.folder / "tensorboard"
        self._writer: Any = None

    def begin(self, rows: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for before in self._folder.glob("events.out.tfevents.*"):
            before.unlink()
        self._writer = SummaryWriter(str(self._folder))
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        self.amend(int(row["step"]), row)

    def amend(self, step: int, numbers: Row) -> None:
        at_s = numbers["at_ms"] / 1000 if "at_ms" in numbers else time.time()
        for name in numbers.keys() - set(NOT_SHOWN):
            self._writer.add_scalar(name, numbers[name], step, at_s)
        self._writer.flush()  # a kill leaves a complete file

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One W&B run per run of shoal, also after a resume: wandb/cursor.json holds the newest logged step and the number
    of log calls."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._cursor = tracked.folder / "wandb" / "cursor.json"
        self._step, self._count = -1, 0
        self._run: Any = None

    def begin(self, rows: Sequence[Row]) -> None:
        ensure_folder(self._cursor.parent)
        if self._cursor.exists():
            known = json.loads(self._cursor.read_bytes())
            self._step, self._count = int(known["step"]), int(known["count"])
        self._run = start_wandb(self._tracked)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # scores of earlier steps come later
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        if row["step"] > self._step:
            self._log(row, int(row["step"]))

    def amend(self, step: int, numbers: Row) -> None:
        self._log({**numbers, "step": step}, self._step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _log(self, numbers: Row, newest: int) -> None:
        shown = {name: value for name, value in numbers.items() if name != "at_ms"}
        self._run.log(shown, step=self._count)  # must increase at every call
        self._step, self._count = newest, self._count + 1
        # Written after the log call: a crash in between repeats one row and loses none.
        write_atomically(self._cursor, json.dumps({"step": self._step, "count": self._count}).encode())


def start_wandb(tracked: Tracked) -> Any:
    """Mode from `WANDB_MODE`; else online if there is a key. Without a key W&B would ask a person: offline then."""
    import wandb

    mode = os.environ.get("WANDB_MODE", "")
    if mode not in ("offline", "disabled"):
        mode = "online" if wandb.api.api_key else "offline"
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # error reports use the network too
    log.info("metrics go to Weights & Biases (%s)", mode)
    settings = wandb.Settings(
        console="off", silent=True, disable_code=True, disable_git=True, init_timeout=ANSWER_S,
        finish_timeout=ANSWER_S, finish_timeout_raises=False,
    )  # fmt: skip
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), id=tracked.run, name=tracked.run, dir=str(tracked.folder),
        config=dict(tracked.settings), mode=cast(Any, mode), resume="allow" if mode == "online" else None,
        settings=settings,
    )  # fmt: skip


TRACKERS: dict[str, Callable[[Tracked], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def open_trackers(words: Iterable[str], tracked: Tracked) -> Trackers:
    """Own ones are called with a `Tracked`, too; one that cannot be made is warned about and left out."""
    made = dict[str, Tracker]()
    for word in words:
        make = TRACKERS[word] if word in TRACKERS else resolve("trainer.tracking", "tracker", word)
        try:
            made[unpinned(word)] = make(tracked)
        except Exception as error:  # noqa: BLE001 - training must not depend on a tracker
            log.warning("the tracker %s is left out: %s: %s", unpinned(word), type(error).__name__, error)
    return Trackers(made)


class RunRecord:
    """`scores` are the held-out scores by version. A warm start has no hub."""

    def __init__(self, path: Path, hub: TrainerHub | None, trackers: Trackers, clock: Clock) -> None:
        self._metrics = MetricsLog(path)
        self._hub, self._trackers, self._clock = hub, trackers, clock
        self._unreported: list[Row] = []
        self._alarms: dict[int, dict[str, str]] = {}  # by step, what the hub has not been told yet
        self.scores: dict[int, float] = {}

    def resume(self, version: int) -> list[Row]:
        """The rows of the steps before a version; later rows are dropped, because those steps are trained again."""
        self._metrics.rewind(version, keep=("held_out",))
        self.scores = scores_of(self._metrics)
        before: list[Row] = [row for row in self._metrics.rows() if row["step"] < version]
        if version > len(before):
            message = "%s has %d of the %d steps that were done: guards, best score and a slowed rate go by these"
            log.warning(message, self._metrics.path, len(before), version)
        self._trackers.begin(before)
        return before

    def add(self, step: int, metrics: Row, measured: Mapping[int, float]) -> None:
        """Write the row of a step, without numbers that are NaN or infinite. `measured` are new held-out scores by
        version; those of earlier steps go into their rows."""
        left_out = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        if left_out:
            log.warning("step %d: NaN or infinite, so not in its row: %s", step, ", ".join(left_out))
        shown = {name: value for name, value in metrics.items() if name not in left_out}
        own = {"held_out": measured[step]} if step in measured else {}
        for earlier in sorted(measured.keys() - {step}):
            self.amend(earlier, {"held_out": measured[earlier]})
        row = self._metrics.append(step, {**own, **shown, "at_ms": float(self._clock.now_ms())})
        self._unreported.append(row)
        self._trackers.write(row)
        self.scores |= dict(measured) | ({step: row["held_out"]} if "held_out" in row else {})
        log.info("step %d: %s", step, ", ".join(f"{name} {row[name]:.4g}" for name in SHOWN if name in row))

    def amend(self, step: int, numbers: Row) -> None:
        """Add numbers to the row of an earlier step; the hub gets them with the next report."""
        if numbers and (amended := self._metrics.amend(step, numbers)) is not None:
            self._unreported.append(amended)
            self._trackers.amend(step, numbers)

    def warn(self, judged: GuardReport) -> None:
        if news := judged.news():
            self._alarms.setdefault(judged.alarms[0].step, {}).update(news)

    def take(self) -> list[Row]:
        rows, self._unreported = self._unreported, []
        return rows

    def report(self, rows: Iterable[Row]) -> None:
        for row in rows:
            assert self._hub is not None
            step, measured = int(row["step"]), {name: value for name, value in row.items() if name != "step"}
            self._hub.report(StepReport(step=step, metrics=measured, alarms=self._alarms.pop(step, {})))

    def latest(self, version: int) -> dict[str, float]:
        return latest_metrics(self._metrics, version)


def latest_metrics(metrics: MetricsLog, version: int) -> dict[str, float]:
    latest: dict[str, float] = {}
    for row in metrics.rows():
        if row["step"] <= version:
            latest.update(row)
    return {name: value for name, value in latest.items() if name not in NOT_SHOWN}


def open_alarms(rows: Sequence[Row]) -> dict[str, tuple[int, str]]:
    """Alarms that had not ended at the last row: guard → the step that it began with, and what was measured."""
    found = {}
    for name, guard in RULES.items():
        fired = [index for index, row in enumerate(rows) if f"{ALARM}{name}" in row]
        if fired and fired[-1] >= len(rows) - CALM:
            begun = [fired[0], *(after for before, after in itertools.pairwise(fired) if after - before > CALM)][-1]
            last = rows[fired[-1]]
            seen = f"{guard.seen.format(last[ALARM + name])} in step {last['step']}"
            found[name] = (int(rows[begun]["step"]), seen)
    return found
