"""What commands print with: tables that fit where they are shown, and progress as a bar or as lines.

evaluating  ━━━━━━━━━━╸━━━━━━━━━  52 %  133/256 tasks  0:00:41
publishing model.bin  ━━━━━━━━━━╸━━━━━━━━━  52 %  266.2/512.0 MB  118.3 MB/s  0:00:02
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import echo

from shoal.runtime import duration, printable, show_bytes

if TYPE_CHECKING:
    from shoal.shardcast.cast import Report

UNBOUND = 100_000
EVERY_S = 10.0
MB = "MB"


def sheet(heads: Sequence[str], rows: Sequence[Sequence[str]], gives: Sequence[str] = (), title: str = "") -> Table:
    """A table whose columns `gives` are cut where the terminal is too narrow; numbers and states are not."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=head not in gives)
    for row in rows:
        table.add_row(*(Text(printable(cell), no_wrap=True, overflow="ellipsis") for cell in row))
    return table


def console() -> Console:
    """Where commands print: as wide as the terminal; what is no terminal has no edge, so that programs read it all."""
    found = Console()
    return found if found.is_terminal else Console(width=UNBOUND)


@contextmanager
def counted(
    what: str, console: Console, now_s: Callable[[], float] = time.monotonic, unit: str = "tasks"
) -> Iterator[Report]:
    """A function that takes how much is done, of how much, and a note; the first call is where it begins. A bar that
    is gone at the end; where there is no terminal, a line every few seconds, with the time left at the pace so far."""
    if console.is_terminal:
        text = bars.TextColumn
        counted_so = (bars.MofNCompleteColumn(), text(unit))
        kinds = (bars.DownloadColumn(), bars.TransferSpeedColumn()) if unit == MB else counted_so
        columns = (text("{task.description}"), bars.BarColumn(), text("{task.percentage:>3.0f} %"), *kinds)
        columns = (*columns, bars.TimeRemainingColumn(), text("{task.fields[note]}"))
        with bars.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None, note="")
            yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
        return
    began: tuple[float, int] | None = None
    said_s = 0.0

    def report(done: int, total: int, note: str = "") -> None:
        nonlocal began, said_s
        now = now_s()
        if began and now - said_s < EVERY_S:
            return
        counts = (show_bytes(done), show_bytes(total)) if unit == MB else (f"{done:,}", f"{total:,} {unit}")
        said_s, text = now, " of ".join(counts)
        if began is None:
            began, text = (now, done), f"continues: {text} are done" if done else ""
        else:
            began_s, pace = began[0], done - began[1]
            text += f", {duration((now - began_s) * (total - done) / pace)} left" if pace > 0 else ""
            text += f", {note}" if note else ""
        if text:
            console.print(f"{what}: {text}", highlight=False, soft_wrap=True, markup=False)

    yield report


class CommandTerminal:
    """Implements `shoal.shardcast.cast.Terminal`."""

    def say(self, text: str) -> None:
        echo(text)

    def note(self, text: str) -> None:
        echo(text, err=True)

    def metered(self, what: str, unit: str = MB) -> AbstractContextManager[Report]:
        return counted(what, Console(stderr=True), unit=unit)
