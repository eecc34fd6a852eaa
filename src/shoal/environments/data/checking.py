"""Rows that cannot be used, and the deep check: is every answer one that its grader can use?

The check reads the whole data set, so it is done on request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
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

VERSION = 1
SHOWN = 20
MOST_REASONS = 1000
Graders = Callable[[str], Grader]


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

    def lines(self, where: Callable[[int], str], most: int = SHOWN) -> list[str]:
        """One line for each of the first rows, and one for the rest."""
        shown = sorted(self.first)[:most]
        lines = [f"row {row} ({where(row)}): {reason}" for row, reason in shown]
        return [*lines, *([f"and {self.count - len(shown):,} more"] if self.count > len(shown) else [])]

    def sentence(self, where: Callable[[int], str]) -> str:
        """The first few in one sentence: `row 7 (a.jsonl line 8): prompt is empty; row 9 …; and 12 more`."""
        return "; ".join(self.lines(where, 3))

    def as_json(self) -> dict[str, object]:
        return {"first": sorted(self.first)[:SHOWN], "reasons": dict(self.reasons)}

    @classmethod
    def from_json(cls, first: Iterable[tuple[int, str]], reasons: dict[str, int]) -> Problems:
        return cls([(int(row), str(reason)) for row, reason in first], Counter(reasons))


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


def check(table: Table, layout: Format, found: Scan, graders: Graders, progress: Callable[[int], None]) -> Checked:
    """Look at every answer; `progress` is told how many rows are done."""
    import numpy as np

    bad, problems, first = dict[int, str](), Problems(), 0
    for batch in table.scan(layout.columns):
        for number, row in enumerate(rows_of(batch), first):
            try:
                if found.usable[number] and isinstance(row, Broken):
                    raise UnusableTask(row.reason)
                if found.usable[number] and not isinstance(row, Broken):
                    usable_answer(layout, row, layout.grader or layout.question(row).kind, graders)
            except UnusableTask as error:
                bad[number] = str(error)
                problems.add(number, str(error))
        first += len(next(iter(batch.values())))
        progress(first)
    name = _name(table, layout, graders, found.graders)
    beside = {"why": list(bad.values()), "problems": problems.as_json()}
    store_arrays(name, {"bad": np.array(list(bad), np.int64)}, beside)
    return Checked(bad, problems)


def _name(table: Table, layout: Format, graders: Graders, kinds: tuple[str, ...]) -> str:
    versions = [[kind, graders(kind).version] for kind in kinds]
    return entry_name("check", VERSION, table.identities(), layout.signature, versions)
