"""Displays: what the person at the terminal sees of a run, as a picture that is drawn again and again, or as lines.

    Scene ──► LiveDisplay   on a terminal: one frame, drawn in place about four times a second
          └─► PlainDisplay  elsewhere: a line when something happened, or to break a long silence

    with choose_display(console) as display:
        launch(folder, options, stop, display)

A frame fits the terminal, whatever its size:

    numbers     what runs, for how long still; step, reward, held-out score, staleness, tokens per second
    workers     a row each; when there are too many, those in trouble and those that did most
    processes   the others, what they do, what is wrong with them, who waits long for whom
    verdicts    the last rejections stay, however many acceptances come after them

Every part is made of rows of one line, so its height is known: workers and verdicts share what the others leave, and
whatever still does not fit is cut off below. A frame never scrolls.

Names, reasons and messages come from other people's machines: they are shown as text, never as markup or control codes.
"""

from __future__ import annotations

import os
import termios
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.protocol import NodeState, NodeView, RunStatus
from shoal.run.progress import (
    Display,
    Scene,
    duration,
    in_order,
    labels,
    latest,
    sparkline,
    stopwatch,
    verdict_line,
    waits_line,
)
from shoal.run.watchdog import SILENT_S, lag_line, owner_line, troubles
from shoal.runtime.supervise import ProcessView
from shoal.runtime.text import printable
from shoal.validator.settings import MEASURING

SILENCE_S = 10.0
LONG_WAIT_S = 10.0  # shorter ones are the ordinary course of things
MAX_REJECTIONS = 5
LABEL_WIDTH = 12
SPARK_WIDTH = 40
REJECTIONS_KEPT = 3
VERDICTS_SHOWN = 5
LEAST_WORKERS = 3
FEW_WORKERS = 6  # in order of their names, so that rows do not jump
MAX_TROUBLES = 4
MAX_ALARMS = 2
VERDICT_STYLES = {"rejected": "red", "accepted": ""}
STATE_STYLES = {"active": "green", "done": "dim", "starting": "dim"}  # all others are trouble


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


# ── the live frame ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Frame:
    """A picture of a scene, one line lower than the terminal: the last line is the cursor's."""

    scene: Scene

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(1, console.size.height - 1)
        shown: list[list[Segment]] = []
        for part in _parts(self.scene, height, options.max_width):
            shown += console.render_lines(part, options.update(height=None), pad=False)
        for index, line in enumerate(shown[:height]):
            yield from [Segment.line()] * (index > 0)
            yield from line


def _parts(scene: Scene, height: int, width: int) -> Iterator[RenderableType]:
    """The parts of a frame from top to bottom; `height` decides how many workers and verdicts there are."""
    top, low = list(_numbers(scene, width)), [*_notes(scene, width), "", *_processes(scene, width)]
    workers = _workers(scene)
    free = height - len(top) - len(low) - 2  # a blank line and the table's heading
    shown = workers[: max(LEAST_WORKERS, free - REJECTIONS_KEPT - 1)]
    yield from [*top, ""]
    if workers:
        yield _worker_table(shown, len(workers) - len(shown))
    yield from low
    yield from _verdicts(scene, max(1, free - len(shown) - (len(shown) < len(workers))))


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _numbers(scene: Scene, width: int) -> Iterator[RenderableType]:
    status, history = scene.status, scene.history
    yield _header(scene)
    if status is None:
        yield _row("starting", Text("the hub does not answer yet"))
        return
    yield _bar(status, width)
    yield ""
    if status.policy is None:
        yield _row("starting", Text("the trainer is loading the first policy"))
        return
    spark_width = min(SPARK_WIDTH, width - LABEL_WIDTH - 8)
    if history.rewards:
        values = [value for _, value in sorted(history.rewards.items())]
        spark = (sparkline(values, spark_width), "cyan")
        yield _row("reward", Text.assemble((f"{values[-1]:.2f}", "bold"), "  ", spark))
    if history.held_out:
        yield _row("held out", _held_out([value for _, value in sorted(history.held_out.items())]))
    yield _row("staleness", _pace(scene, status))


def _header(scene: Scene) -> RenderableType:
    status = scene.status
    left_s = scene.history.left_s(scene.elapsed_s)
    times = Text(stopwatch(scene.elapsed_s), style="bold")
    if status is not None and status.finished:
        times.append(", finished", style="green")
    elif left_s is not None:
        times.append(f", about {stopwatch(left_s)} left", style="dim")
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(Text.assemble(("shoal ", "bold cyan"), printable(status.run) if status is not None else ""), times)
    return grid


def _bar(status: RunStatus, width: int) -> RenderableType:
    label = f"step {status.step}/{status.steps}"
    bar = ProgressBar(total=max(1, status.steps), completed=status.step, width=max(1, width - len(label) - 2))
    grid = Table.grid()
    grid.add_row(bar, Text(f"  {label}", style="bold"))
    return grid


def _held_out(values: Sequence[float]) -> Text:
    text = Text(f"{values[0]:.2f}")
    if len(values) > 1:
        points = 100 * (values[-1] - values[0])
        text.append(" → ").append(f"{values[-1]:.2f}", style="bold green" if points > 0 else "bold")
        text.append(f"  {points:+.0f} points", style="green" if points > 0 else "dim")
        text.append(f"  {sparkline(values, SPARK_WIDTH // 2)}", style="green")
    return text


def _pace(scene: Scene, status: RunStatus) -> Text:
    stale = latest(in_order(status), "staleness_mean")
    counts = status.submissions
    text = Text("not known" if stale is None else f"{stale:.2f}")
    text.append(f" of {status.max_staleness}" if stale is not None else "", style="dim")
    text.append("   tokens/s ", style="dim").append(f"{scene.history.tokens_per_s():,.0f}", style="bold")
    text.append("   groups ", style="dim").append(f"{counts.get('accepted', 0):,} accepted")
    rejected = counts.get("rejected", 0)
    return text.append(f", {rejected:,} rejected", style="red" if rejected else "")


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Worker:
    name: str
    state: str
    doing: str
    noted: bool
    node: NodeView | None

    @property
    def style(self) -> str:
        return STATE_STYLES.get(self.state, "red" if self.state in ("banned", "suspended", "given up") else "yellow")


def _workers(scene: Scene) -> list[_Worker]:
    """Those that the hub knows, and those started here that it does not know yet: trouble first, then by credit."""
    nodes = [node for node in scene.status.nodes if node.role == "worker"] if scene.status is not None else []
    processes = {process.name: process for process in scene.processes if _is_worker(process)}
    names = labels(nodes)
    rows = [_worker(node, names[node.node], processes.get(node.name), scene) for node in nodes]
    for name in processes.keys() - {node.name for node in nodes}:
        state = processes[name].state
        rows.append(_Worker(name, "starting" if state == "running" else state, "", name in scene.notes, None))
    if len(rows) <= FEW_WORKERS:
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: (row.state in STATE_STYLES, -(row.node.credit if row.node else 0), row.name))


def _is_worker(process: ProcessView) -> bool:
    return process.name.startswith("worker-")


def _worker(node: NodeView, name: str, process: ProcessView | None, scene: Scene) -> _Worker:
    state, doing = node.state.value, _doing(node, scene)
    if node.state != NodeState.ACTIVE:
        doing = printable(node.reason)
    elif process is not None and process.state != "running":
        state, doing = ("done", "") if process.why == "is done" else (process.state, printable(process.why))
    return _Worker(name, state, doing, node.name in scene.notes, node)


def _worker_table(rows: Sequence[_Worker], left_out: int) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True, overflow="ellipsis", min_width=LABEL_WIDTH - 1, max_width=24)
    for name in ("accepted", "rejected", "credit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(" state", no_wrap=True)
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(*_cells(row))
    if left_out > 0:
        table.add_row(Text(f"and {left_out} more", style="dim"))
    return table


def _cells(row: _Worker) -> list[Text]:
    counts = (row.node.accepted, row.node.rejected, row.node.credit) if row.node is not None else (0, 0, 0)
    name = Text(row.name, style="magenta" if row.noted else "")
    doing = Text(row.doing, style="red" if row.style == "red" else "")
    return [name, *(Text(f"{count:,}") for count in counts), Text(f" {row.state}", style=row.style), doing]


def _doing(node: NodeView, scene: Scene) -> str:
    """What a node says that it does, or what the hub says that it waits for."""
    waits = scene.status.waits if scene.status is not None else ()
    own = (node.name, f"{node.name} ({node.node[:8]})", f"{node.role} {node.name} ({node.node[:8]})")
    waiting = next((f"waits for {wait.what}" for wait in waits if wait.who in own), "")
    return printable(node.doing or waiting)


def _notes(scene: Scene, width: int) -> Iterator[RenderableType]:
    for name, note in scene.notes.items():
        for line in textwrap.wrap(f"{name} {printable(note)}", max(10, width), max_lines=2, placeholder=" …"):
            yield Text(line, style="magenta", no_wrap=True, overflow="ellipsis")


# ── processes and verdicts ───────────────────────────────────────────────────────────────────────────────────────


def _processes(scene: Scene, width: int) -> Iterator[RenderableType]:
    """The processes that are no workers, what is wrong with any, alarms, and long waits."""
    yield from _rows("processes", [line] if (line := _others(scene)) else [])
    status = scene.status
    found = troubles(status, scene.processes, scene.silent_s)
    banned = {node.name for node in status.nodes if node.state != NodeState.ACTIVE} if status else set()
    wrong = [sentence for name, sentence in found.items() if name not in banned]  # their row says why
    yield from _sentences("trouble", wrong[:MAX_TROUBLES], "yellow", width)
    if status is not None:
        ordered = [line for line in (owner_line(status), lag_line(status)) if line]
        yield from _sentences("owner", ordered, "bold yellow", width)
        yield from _sentences("standstill", [printable(each) for each in status.standstill], "bold red", width)
        yield from _sentences("alarm", [printable(alarm) for alarm in status.alarms[:MAX_ALARMS]], "bold red", width)
        yield from _sentences("waiting", [waits_line(status, LONG_WAIT_S, most=1)], "", width)


def _sentences(label: str, sentences: Sequence[str], style: str, width: int) -> Iterator[RenderableType]:
    """Sentences that one must be able to read to their end: over two lines if need be."""
    room = max(10, width - LABEL_WIDTH)
    lines = [line for text in sentences for line in textwrap.wrap(text, room, max_lines=2, placeholder=" …")]
    yield from _rows(label, [Text(line, style=style) for line in lines])


def _others(scene: Scene) -> Text:
    """`hub · origin · trainer: training step 7 · validator-0: restarting`."""
    nodes = scene.status.nodes if scene.status is not None else ()
    doing = {node.name: _doing(node, scene) for node in nodes if node.role != "worker"}
    line = Text()
    for process in scene.processes:
        if not _is_worker(process):
            running = process.state == "running"
            said = doing.get(process.name, "") if running else "done" if process.why == "is done" else process.state
            style = "" if running else "dim" if said == "done" else "yellow"
            line.append(" · " if line else "", style="dim").append(process.name, style=style)
            line.append(f": {said}" if said else "", style="dim")
    return line


def _verdicts(scene: Scene, room: int) -> Iterator[RenderableType]:
    """The newest verdicts in words, oldest first; the last few rejections are always among them."""
    if scene.status is None:
        return
    names, room = labels(scene.status.nodes), min(room, VERDICTS_SHOWN)
    refused = scene.history.rejections[-min(REJECTIONS_KEPT, room) :]
    others = [verdict for verdict in scene.status.verdicts if verdict.outcome != "rejected"]
    others.sort(key=lambda verdict: -verdict.decided_at_ms)
    shown = sorted([*refused, *others[: room - len(refused)]], key=lambda verdict: verdict.decided_at_ms)
    yield from _rows(
        "verdicts",
        [Text(verdict_line(verdict, names), style=VERDICT_STYLES.get(verdict.outcome, "yellow")) for verdict in shown],
    )


def _rows(label: str, texts: Sequence[Text]) -> Iterator[RenderableType]:
    for index, text in enumerate(texts):
        yield _row(label if index == 0 else "", text)


def _row(label: str, text: Text) -> RenderableType:
    row = Text(no_wrap=True, overflow="ellipsis")
    return row.append(f"{label:<{LABEL_WIDTH}}", style="dim").append_text(text)
