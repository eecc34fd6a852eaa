"""Displays: what the person at the terminal sees of a run, as a picture that is drawn again and again, or as lines.

    Scene ──► LiveDisplay   on a terminal: one frame (frame.py), drawn in place about four times a second
          └─► PlainDisplay  elsewhere: a line when something happened, or to break a long silence

    with choose_display(console) as display:
        launch(folder, options, stop, display)

Names, reasons and messages come from other people's machines: they are shown as text, never as markup or control codes.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.cli.frame import Frame
from shoal.cli.progress import Scene, duration, in_order, labels, latest, stopwatch, verdict_line, waits_line
from shoal.cli.watchdog import SILENT_S, owner_line, troubles
from shoal.protocol import RunStatus
from shoal.runtime.text import printable
from shoal.validator.settings import MEASURING

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "Scene", "choose_display"]

SILENCE_S = 10.0
LONG_WAIT_S = 10.0  # shorter ones are the ordinary course of things
MAX_REJECTIONS = 5


class Display(Protocol):
    """Shows scenes, one every `every_s`, between `__enter__` and `__exit__`; `say` works outside of that, too.

    While a `live` one has the terminal, nobody else may write to it.
    """

    live: bool
    every_s: float

    def say(self, text: str) -> None: ...

    def show(self, scene: Scene) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def choose_display(console: Console) -> Display:
    """A live one if the output is a terminal that can move its cursor and show the signs that frames are made of."""
    able = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    if able and console.file.isatty():  # what `is_terminal` says can be forced by the environment
        return LiveDisplay(console)
    return PlainDisplay(lambda line: console.print(Text(line), soft_wrap=True))


class QuietKeys:
    """Until it is left, keys that are typed do not show in the frame, and Ctrl-C does not throw away half of one."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if self._in_foreground():
            self._before = termios.tcgetattr(self._file)
            local = self._before[3] & ~termios.ECHO | termios.NOFLSH
            termios.tcsetattr(self._file, termios.TCSANOW, [*self._before[:3], local, *self._before[4:]])
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and self._in_foreground():
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)

    def _in_foreground(self) -> bool:
        """Who changes a terminal from the background is stopped by the system."""
        try:
            return os.tcgetpgrp(self._file.fileno()) == os.getpgrp()
        except OSError:  # no terminal, or not ours
            return False


class LiveDisplay:
    """One frame, drawn in place. However it is left, the last frame stays and the cursor is back."""

    live = True
    every_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        self._keys = QuietKeys(console.file)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._keys.__enter__()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._live.stop()
        finally:
            self._keys.__exit__()

    def say(self, text: str) -> None:
        """A line above the frame, whole even if it is longer than the terminal is wide."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def show(self, scene: Scene) -> None:
        self._live.update(Frame(scene), refresh=True)


class PlainDisplay:
    """Lines. The same line is said again only to break a long silence; whatever went wrong is said once."""

    live = False
    every_s = 3.0

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = ""
        self._last_s = -SILENCE_S
        self._alarms: set[str] = set()
        self._rejections = 0
        self._sanctioned: set[str] = set()
        self._troubled: set[str] = set()
        self._given_up: set[str] = set()
        self._restarts: dict[str, int] = {}
        self._ordered = ("running", False)
        self._standstill: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Lines need no tidying up."""

    def say(self, text: str) -> None:
        self._say(printable(text))

    def show(self, scene: Scene) -> None:
        for line in self._news(scene):
            self._say(line)

    def _news(self, scene: Scene) -> Iterator[str]:
        yield from self._processes(scene)
        if scene.status is not None:
            yield from self._orders(scene.status)
            yield from self._nobody(scene.status)
            yield from self._progress(scene, scene.status)
            yield from self._refusals(scene, scene.status)
            for alarm in reversed(scene.status.alarms):  # they come newest first
                if alarm not in self._alarms:
                    self._alarms.add(alarm)
                    yield f"alarm: {printable(alarm)}"

    def _orders(self, status: RunStatus) -> Iterator[str]:
        """What the run's owner has ordered, when it is first seen."""
        ordered = (status.standing.conduct, status.standing.drained)
        if ordered != self._ordered:
            self._ordered = ordered
            yield f"the run was {owner_line(status)}" if owner_line(status) else "the run goes on, as its owner ordered"

    def _nobody(self, status: RunStatus) -> Iterator[str]:
        """That the run stands still for want of somebody, when it is first seen: times in it change."""
        told = {sentence.partition(":")[0]: sentence for sentence in status.standstill}
        yield from (f"the run stands still: {printable(told[who])}" for who in told if who not in self._standstill)
        self._standstill = set(told)

    def _processes(self, scene: Scene) -> Iterator[str]:
        """Who is in trouble and was not before, and who is back."""
        found = troubles(scene.status, scene.processes, scene.silent_s)
        states = {process.name: process.state for process in scene.processes}
        new = {
            name: sentence
            for name, sentence in found.items()
            if name not in self._troubled or (states.get(name) == "given up" and name not in self._given_up)
        }
        self._given_up = {name for name, state in states.items() if state == "given up"}
        yield from new.values()
        for process in scene.processes:
            if process.state == "running" and process.restarts > self._restarts.get(process.name, 0):
                self._restarts[process.name] = process.restarts
                if process.name in self._troubled:
                    yield f"{process.name} is back (pid {process.pid})"
                elif process.name not in new:
                    yield f"{process.name} {printable(process.why)}; it was started again (pid {process.pid})"
        self._troubled = set(found)

    def _progress(self, scene: Scene, status: RunStatus) -> Iterator[str]:
        silent = scene.silent_s >= SILENT_S
        text = "the hub does not answer" if silent else progress_line(scene, status)
        if text == self._last and scene.elapsed_s - self._last_s < SILENCE_S:
            return
        self._last, self._last_s = text, scene.elapsed_s
        if silent:
            yield f"{stopwatch(scene.elapsed_s):>6}  {text}, for {duration(scene.silent_s)} now"
            return
        left_s = scene.history.left_s(scene.elapsed_s)
        left = f"  {stopwatch(left_s)} left" if left_s and not status.finished else ""
        waits = waits_line(status, least_s=LONG_WAIT_S, most=1)
        rate = f"{scene.history.tokens_per_s():,.0f} tokens/s"
        yield f"{stopwatch(scene.elapsed_s):>6}  {text}  {rate}{left}" + (f"  ({waits})" if waits else "")

    def _refusals(self, scene: Scene, status: RunStatus) -> Iterator[str]:
        """Each rejection and each ban, when it is first seen."""
        names = labels(status.nodes)
        new = scene.history.rejections[self._rejections :]
        self._rejections += len(new)
        yield from (verdict_line(verdict, names) for verdict in new[:MAX_REJECTIONS])
        if len(new) > MAX_REJECTIONS:
            yield f"and {len(new) - MAX_REJECTIONS} more rejections"
        for node in status.nodes:
            if node.node in scene.history.sanctioned and node.node not in self._sanctioned:
                self._sanctioned.add(node.node)
                yield f"{names[node.node]} was {node.state.value}: {printable(node.reason)}"


def progress_line(scene: Scene, status: RunStatus) -> str:
    """Where the run stands: `step 2/9  reward 0.50  held out 0.40  staleness 0.25  groups 5 accepted, 1 rejected`."""
    history = scene.history
    numbers = {
        "reward": history.rewards[max(history.rewards)] if history.rewards else None,
        "held out": history.held_out[max(history.held_out)] if history.held_out else None,
        "staleness": latest(in_order(status), "staleness_mean"),
    }
    if status.policy is None and status.step == 0:
        return "starting: the trainer is loading the first policy"
    parts = [f"step {status.step}/{status.steps}"]
    parts += [f"{name} {value:.2f}" for name, value in numbers.items() if value is not None]
    measuring = [f"{printable(node.name)}: {MEASURING}" for node in status.nodes if node.doing == MEASURING]
    return "  ".join([*parts, groups_line(status), *measuring])


def groups_line(status: RunStatus) -> str:
    accepted, rejected = status.submissions.get("accepted", 0), status.submissions.get("rejected", 0)
    unsure = status.submissions.get("unsure", 0)
    return f"groups {accepted:,} accepted, {rejected:,} rejected" + (f", {unsure:,} unsure" if unsure else "")
