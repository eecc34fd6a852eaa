"""Metrics for those who look at them elsewhere: TensorBoard, Weights & Biases. One word each in `trainer.tracking`.

    row written to metrics.jsonl ─► write ─┬─► tensorboard/events.out.tfevents.N.shoal      one file per start
    held-out score that came later ─► amend┘└─► wandb/…          online with a key, else offline (`wandb sync` later)

metrics.jsonl is the truth: a tracker that fails is warned about once and left alone, and training goes on. A resume
continues where the checkpoint is: no step appears twice, and one that was never tracked is made up for, which `Cursor`
tells. Nothing here imports torch, and nothing waits for a person, or without end.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.errors import ConfigError
from shoal.runtime.files import ensure_folder, write_atomically
from shoal.runtime.text import install_command

log = logging.getLogger(__name__)

Row = Mapping[str, float]
PROJECT = "shoal"
ANSWER_S = 30.0  # the longest wait for Weights & Biases, at the start and at the end
NOT_SHOWN = ("step", "at_ms")


@dataclass(frozen=True)
class Tracked:
    """What is tracked: `run` names it wherever it is shown, and is the same after a resume."""

    folder: Path
    run: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Somewhere that rows go. Whatever it raises ends its part, never training."""

    def begin(self, step: int, rows: Sequence[Row]) -> None:
        """Training goes on from `step`; `rows` are those of the steps before."""
        ...

    def write(self, row: Row) -> None:
        """The row of a step, whole."""
        ...

    def amend(self, step: int, numbers: Row) -> None:
        """What became known of an earlier step."""
        ...

    def close(self) -> None: ...


@dataclass
class Cursor:
    """How far a tracker has got: the newest step whose row it has, and how many times it was written to."""

    path: Path
    step: int = -1
    count: int = 0

    def load(self) -> None:
        if self.path.exists():
            known = json.loads(self.path.read_bytes())
            self.step, self.count = int(known["step"]), int(known["count"])

    def move(self, step: int) -> None:
        """After the write, so that a crash between the two repeats one and loses none."""
        self.step, self.count = max(self.step, step), self.count + 1
        write_atomically(self.path, json.dumps({"step": self.step, "count": self.count}).encode())


class Trackers:
    """All that were asked for. No method raises."""

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        self._trackers = dict(trackers or {})

    def begin(self, step: int, rows: Sequence[Row]) -> None:
        self._each(lambda tracker: tracker.begin(step, rows))

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
            except Exception as error:  # noqa: BLE001 - a full disk, a network, a library: training needs none of them
                del self._trackers[name]
                log.warning(
                    "%s gets no more metrics until the trainer is started again (%s: %s); metrics.jsonl has them all",
                    *(name, type(error).__name__, error),
                )


def open_trackers(words: Iterable[str], tracked: Tracked) -> Trackers:
    """The trackers of these words; `ConfigError` if one is not installed."""
    require_trackers(words)
    return Trackers({word: TRACKERS[word](tracked) for word in words})


def require_trackers(words: Iterable[str]) -> None:
    """Say before anything is started what must be installed for it."""
    for word in words:
        if find_spec(word) is None:
            raise ConfigError(
                f'trainer.tracking names "{word}", but the package {word} is not installed; install it with: '
                f"{install_command(word)}, or leave it out"
            )


# ── TensorBoard ──────────────────────────────────────────────────────────────────────────────────────────────────


class TensorBoard:
    """Implements `Tracker`: event files in `tensorboard/`, readable while training goes on.

    A start writes a file of its own, which begins by taking back the steps that are trained again.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._folder = tracked.folder / "tensorboard"
        self._cursor = Cursor(self._folder / "cursor.json")
        self._events: Any = None

    def begin(self, step: int, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        ensure_folder(self._folder)
        self._cursor.load()
        first = min(step, self._cursor.step + 1)
        # By number, not by time: readers go through files by name, and a clock may be set back between two starts.
        names = [path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*.shoal")]
        number = max((int(name) for name in names if name.isdecimal()), default=-1) + 1
        path = self._folder / f"events.out.tfevents.{number:010d}.shoal"
        self._events = RecordWriter(path.open("xb"))
        self._put(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        again = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._put(event_pb2.Event(wall_time=time.time(), step=first, session_log=again))
        self._cursor.step = first - 1
        for row in rows:
            if row["step"] >= first:
                self.write(row)

    def write(self, row: Row) -> None:
        self.amend(int(row["step"]), row)
        self._cursor.move(int(row["step"]))

    def amend(self, step: int, numbers: Row) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in numbers.items()
            if name not in NOT_SHOWN
        ]
        at_s = numbers["at_ms"] / 1000 if "at_ms" in numbers else time.time()
        self._put(event_pb2.Event(wall_time=at_s, step=step, summary=summary_pb2.Summary(value=values)))

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def _put(self, event: Any) -> None:
        """To the system at once: what a kill leaves is whole."""
        self._events.write(event.SerializeToString())
        self._events.flush()


# ── Weights & Biases ─────────────────────────────────────────────────────────────────────────────────────────────


class WeightsAndBiases:
    """Implements `Tracker`: one W&B run per run of shoal, also after a resume.

    A step that is trained again is not logged again: its row would be the same.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._cursor = Cursor(tracked.folder / "wandb" / "cursor.json")
        self._run: Any = None

    def begin(self, step: int, rows: Sequence[Row]) -> None:  # noqa: ARG002  the cursor knows what was logged
        ensure_folder(self._cursor.path.parent)
        self._cursor.load()
        self._run = self._start(choose_mode(os.environ))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # scores of earlier steps come later
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        if row["step"] > self._cursor.step:
            self._log(row, int(row["step"]))

    def amend(self, step: int, numbers: Row) -> None:
        self._log({**numbers, "step": step}, self._cursor.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _log(self, numbers: Row, newest: int) -> None:
        shown = {name: value for name, value in numbers.items() if name != "at_ms"}
        self._run.log(shown, step=self._cursor.count)  # what W&B calls a step only ever rises
        self._cursor.move(newest)

    def _start(self, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            console="off",  # the log is ours
            silent=True,
            disable_code=True,
            disable_git=True,
            init_timeout=ANSWER_S,
            finish_timeout=ANSWER_S,
            finish_timeout_raises=False,
        )
        log.info("metrics go to Weights & Biases (%s)", mode)
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self._tracked.run,
            name=self._tracked.run,
            dir=str(self._tracked.folder),
            config=dict(self._tracked.settings),
            mode=cast(Any, mode),
            resume="allow" if mode == "online" else None,
            settings=settings,
        )


def choose_mode(environ: Mapping[str, str]) -> str:
    """`WANDB_MODE` if it is set, else online if there is a key. Never online without one: that would ask a person."""
    wanted = environ.get("WANDB_MODE", "")
    if wanted in ("offline", "disabled", "dryrun"):
        return "disabled" if wanted == "disabled" else "offline"
    if _has_key():
        return "online"
    # Reports of errors go over the network, too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if wanted:
        log.warning('WANDB_MODE is "%s", but there is no key: set WANDB_API_KEY or run `wandb login`', wanted)
    return "offline"


def _has_key() -> bool:
    import wandb

    return bool(wandb.api.api_key)


TRACKERS: dict[str, Callable[[Tracked], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
