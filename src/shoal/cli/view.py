"""Displays: what the person at the terminal sees of a run, as a picture that is drawn again and again, or as lines.

    Scene ──► LiveDisplay   on a terminal: one frame, drawn in place about four times a second
          └─► PlainDisplay  elsewhere: a line when something happened, or to break a long silence

    with choose_display(console) as display:
        launch(folder, options, stop, display)

Names, reasons and messages come from other people's machines: they are shown as text, never as markup or control codes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
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
MAX_WORKERS = 8  # so few are in order of their names, so that rows do not jump
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


class LiveDisplay:
    """One frame, drawn in place and cut off where the terminal ends. However it is left, the last frame stays."""

    live = True
    every_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A line above the frame, whole even if it is longer than the terminal is wide."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def show(self, scene: Scene) -> None:
        self._live.update(frame(scene, self._console.width), refresh=True)


class PlainDisplay:
    """Lines. The same line is said again only to break a long silence; whatever went wrong is said once."""

    live = False
    every_s = 3.0

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last, self._last_s = "", -SILENCE_S
        self._rejections = 0
        self._told: set[str] = set()  # what was so at the last look

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
        processes, facts = list(self._processes(scene)), list(self._facts(scene.status))
        yield from (line for key, line in processes if line and key not in self._told)
        if scene.status is not None:
            yield from self._progress(scene, scene.status)
            yield from self._refusals(scene, scene.status)
        yield from (line for key, line in facts if key not in self._told)
        self._told = {key for key, _ in (*processes, *facts)}

    def _processes(self, scene: Scene) -> Iterator[tuple[str, str]]:
        """Who is in trouble, and who was started again: what it is about, and the line to say when that is new."""
        found = troubles(scene.status, scene.processes, scene.silent_s)
        for process in scene.processes:
            if process.name in found:
                yield f"{process.name} {process.state}", found[process.name]
            if process.state == "running" and process.restarts:
                again = f"{process.name} {printable(process.why)}; it was started again (pid {process.pid})"
                yield f"{process.name} {process.restarts}", "" if process.name in found else again

    def _facts(self, status: RunStatus | None) -> Iterator[tuple[str, str]]:
        """The same of what the hub says: the owner's orders, a standstill, who is shut out, alarms (oldest first)."""
        if status is None:
            return
        if ordered := owner_line(status):
            yield f"{status.standing.conduct} {status.standing.drained}", f"the run was {ordered}"
        for sentence in status.standstill:  # times in it change
            yield sentence.partition(":")[0], f"the run stands still: {printable(sentence)}"
        names = labels(status.nodes)
        for node in status.nodes:
            if node.state != NodeState.ACTIVE:
                yield node.node, f"{names[node.node]} was {node.state.value}: {printable(node.reason)}"
        for alarm in reversed(status.alarms):
            yield alarm, f"alarm: {printable(alarm)}"

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
        """Each rejection, when it is first seen."""
        names = labels(status.nodes)
        new = scene.history.rejections[self._rejections :]
        self._rejections += len(new)
        yield from (verdict_line(verdict, names) for verdict in new[:MAX_REJECTIONS])
        if len(new) > MAX_REJECTIONS:
            yield f"and {len(new) - MAX_REJECTIONS} more rejections"


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


def frame(scene: Scene, width: int) -> Group:
    """Numbers, workers, the other processes and what is wrong, the last verdicts; every row is one line."""
    status = scene.status
    times = stopwatch(scene.elapsed_s)
    left_s = scene.history.left_s(scene.elapsed_s)
    if status is not None and status.finished:
        times += ", finished"
    elif left_s is not None:
        times += f", about {stopwatch(left_s)} left"
    run = f"shoal {printable(status.run)}  " if status is not None else "shoal  "
    rows: list[RenderableType] = [Text(f"{run}{times}", "bold", no_wrap=True, overflow="ellipsis")]
    if status is None or status.policy is None:
        why = "the hub does not answer yet" if status is None else "the trainer is loading the first policy"
        rows.append(_row("starting", why))
    else:
        step, bar = f"  step {status.step}/{status.steps}", Table.grid()
        bar.add_row(ProgressBar(max(1, status.steps), status.step, max(1, width - len(step))), Text(step, "bold"))
        rows += [bar, "", *_numbers(scene, status)]
    notes = [
        Text(f"{name} {printable(note)}", style="magenta", no_wrap=True, overflow="ellipsis")
        for name, note in scene.notes.items()
    ]
    rows += ["", _workers(scene), *notes, "", *_processes(scene, width), *_verdicts(scene)]
    return Group(*rows)


def _numbers(scene: Scene, status: RunStatus) -> Iterator[Text]:
    history = scene.history
    rewards, scores = ([values[step] for step in sorted(values)] for values in (history.rewards, history.held_out))
    if rewards:
        yield _row("reward", f"{rewards[-1]:.2f}  {sparkline(rewards, SPARK_WIDTH)}")
    if scores:
        rise = f" → {scores[-1]:.2f}  {100 * (scores[-1] - scores[0]):+.0f} points" if len(scores) > 1 else ""
        yield _row("held out", f"{scores[0]:.2f}{rise}  {sparkline(scores, SPARK_WIDTH // 2)}", "green")
    stale = latest(in_order(status), "staleness_mean")
    age = "not known" if stale is None else f"{stale:.2f} of {status.max_staleness}"
    rate = f"{scene.history.tokens_per_s():,.0f} tokens/s"
    yield _row("staleness", f"{age}   {rate}   {groups_line(status)}")


def _workers(scene: Scene) -> Table:
    """Those that the hub knows, and those started here that it does not know yet: trouble first, then by credit."""
    nodes = [node for node in scene.status.nodes if node.role == "worker"] if scene.status is not None else []
    processes = {process.name: process for process in scene.processes if process.name.startswith("worker-")}
    names = labels(nodes)
    found = [_worker(node, names[node.node], processes.get(node.name), scene) for node in nodes]
    for name in processes.keys() - {node.name for node in nodes}:
        state: str = processes[name].state
        found.append((name, 0, 0, 0, "starting" if state == "running" else state, ""))
    few = len(found) <= MAX_WORKERS
    found.sort(key=lambda row: (0, 0, row[0]) if few else (row[4] in STATE_STYLES, -row[3], row[0]))
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in ("worker", "accepted", "rejected", "credit", "state"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if name[-1] in "dt" else "left")
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    for name, accepted, rejected, credit, state, doing in found[:MAX_WORKERS]:
        style = STATE_STYLES.get(state, "red" if state in ("banned", "suspended", "given up") else "yellow")
        cells = (name, f"{accepted:,}", f"{rejected:,}", f"{credit:,}")
        table.add_row(*map(Text, cells), Text(state, style), Text(doing, "red" if style == "red" else ""))
    if not few:
        table.add_row(Text(f"and {len(found) - MAX_WORKERS} more", "dim"))
    return table


def _worker(
    node: NodeView, name: str, process: ProcessView | None, scene: Scene
) -> tuple[str, int, int, int, str, str]:
    state, doing = node.state.value, _doing(node, scene)
    if node.state != NodeState.ACTIVE:
        doing = printable(node.reason)
    elif process is not None and process.state != "running":
        state, doing = ("done", "") if process.why == "is done" else (process.state, printable(process.why))
    return name, node.accepted, node.rejected, node.credit, state, doing


def _doing(node: NodeView, scene: Scene) -> str:
    """What a node says that it does, or what the hub says that it waits for."""
    waits = scene.status.waits if scene.status is not None else ()
    own = (node.name, f"{node.name} ({node.node[:8]})", f"{node.role} {node.name} ({node.node[:8]})")
    waiting = next((f"waits for {wait.what}" for wait in waits if wait.who in own), "")
    return printable(node.doing or waiting)


def _processes(scene: Scene, width: int) -> Iterator[Text]:
    """The processes that are no workers, what is wrong with any, alarms, and long waits."""
    status = scene.status
    doing = {node.name: _doing(node, scene) for node in status.nodes} if status is not None else {}
    others = []
    for process in scene.processes:
        if not process.name.startswith("worker-"):
            said: str = "done" if process.why == "is done" else process.state
            said = doing.get(process.name, "") if process.state == "running" else said
            others.append(f"{process.name}: {said}" if said else process.name)
    yield _row("processes", " · ".join(others))
    banned = {node.name for node in status.nodes if node.state != NodeState.ACTIVE} if status else set()
    found = troubles(status, scene.processes, scene.silent_s).items()
    wrong = [sentence for name, sentence in found if name not in banned]  # their row says why
    yield from _sentences("trouble", wrong[:MAX_TROUBLES], "yellow", width)
    if status is not None:
        yield from _sentences("owner", [owner_line(status), lag_line(status)], "bold yellow", width)
        yield from _sentences("standstill", status.standstill, "bold red", width)
        yield from _sentences("alarm", status.alarms[:MAX_ALARMS], "bold red", width)
        yield from _sentences("waiting", [waits_line(status, LONG_WAIT_S, most=1)], "", width)


def _sentences(label: str, sentences: Sequence[str], style: str, width: int) -> Iterator[Text]:
    """Sentences that one must be able to read to their end: over two lines if need be."""
    for sentence in sentences:
        for line in textwrap.wrap(printable(sentence), max(10, width - LABEL_WIDTH), max_lines=2, placeholder=" …"):
            yield _row(label, line, style)


def _verdicts(scene: Scene) -> Iterator[Text]:
    """The newest verdicts in words, oldest first; the last few rejections are always among them."""
    if scene.status is None:
        return
    names, refused = labels(scene.status.nodes), scene.history.rejections[-REJECTIONS_KEPT:]
    others = [verdict for verdict in scene.status.verdicts if verdict.outcome != "rejected"]
    others.sort(key=lambda verdict: -verdict.decided_at_ms)
    shown = [*refused, *others[: VERDICTS_SHOWN - len(refused)]]
    for verdict in sorted(shown, key=lambda verdict: verdict.decided_at_ms):
        yield _row("verdict", verdict_line(verdict, names), VERDICT_STYLES.get(verdict.outcome, "yellow"))


def _row(label: str, text: str, style: str = "") -> Text:
    row = Text(no_wrap=True, overflow="ellipsis")
    return row.append(f"{label:<{LABEL_WIDTH}}", style="dim").append(text, style=style)
