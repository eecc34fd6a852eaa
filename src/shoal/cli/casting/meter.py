"""Progress for people: a bar on a terminal, a line every few seconds in a log.

publishing model.bin  ━━━━━━━━━━╸━━━━━━━━━  52 %  266.2/512.0 MB  118.3 MB/s  0:00:02
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 5.0
Report = Callable[[int, int], None]  # (bytes done, bytes in all)


@contextmanager
def metered(what: str, console: Console, now_s: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """A function to be told how far it is, as often as one likes."""
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _Lines(what, console, now_s)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class _Lines:
    """One line every few seconds, none for what is done sooner."""

    def __init__(self, what: str, console: Console, now_s: Callable[[], float]) -> None:
        self._what = what
        self._console = console
        self._now_s = now_s
        self._said_s = now_s()
        self._said_bytes = 0

    def __call__(self, done: int, total: int) -> None:
        seconds = self._now_s() - self._said_s
        if seconds < LINE_EVERY_S:
            return
        rate = max(0, done - self._said_bytes) / seconds
        line = f"{self._what}: {percent(done, total)}, {megabytes(done)} of {megabytes(total)}, {rate / 1e6:.1f} MB/s"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        self._said_s, self._said_bytes = self._now_s(), done


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes} bytes" if size_bytes < 10_000 else f"{size_bytes / 1e6:,.2f} MB"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "100 %"


def shares(by_source: Mapping[str, int]) -> str:
    """Who sent how much: `http://a:8471 60 %, http://b:8471 40 %`."""
    total = sum(by_source.values())
    ranked = sorted(by_source.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{source} {percent(size, total)}" for source, size in ranked if size)
