"""Displays of a run at the terminal.

    RunView ─┬─► LiveDisplay   on a terminal: one frame, drawn in place about four times a second
             ├─► PlainDisplay  elsewhere: a line when something happened, and after a long silence
             └─► frame         `shoal status`: the same frame, once

Names, reasons and messages come from other people's machines: they are shown as text, never as markup or control codes.
"""

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.protocol import NodeState, NodeView, RunStatus
from shoal.protocol.node import WORKERS
from shoal.run import progress
from shoal.run.progress import Display, RunView, labels
from shoal.runtime.text import duration, printable, visible
from shoal.validator.settings import MEASURING

if TYPE_CHECKING:
    from shoal.run.fleet import Show

SILENCE_S = 10.0
LONG_WAIT_S = 10.0  # shorter waits are normal
LABEL_WIDTH, SPARK_WIDTH = 12, 40
MAX_NOTICES, MAX_REJECTIONS, REJECTIONS_KEPT, VERDICTS_SHOWN = 4, 5, 3, 5
MAX_WORKERS, MAX_NODES = 8, 40  # up to MAX_WORKERS are ordered by name, so that rows do not jump
VERDICT_STYLES = {"rejected": "red", "accepted": ""}
STATE_STYLES = {"active": "green", "probation": "green", "done": "dim", "starting": "dim"}  # all others are trouble


def choose_display(console: Console) -> Display:
    if _can_draw(console):
        return LiveDisplay(console)
    return PlainDisplay(lambda line: console.print(Text(line), soft_wrap=True))


def _can_draw(console: Console) -> bool:
    able = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return able and console.file.isatty()  # what `is_terminal` says can be forced by the environment


@contextmanager
def live_rows(console: Console) -> "Iterator[Show | None]":
    """Rows below what is logged, drawn in place; None where there is no terminal. The log must be set up inside."""
    if not _can_draw(console):
        yield None
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        console.show_cursor(True)  # a second Ctrl-C ends the process at once
        yield lambda rows: live.update(Group(*(_row(*row) for row in rows)), refresh=True)


class LiveDisplay:
    """One frame, drawn in place and cut off where the terminal ends. The last frame stays on the screen."""

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

    def show(self, scene: RunView) -> None:
        self._live.update(frame(scene, self._console.width), refresh=True)


class PlainDisplay:
    """Prints lines. An unchanged line is printed again only after `SILENCE_S`; each problem is printed once."""

    live = False
    every_s = 3.0

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last, self._last_s, self._rejections = say, "", -SILENCE_S, 0
        self._shown: set[str] = set()  # the facts of the previous view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        self._say(printable(text))

    def show(self, scene: RunView) -> None:
        facts = dict(self._facts(scene))
        for line in (line for key, line in facts.items() if line and key not in self._shown):
            self._say(line)
        self._shown = set(facts)
        if scene.status is None:
            return
        self._say_progress(scene, scene.status)
        new = list(scene.history.rejections.values())[self._rejections :]
        self._rejections += len(new)
        for verdict in new[:MAX_REJECTIONS]:
            self._say(progress.verdict_line(verdict, labels(scene.status.nodes)))
        if len(new) > MAX_REJECTIONS:
            self._say(f"and {len(new) - MAX_REJECTIONS} more rejections")

    def _facts(self, scene: RunView) -> Iterator[tuple[str, str]]:
        """Each problem, as a key without times, which change, and the line that reports it when it is new."""
        found = progress.process_problems(scene.status, scene.processes, scene.silent_s)
        for process in scene.processes:
            if process.name in found:
                yield f"{process.name} {process.state}", found[process.name]
            if process.state == "running" and process.restarts:
                again = f"{process.name} {printable(process.why)}; it was started again (pid {process.pid})"
                yield f"{process.name} {process.restarts}", "" if process.name in found else again
        if scene.status is not None:
            names = labels(scene.status.nodes)
            for node in (node for node in scene.status.nodes if node.state != NodeState.ACTIVE):
                yield node.node, f"{names[node.node]} was {node.state.value}: {printable(node.reason)}"
            for label, sentence in progress.notices(scene.status):
                yield label + sentence.partition(":")[0].partition(",")[0], f"{label}: {sentence}"

    def _say_progress(self, scene: RunView, status: RunStatus) -> None:
        silent = scene.silent_s >= progress.SILENT_S
        rewards, scores = (list(values.values()) for values in (scene.history.rewards, scene.history.held_out))
        stale = scene.history.staleness
        numbers = {"reward": rewards[-1:], "held out": scores[-1:], "staleness": [] if stale is None else [stale]}
        parts = [f"step {status.step}/{status.steps}"]
        parts += [f"{name} {last:.2f}" for name, values in numbers.items() for last in values]
        parts.append(groups_line(status))
        parts += [f"{printable(node.name)}: {MEASURING}" for node in status.nodes if node.doing == MEASURING]
        text = "the hub does not answer" if silent else "  ".join(parts)
        if status.policy is None and status.step == 0 and not silent:
            text = "starting: the trainer is loading the first policy"
        if text == self._last and scene.elapsed_s - self._last_s < SILENCE_S:
            return
        self._last, self._last_s = text, scene.elapsed_s
        if silent:
            more = f", for {duration(scene.silent_s)} now"
        else:
            left_s, waits = scene.history.left_s(scene.elapsed_s), progress.waits_line(status, LONG_WAIT_S, 1)
            more = f"  {scene.history.tokens_per_s():,.0f} tokens/s"
            more += f"  {stopwatch(left_s)} left" if left_s and not status.finished else ""
            more += f"  ({waits})" if waits else ""
        self._say(f"{stopwatch(scene.elapsed_s):>6}  {text}{more}")


def stopwatch(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def groups_line(status: RunStatus) -> str:
    accepted, rejected, unsure = (status.submissions.get(state, 0) for state in ("accepted", "rejected", "unsure"))
    missed = f" ({status.unscored} could not be scored)" if status.unscored else ""
    return f"groups {accepted:,} accepted, {rejected:,} rejected" + (f", {unsure:,} unsure" if unsure else "") + missed


def frame(scene: RunView, width: int) -> Group:
    status, left_s = scene.status, scene.history.left_s(scene.elapsed_s)
    title = "shoal" if status is None else f"shoal {printable(status.run)}"
    title += f"  policy {status.policy.label}" if status is not None and status.policy else ""
    title += f"  {stopwatch(scene.elapsed_s)}" if scene.processes else ""
    finished = status is not None and status.finished
    title += ", finished" if finished else "" if left_s is None else f", about {stopwatch(left_s)} left"
    rows: list[RenderableType] = [Text(title, "bold", no_wrap=True, overflow="ellipsis")]
    if status is None or (status.policy is None and status.step == 0):
        why = "the hub does not answer yet" if status is None else "the trainer is loading the first policy"
        rows.append(_row("starting", why))
    else:
        step, bar = f"  step {status.step}/{status.steps}", Table.grid()
        bar.add_row(ProgressBar(max(1, status.steps), status.step, max(1, width - len(step))), Text(step, "bold"))
        rows += [bar, ""]
    if status is not None:
        rows += _numbers(scene, status)
    rows += ["", _workers(scene)]
    for name, note in scene.notes.items():
        rows.append(Text(f"{name} {printable(note)}", "magenta", no_wrap=True, overflow="ellipsis"))
    rows += ["", *_processes(scene, width)]
    if status is not None:  # the newest verdicts, oldest first; the last few rejections are always among them
        refused = list(scene.history.rejections.values())[-REJECTIONS_KEPT:]
        others = [verdict for verdict in status.verdicts if verdict.outcome != "rejected"]
        others.sort(key=lambda verdict: -verdict.decided_at_ms)
        shown = [*refused, *others[: VERDICTS_SHOWN - len(refused)]]
        for verdict in sorted(shown, key=lambda verdict: verdict.decided_at_ms):
            style = VERDICT_STYLES.get(verdict.outcome, "yellow")
            rows.append(_row("verdict", progress.verdict_line(verdict, labels(status.nodes)), style))
    return Group(*rows)


def _numbers(scene: RunView, status: RunStatus) -> Iterator[Text]:
    rewards, scores = (list(values.values()) for values in (scene.history.rewards, scene.history.held_out))
    if rewards:
        yield _row("reward", f"{rewards[-1]:.2f}  {progress.sparkline(rewards, SPARK_WIDTH)}")
    if scores:
        rise = f" → {scores[-1]:.2f}  {100 * (scores[-1] - scores[0]):+.0f} points" if len(scores) > 1 else ""
        yield _row("held out", f"{scores[0]:.2f}{rise}  {progress.sparkline(scores, SPARK_WIDTH // 2)}", "green")
    stale = scene.history.staleness
    age = "not known" if stale is None else f"{stale:.2f} of {status.max_staleness}"
    rate = f"   {scene.history.tokens_per_s():,.0f} tokens/s" if scene.processes else ""
    yield _row("staleness", f"{age}{rate}   {groups_line(status)}")
    tasks = [f"{count} {pool}" for pool, count in sorted(status.pools.items())]
    for each in (each for each in status.evaluations if not each.complete):
        tasks.append(f"measuring version {each.policy.version}: {each.scored} of {each.tasks} held-out tasks")
    if tasks:
        yield _row("tasks", ", ".join(tasks))


def _workers(scene: RunView) -> Table:
    """Workers that the hub knows, and those started here that it does not know: bad states first, then by credit."""
    nodes = [node for node in scene.status.nodes if node.role in WORKERS] if scene.status is not None else []
    processes = {process.name: process for process in scene.processes if process.name.startswith("worker-")}
    names, found, most = labels(nodes), [], MAX_WORKERS if scene.processes else MAX_NODES
    for node in nodes:
        state, doing = node.state.value, _doing(node, scene)
        process = processes.get(node.name)
        if node.state != NodeState.ACTIVE:
            doing = printable(node.reason)
        elif process is not None and process.state != "running":
            state, doing = ("done", "") if process.why == "is done" else (process.state, printable(process.why))
        elif node.liveness != "here":
            state = node.liveness
        elif node.on_probation:
            state = "probation"
        earned = f"{node.credit:,}" + (f" + {node.pending:,} pending" if node.pending and not processes else "")
        found.append((names[node.node], node.accepted, node.rejected, node.credit, earned, state, doing))
    for name in processes.keys() - {node.name for node in nodes}:
        state = "starting" if processes[name].state == "running" else processes[name].state
        found.append((name, 0, 0, 0, "0", state, ""))
    few = len(found) <= MAX_WORKERS
    found.sort(key=lambda row: (0, 0, row[0]) if few else (row[5] in STATE_STYLES, -row[3], row[0]))
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in ("worker", "accepted", "rejected", "credit", "state"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="right" if name[-1] in "dt" else "left")
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    for name, accepted, rejected, _, earned, state, doing in found[:most]:
        style = STATE_STYLES.get(state, "red" if state in ("banned", "suspended", "given up") else "yellow")
        cells = map(Text, (name, f"{accepted:,}", f"{rejected:,}", earned))
        table.add_row(*cells, Text(printable(state), style), Text(doing, "red" if style == "red" else ""))
    counts = scene.status.node_counts if scene.status is not None else {}
    known = sum(count for name, count in counts.items() if name.startswith("worker."))
    if max(len(found), known) > most or known > len(found):
        table.add_row(Text(f"and {max(len(found), known) - min(len(found), most):,} more", "dim"))
    return table


def _doing(node: NodeView, scene: RunView) -> str:
    waits = scene.status.waits if scene.status is not None else ()
    own = (node.name, f"{node.name} ({node.node[:8]})", f"{node.role} {node.name} ({node.node[:8]})")
    waiting = next((f"waits for {wait.what}" for wait in waits if wait.who in own), "")
    return printable(node.doing or waiting)


def _processes(scene: RunView, width: int) -> Iterator[Text]:
    status, nodes = scene.status, () if scene.status is None else scene.status.nodes
    doing = {printable(node.name): _doing(node, scene) for node in nodes if node.role not in WORKERS}
    others = {} if scene.processes else doing
    for process in scene.processes:
        if not process.name.startswith("worker-"):
            state: str = "done" if process.why == "is done" else process.state
            others[process.name] = doing.get(process.name, "") if process.state == "running" else state
    yield _row("processes", " · ".join(f"{name}: {said}" if said else name for name, said in others.items()))
    banned = {node.name for node in nodes if node.state != NodeState.ACTIVE}  # their row says why
    wrong = progress.process_problems(status, scene.processes, scene.silent_s).items()
    found = [("trouble", sentence) for name, sentence in wrong if name not in banned]
    if status is not None:
        waits = progress.waits_line(status, LONG_WAIT_S, 1) if scene.processes else progress.waits_line(status)
        found = found[:MAX_NOTICES] + progress.notices(status)[:MAX_NOTICES] + ([("waiting", waits)] if waits else [])
    for label, sentence in found:  # wrapped onto at most two lines
        style = {"waiting": "", "trouble": "yellow", "owner": "bold yellow"}.get(label, "bold red")
        for line in textwrap.wrap(printable(sentence), max(10, width - LABEL_WIDTH), max_lines=2, placeholder=" …"):
            yield _row(label, line, style)


def _row(label: str, text: str, style: str = "") -> Text:
    row = Text(no_wrap=True, overflow="ellipsis")
    return row.append(f"{label:<{LABEL_WIDTH}}", style="dim").append(visible(text), style=style)
