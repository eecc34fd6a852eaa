"""Scans every row before the first task is drawn: can it be asked, and which question is it? `check` also reads every
answer, on request.

    path ─► files ─► table ─► format ─► scan (of the question columns) ─► OpenedData ─► Splits without common questions
                 └─► digest (in parallel) ─────────────────────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.environments.data.cache import data_digest, entry_name, load_arrays, store_arrays
from shoal.environments.data.locating import locate
from shoal.environments.data.readers import ROW_LIMIT_BYTES, Broken, DataTable, rows_of, values_of
from shoal.environments.formats import DatasetOptions, Format, fit
from shoal.environments.graders import GRADERS, TASK_TYPES, Grader
from shoal.environments.protocol import DIGEST_BYTES, question_digest
from shoal.errors import EnvironmentSetupError, UnusableTask

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Graders = Callable[[str], Grader]
Checked = dict[int, str]  # row with a bad answer → why
VERSION, CHECK_VERSION = 7, 2
MOST_KINDS = MOST_REASONS = 1000
SHOWN = 20
SLACK = 1e-9  # for solve rates that were rounded
LARGEST_SHARE = 5  # at most a fifth of the questions is held out
TOO_LARGE = f"it has more than {ROW_LIMIT_BYTES // 2**20} MB"


@dataclass
class Problems:
    first: list[tuple[int, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.reasons.total()

    def add(self, row: int, reason: str) -> None:
        """Add a row, in any order; those with the lowest numbers are shown."""
        known = reason if reason in self.reasons or len(self.reasons) < MOST_REASONS else "other reasons"
        self.reasons[known] += 1
        self.first.append((row, reason))
        if len(self.first) > 4 * SHOWN:
            self.first = sorted(self.first)[:SHOWN]

    def joined(self, others: Problems) -> Problems:
        return Problems(sorted({*self.first, *others.first})[:SHOWN], self.reasons + others.reasons)

    def lines(self, where: Callable[[int], str], most: int = SHOWN) -> list[str]:
        shown = sorted(self.first)[:most]
        lines = [f"row {row} ({where(row)}): {reason}" for row, reason in shown]
        return [*lines, *([f"and {self.count - len(shown):,} more"] if self.count > len(shown) else [])]

    def sentence(self, where: Callable[[int], str]) -> str:
        return "; ".join(self.lines(where, 3))

    def as_json(self) -> dict[str, object]:
        return {"first": sorted(self.first)[:SHOWN], "reasons": dict(self.reasons)}

    @classmethod
    def from_json(cls, first: Iterable[tuple[int, str]], reasons: dict[str, int]) -> Problems:
        return cls([(int(row), str(reason)) for row, reason in first], Counter(reasons))


@dataclass(frozen=True)
class Scan:
    """One entry per row: the prompt's digest, whether it can be asked, whether its solve rate is in the band, and its
    kind as an index of `kinds` ("" if it has none). `graders` are those that the rows need."""

    digests: np.ndarray[Any, np.dtype[np.uint8]]
    usable: Flags
    kept: Flags
    kind_of: np.ndarray[Any, np.dtype[np.int32]]
    kinds: tuple[str, ...]
    graders: tuple[str, ...]
    problems: Problems

    @property
    def keys(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The first 64 bits of each digest: two of a million questions share them with odds of 1 to 10^7."""
        return np.ascontiguousarray(self.digests[:, :8]).view(">u8").ravel().astype(np.uint64)


@dataclass(eq=False)
class OpenedData:
    """A data set that can be read. `checked`: the bad answers, after all answers were checked."""

    path: Path
    table: DataTable
    layout: Format
    found: Scan
    digest: str
    checked: Checked | None = None

    def good(self) -> Flags:
        good = self.found.usable.copy()
        good[list(self.checked or ())] = False
        return good

    @property
    def problems(self) -> Problems:
        answers = Problems()
        for row, reason in (self.checked or {}).items():
            answers.add(row, reason)
        return self.found.problems.joined(answers)

    def where(self, row: int) -> str:
        return self.table.where(row)


def open_data(path: Path, options: DatasetOptions) -> OpenedData:
    """Open the data set at `path`. Its columns are checked before the rows are read, which may take long."""
    table = DataTable(locate(path, options.split))
    layout, rates = fit(table.columns, options), ""
    if options.keep_solve_rate is not None:
        usual = [name for name in table.columns if name.startswith("solve_rate")]
        rates, *more = [options.solve_rate] if options.solve_rate else usual or [""]
        if more or rates not in table.columns:
            found = ", ".join([rates, *more]) or "none (by its name, solve_rate…)"
            detail = f"there are {', '.join(table.columns)}: set environment.options.solve_rate"
            raise EnvironmentSetupError(f"keep_solve_rate needs one column of solve rates, not {found}; {detail}")
    table.agree([*layout.columns, *([rates] if rates else [])])
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(data_digest, table.paths)
        return OpenedData(path, table, layout, scan(table, layout, rates, options.keep_solve_rate), digest.result())


def scan(table: DataTable, layout: Format, rates: str, band: tuple[float, float] | None) -> Scan:
    chosen = band and [rates, *band]
    name = entry_name("scan", VERSION, table.identities(), layout.signature, chosen, sorted({*GRADERS, *TASK_TYPES}))
    known = load_arrays(name)
    if known is not None and len(known[0]["usable"]) == table.rows:
        arrays, beside = known
        problems = Problems.from_json(**beside["problems"])
        return Scan(**arrays, kinds=tuple(beside["kinds"]), graders=tuple(beside["graders"]), problems=problems)
    band = band or (0.0, 1.0)
    problems, graders, kinds = Problems(), set[str](), dict[str, int]()
    digests, kept, kind_of = bytearray(), list[float](), list[int]()
    columns = dict.fromkeys([*layout.asks, *filter(None, [rates])])
    for batch in table.scan(tuple(columns)):
        first, size = len(kind_of), len(batch[layout.asks[0]])
        for number, row in enumerate(rows_of(batch), first):
            digest, rate = bytes(DIGEST_BYTES), band[0]  # no question has this digest
            try:
                rate = _rate(row, rates) if rates else rate
                if isinstance(row, Broken):
                    raise UnusableTask(row.reason)
                question = layout.question(row)
                if len(question.prompt) > ROW_LIMIT_BYTES:
                    raise UnusableTask(f"the prompt is too large: {TOO_LARGE}")
                digest = question_digest(question.prompt, question.history)
            except UnusableTask as error:
                problems.add(number, str(error))
            digests += digest
            kept.append(rate)
        kind_values = values_of(batch[layout.kinds]) if layout.kinds else [layout.grader] * size
        for kind in {kind if isinstance(kind, str) else str(kind)[:100] for kind in kind_values}:
            with suppress(UnusableTask):  # of unusable rows, too: the environment's digest names all graders
                graders.add(layout.grader or layout.judge(kind))
        for kind in (value[:100] if isinstance(value, str) else "" for value in kind_values):
            counted = kind if kind in kinds or len(kinds) < MOST_KINDS else ""
            kind_of.append(kinds.setdefault(counted, len(kinds)))
    matrix = np.frombuffer(bytes(digests), np.uint8).reshape(-1, DIGEST_BYTES)
    within = (np.array(kept) >= band[0] - SLACK) & (np.array(kept) <= band[1] + SLACK)
    usable, numbers = np.asarray(matrix.any(axis=1)), np.array(kind_of, np.int32)
    found = Scan(matrix, usable, within, numbers, tuple(kinds), tuple(sorted(graders)), problems)
    beside = {"problems": problems.as_json(), "kinds": found.kinds, "graders": found.graders}
    store_arrays(name, {key: getattr(found, key) for key in ("digests", "usable", "kept", "kind_of")}, beside)
    return found


def _rate(row: dict[str, Any] | Broken, column: str) -> float:
    """The solve rate, also from text; without one NaN, which is in no band."""
    value = np.nan if isinstance(row, Broken) or row[column] in (None, "") else row[column]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UnusableTask(f"{column} is {str(value)[:40]!r}, not a solve rate") from None


@dataclass(frozen=True)
class Splits:
    """Row numbers of each split, ascending. `shared` rows are in neither split: they repeat a held-out question."""

    train: Numbers
    held_out: Numbers
    shared: int


def split(found: Scan, other: Scan | None, held_out_size: int) -> Splits:
    """Hold out the questions with the lowest digests, each by its first row, or the first `held_out_size` of another
    data set. Rows that repeat a held-out question, or any question of the other data set, are in no split."""
    rows = np.flatnonzero(found.usable & found.kept)
    keys, size = found.keys[rows], 0
    if other is not None:
        aside, held_out = np.isin(keys, other.keys[other.usable]), np.flatnonzero(other.usable)[:held_out_size]
    else:
        questions, firsts = np.unique(keys, return_index=True)
        size = min(held_out_size, len(questions) // LARGEST_SHARE)
        aside, held_out = np.isin(keys, questions[:size]), np.sort(rows[firsts[:size]])
    return Splits(train=rows[~aside], held_out=held_out, shared=int(aside.sum()) - size)


def usable_answer(layout: Format, row: dict[str, Any], kind: str, graders: Graders) -> str:
    answer = layout.answer(row)
    if len(answer) > ROW_LIMIT_BYTES:
        raise UnusableTask(f"the answer is too large: {TOO_LARGE}")
    if problem := graders(kind).problem(answer):
        raise UnusableTask(problem)
    return answer


def check(opened: OpenedData, graders: Graders, progress: Callable[[int, int], None] | None = None) -> Checked | None:
    """The bad answers, from the cache or by reading all. Without `progress` (done, all) nothing is read: then None."""
    versions = [[kind, graders(kind).version] for kind in opened.found.graders]
    name = entry_name("check", CHECK_VERSION, opened.table.identities(), opened.layout.signature, versions)
    if known := load_arrays(name):
        arrays, beside = known
        return dict(zip(arrays["bad"].tolist(), beside["why"], strict=True))
    if progress is None:
        return None
    bad, first, layout = dict[int, str](), 0, opened.layout
    for batch in opened.table.scan(layout.columns):
        for number, row in enumerate(rows_of(batch), first):
            if opened.found.usable[number]:
                try:
                    if isinstance(row, Broken):
                        raise UnusableTask(row.reason)
                    usable_answer(layout, row, layout.grader or layout.question(row).kind, graders)
                except UnusableTask as error:
                    bad[number] = str(error)
        first += len(next(iter(batch.values())))
        progress(first, opened.table.rows)
    store_arrays(name, {"bad": np.array(list(bad), np.int64)}, {"why": [*bad.values()]})
    return bad
