"""Tasks done, for people: a bar with the time left on a terminal, a line now and then in a log.

evaluating  ━━━━━━━━━━╸━━━━━━━━━  52 %  133/256 tasks  0:00:41
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


class Report(Protocol):
    """Told how many are done, of how many, and what else to say about it (`loss 0.41`)."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def counted(
    what: str, console: Console, now_s: Callable[[], float] = time.monotonic, unit: str = "tasks"
) -> Iterator[Report]:
    """A function to be told how many tasks are done, and of how many; the first call is where it begins."""
    if not console.is_terminal:
        yield _Lines(what, console, now_s, unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    counts = (MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, *counts, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, note="")
        yield _bar(bar, task)


def _bar(bar: Progress, task: TaskID) -> Report:
    def report(done: int, total: int, note: str = "") -> None:
        bar.update(task, completed=done, total=total, note=note)

    return report


class _Lines:
    """One line every few seconds, with the time left at the pace so far."""

    def __init__(self, what: str, console: Console, now_s: Callable[[], float], unit: str) -> None:
        self._what = what
        self._unit = unit
        self._console = console
        self._now_s = now_s
        self._began: tuple[float, int] | None = None
        self._said_s = now_s()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        now_s = self._now_s()
        if self._began is None:
            self._began, self._said_s = (now_s, done), now_s
            if done:
                self._say(f"goes on: {done:,} of {total:,} {self._unit} are done")
            return
        if now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        began_s, before = self._began
        left = f", {span((now_s - began_s) * (total - done) / (done - before))} left" if done > before else ""
        self._say(f"{done:,} of {total:,} {self._unit}{left}{f', {note}' if note else ''}")

    def _say(self, text: str) -> None:
        self._console.print(f"{self._what}: {text}", highlight=False, soft_wrap=True, markup=False)


def span(seconds: float) -> str:
    """
    >>> span(59), span(600), span(7200)
    ('59 s', '10 min', '2.0 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
