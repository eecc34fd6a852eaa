"""The deep check: is every answer one that its grader can use? Reads the whole data set, so it is done on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.environments.data.cache import entry_name, load_arrays, store_arrays
from shoal.environments.data.readers import ROW_LIMIT_BYTES, Broken, rows_of
from shoal.environments.data.table import Table
from shoal.environments.formats.protocol import Format
from shoal.environments.graders.protocol import Grader
from shoal.errors import UnusableTask

if TYPE_CHECKING:
    from shoal.environments.data.scanning import Scan

SHOWN = 20
MOST_REASONS = 1000


def count_of(number: int, noun: str = "row") -> str:
    """How many of something.

    >>> count_of(1), count_of(3000)
    ('1 row', '3,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass
class Problems:
    """The first rows by number with what is wrong, and how often each reason occurred."""

    first: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.reasons.total()

    def add(self, row: int, reason: str) -> None:
        """Remember a row; rows may come in any order, those with the lowest numbers are shown."""
        known = reason if reason in self.reasons or len(self.reasons) < MOST_REASONS else "other reasons"
        self.reasons[known] += 1
        self.first.append((row, reason))
        if len(self.first) > 4 * SHOWN:
            self.first = sorted(self.first)[:SHOWN]

    def add_all(self, others: Problems) -> None:
        self.reasons += others.reasons
        self.first = sorted({*self.first, *others.first})[:SHOWN]

    def lines(self, where: Callable[[int], str]) -> list[str]:
        """One line for each of the first rows, and one for the rest."""
        shown = sorted(self.first)[:SHOWN]
        lines = [f"row {row} ({where(row)}): {reason}" for row, reason in shown]
        return [*lines, *([f"and {self.count - len(shown):,} more"] if self.count > len(shown) else [])]

    def sentence(self, where: Callable[[int], str], most: int = 3) -> str:
        """The first few in one sentence: `row 7 (a.jsonl line 8): prompt is empty; row 9 …; and 12 more`."""
        shown = sorted(self.first)[:most]
        parts = [f"row {row} ({where(row)}): {reason}" for row, reason in shown]
        return "; ".join([*parts, *([f"and {self.count - len(shown):,} more"] if self.count > len(shown) else [])])

    def as_json(self) -> dict[str, object]:
        return {"first": sorted(self.first)[:SHOWN], "reasons": dict(self.reasons)}

    @classmethod
    def from_json(cls, first: Iterable[tuple[int, str]], reasons: dict[str, int]) -> Problems:
        return cls([(int(row), str(reason)) for row, reason in first], Counter(reasons))


VERSION = 1
Graders = Callable[[str], Grader]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Checked:
    """Rows whose answer is no good, beyond those that cannot be asked."""

    bad: dict[int, str]
    problems: Problems


def usable_answer(layout: Format, row: dict[str, Any], kind: str, graders: Graders) -> str:
    """The answer of a row, or `UnusableTask` with what is wrong with it."""
    answer = layout.answer(row)
    if len(answer) > ROW_LIMIT_BYTES:
        raise UnusableTask(f"the answer has more than {ROW_LIMIT_BYTES // 2**20} MB")
    problem = graders(kind).problem(answer)
    if problem:
        raise UnusableTask(problem)
    return answer


def known_check(table: Table, layout: Format, graders: Graders, kinds: tuple[str, ...]) -> Checked | None:
    """What an earlier check of these files with these graders found."""
    known = load_arrays(_name(table, layout, graders, kinds))
    if known is None:
        return None
    arrays, beside = known
    bad = dict(zip(arrays["bad"].tolist(), beside["why"], strict=True))
    return Checked(bad, Problems.from_json(**beside["problems"]))


def check(table: Table, layout: Format, found: Scan, graders: Graders, progress: Progress) -> Checked:
    """Look at every answer; `progress` is told how many rows are done."""
    import numpy as np

    bad: dict[int, str] = {}
    problems = Problems()
    for number, row in _rows(table, layout, progress):
        if not found.usable[number]:
            continue
        try:
            _check_row(layout, row, graders)
        except UnusableTask as error:
            bad[number] = str(error)
            problems.add(number, str(error))
    name = _name(table, layout, graders, found.graders)
    store_arrays(
        name, {"bad": np.array(list(bad), np.int64)}, {"why": list(bad.values()), "problems": problems.as_json()}
    )
    return Checked(bad, problems)


def _check_row(layout: Format, row: dict[str, Any] | Broken, graders: Graders) -> None:
    if isinstance(row, Broken):
        raise UnusableTask(row.reason)
    usable_answer(layout, row, layout.grader or layout.question(row).kind, graders)


def _rows(table: Table, layout: Format, progress: Progress) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    number = 0
    for batch in table.scan(layout.columns):
        for row in rows_of(batch):
            yield number, row
            number += 1
        progress(number)


def _name(table: Table, layout: Format, graders: Graders, kinds: tuple[str, ...]) -> str:
    versions = [[kind, graders(kind).version] for kind in kinds]
    return entry_name("check", VERSION, table.identities(), layout.signature, versions)
