"""What commands print with: tables that fit where they are shown, and progress as a bar or as lines.

    wide enough, a pipe, a file   node  name                 state   credit  doing
                                  ab12  a-very-long-hostname  active  1,200   generating unit 17, token 300
    narrow                        ab12  a-very-long-hostname  active  1,200   generating un…
    narrower                      ab12  a-very-lo…            active  1,200   gener…

    evaluating  ━━━━━━━━━━╸━━━━━━━━━  52 %  133/256 tasks  0:00:41
    publishing model.bin  ━━━━━━━━━━╸━━━━━━━━━  52 %  266.2/512.0 MB  118.3 MB/s  0:00:02

In a table, what may give way is cut, in order; numbers and states never are. Where even that is too wide, lines are
folded: nothing else is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from shoal.run.progress import duration
from shoal.runtime.text import printable

GAP = 2
UNBOUND = 100_000
EVERY_S = 10.0


@dataclass(frozen=True)
class Sheet:
    """`gives` names the columns that may be cut, the first to be cut first, and how much of each stays; one of which
    nothing has to stay is left out before a sliver of it is shown."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    gives: Mapping[str, int] = field(default_factory=dict)
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [[printable(cell) for cell in row] for row in self.rows]
        widths = self._widths(rows, options.max_width)
        if self.title:
            yield Text(self.title, style="italic")
        yield Text(_line(self.heads, widths), style="bold", overflow="fold")
        for row in rows:
            yield Text(_line(row, widths), overflow="fold")

    def _widths(self, rows: Sequence[Sequence[str]], room: int) -> list[int]:
        widths = [max(cell_len(cell) for cell in column) for column in zip(self.heads, *rows, strict=True)]
        excess = sum(widths) + GAP * (len(widths) - 1) - room
        for name, least in self.gives.items():
            index = self.heads.index(name)
            cut = max(0, min(excess, widths[index] - (max(least, cell_len(name)) if least else 0)))
            if cut and widths[index] - cut < cell_len(name):  # not even its head would fit
                cut = widths[index] + GAP
            widths[index] -= cut
            excess -= cut
        return widths


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [
        set_cell_size(cell, width) if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"
        for cell, width in zip(cells, widths, strict=True)
        if width >= 0
    ]
    return (" " * GAP).join(shown).rstrip()


def console() -> Console:
    """Where commands print: as wide as the terminal; what is no terminal has no edge, so that programs read it all."""
    found = Console()
    return found if found.is_terminal else Console(width=UNBOUND)


def plain_console() -> Console:
    """For results: lines as they are, however long, so that a command can be copied out of them."""
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Report(Protocol):
    """Told how much is done, of how much, and what else to say about it (`loss 0.41`)."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def counted(
    what: str, console: Console, now_s: Callable[[], float] = time.monotonic, unit: str = "tasks"
) -> Iterator[Report]:
    """A function to be told how many tasks are done, and of how many; the first call is where it begins."""
    counts = (MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with _bar(what, console, counts) as bar:
        yield bar or _Lines(what, console, now_s, unit)


@contextmanager
def metered(what: str, console: Console, now_s: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """A function to be told how many bytes are done, as often as one likes."""
    with _bar(what, console, (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())) as bar:
        lines = _Lines(what, console, now_s, "MB")
        lines(0, 0)
        yield bar or (lambda done, total, note="": lines(done // 10**6, total // 10**6, note))


@contextmanager
def _bar(what: str, console: Console, further: Sequence[ProgressColumn]) -> Iterator[Report | None]:
    """A bar that is gone at the end; None where there is no terminal: there, a line now and then says it."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, *further, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, note="")

        def report(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield report


class _Lines:
    """Lines in a log: one every few seconds, with the time left at the pace so far."""

    def __init__(self, what: str, console: Console, now_s: Callable[[], float], unit: str) -> None:
        self._what, self._console, self._now_s, self._unit = what, console, now_s, unit
        self._began: tuple[float, int] | None = None
        self._said_s = 0.0

    def __call__(self, done: int, total: int, note: str = "") -> None:
        now_s = self._now_s()
        if self._began is None:
            self._began, self._said_s = (now_s, done), now_s
            if done:
                self._say(f"continues: {done:,} of {total:,} {self._unit} are done")
        elif now_s - self._said_s >= EVERY_S:
            self._said_s = now_s
            began_s, before = self._began
            left = f", {duration((now_s - began_s) * (total - done) / (done - before))} left" if done > before else ""
            self._say(f"{done:,} of {total:,} {self._unit}{left}{f', {note}' if note else ''}")

    def _say(self, text: str) -> None:
        self._console.print(f"{self._what}: {text}", highlight=False, soft_wrap=True, markup=False)


class CastTerminal:
    """Where `shoal cast` says things: results on stdout; remarks and progress on stderr."""

    def __init__(self) -> None:
        self._out, self._error = plain_console(), Console(stderr=True)

    def say(self, text: str) -> None:
        self._out.print(text)
        self._out.file.flush()

    def note(self, text: str) -> None:
        self._error.print(text, soft_wrap=True, highlight=False, markup=False)

    def metered(self, what: str) -> AbstractContextManager[Report]:
        return metered(what, self._error)
