"""The live frame: a `Scene` as a picture that fits the terminal, whatever its size.

    numbers     what runs, for how long still; step, reward, held-out score, staleness, tokens per second
    workers     a row each; when there are too many, those in trouble and those that did most
    processes   the others, what they do, what is wrong with them, who waits long for whom
    verdicts    the last rejections stay, however many acceptances come after them

Every part is made of rows of one line, so its height is known: workers and verdicts share what the others leave, and
whatever still does not fit is cut off below. A frame never scrolls.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.cli.progress import (
    Scene,
    in_order,
    labels,
    latest,
    sparkline,
    stopwatch,
    verdict_line,
    waits_line,
)
from shoal.cli.watchdog import lag_line, owner_line, troubles
from shoal.protocol import NodeState, NodeView, RecentVerdict, RunStatus
from shoal.runtime.supervise import ProcessView
from shoal.runtime.text import printable

LABEL_WIDTH = 12
SPARK_WIDTH = 40
LONG_WAIT_S = 10.0
REJECTIONS_KEPT = 3
VERDICTS_SHOWN = 5
LEAST_WORKERS = 3
FEW_WORKERS = 6  # in order of their names, so that rows do not jump
MAX_TROUBLES = 4
MAX_ALARMS = 2
STATE_STYLES = {"active": "green", "done": "dim", "starting": "dim"}  # all others are trouble


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
    yield from _rows("verdicts", [Text(verdict_line(verdict, names), style=_style(verdict)) for verdict in shown])


def _style(verdict: RecentVerdict) -> str:
    return {"rejected": "red", "accepted": ""}.get(verdict.outcome, "yellow")


def _rows(label: str, texts: Sequence[Text]) -> Iterator[RenderableType]:
    for index, text in enumerate(texts):
        yield _row(label if index == 0 else "", text)


def _row(label: str, text: Text) -> RenderableType:
    row = Text(no_wrap=True, overflow="ellipsis")
    return row.append(f"{label:<{LABEL_WIDTH}}", style="dim").append_text(text)
