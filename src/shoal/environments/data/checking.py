"""The deep check: is every answer one that its grader can use? Reads the whole data set, so it is done on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.environments.data.cache import entry_name, load_arrays, store_arrays
from shoal.environments.data.problems import Problems
from shoal.environments.data.scanning import Scan, rows_of
from shoal.environments.data.source import ROW_LIMIT_BYTES, Broken
from shoal.environments.data.table import Table
from shoal.environments.formats.protocol import Format
from shoal.environments.graders.protocol import Grader
from shoal.errors import UnusableTask

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
