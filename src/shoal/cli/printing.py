"""What commands print with: tables that fit where they are shown, and progress as a bar or as lines.

evaluating  ━━━━━━━━━━╸━━━━━━━━━  52 %  133/256 tasks  0:00:41
publishing model.bin  ━━━━━━━━━━╸━━━━━━━━━  52 %  266.2/512.0 MB  118.3 MB/s  0:00:02
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
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
from rich.table import Table
from rich.text import Text

from shoal.run.progress import duration
from shoal.runtime.text import printable

GAP = 2
UNBOUND = 100_000
EVERY_S = 10.0


def sheet(heads: Sequence[str], rows: Sequence[Sequence[str]], gives: Sequence[str] = (), title: str = "") -> Table:
    """A table whose columns `gives` are cut where the terminal is too narrow; numbers and states are not."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=head not in gives)
    for row in rows:
        table.add_row(*(Text(printable(cell), no_wrap=True, overflow="ellipsis") for cell in row))
    return table


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
    """Where `shoal cast` says things: results on stdout, progress on stderr."""

    def __init__(self) -> None:
        self._out, self._error = plain_console(), Console(stderr=True)

    def say(self, text: str) -> None:
        self._out.print(text)
        self._out.file.flush()

    def metered(self, what: str) -> AbstractContextManager[Report]:
        return metered(what, self._error)
