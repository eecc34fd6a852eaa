"""Tasks from a data set: Parquet, JSON lines or Arrow, of any size. Rows are read when they are asked for.

The id of a task is its row's number and its own id (`17/math_17`), so a row that is left out never shifts another.
Rows whose *prompt* cannot be used are known when the data set is opened and are in no split. Whether an *answer* can
be used is known when it is read: the task is then an `UnusableTask`, and the hub draws another one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from shoal.environments.data.checking import Checked, Problems, check, known_check, usable_answer
from shoal.environments.data.scanning import Flags, Numbers, Opened, Splits, open_data, split_one, split_two
from shoal.environments.formats.registry import DatasetOptions
from shoal.environments.generated import Options
from shoal.environments.graders.protocol import DemandingGrader, Grader
from shoal.environments.graders.registry import grader
from shoal.environments.protocol import LazyTasks, Score, Split, Task
from shoal.environments.settings import Ingredient
from shoal.errors import EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.runtime.text import count_of

log = logging.getLogger("shoal.environments.rows")
LONGEST_ID = 100
PROBED = 16
"""Rows of each kind whose answers are looked at when a data set is opened: one good one is enough."""
ELSEWHERE = "held_out"
"""What begins the ids of tasks that come from a held-out file of their own."""


@dataclass(frozen=True)
class StoredTask(Task):
    """A task whose answer is read from the data set when somebody asks for it, and then kept.

    Drawing one looks at its answer, unless the data set has been checked; making one by its id does not.

    >>> StoredTask(id="0", prompt="2+2?", load=lambda: "4").answer
    '4'
    """

    answer: str = field(init=False, repr=False, compare=False)
    load: Callable[[], str] = field(kw_only=True, repr=False, compare=False)

    def __getattr__(self, name: str) -> str:
        if name != "answer":
            raise AttributeError(name)
        value = self.load()
        object.__setattr__(self, "answer", value)
        return value


@dataclass(frozen=True)
class Finding:
    """What is wrong with the rows of one data set; `where` says where a row is."""

    path: Path
    problems: Problems
    where: Callable[[int], str]


class DatasetEnvironment:
    """Implements `Environment`. `problems` are the rows that cannot be asked, `splits` the rows of each split."""

    name: ClassVar[str] = "dataset"
    version: ClassVar[int] = 1

    def __init__(self, options: DatasetOptions, path: Path, held_out_size: int) -> None:
        self.options = options
        self._graders: dict[str, Grader] = {}
        self._main = open_data(path, options)
        rest = options.model_copy(update={"split": "", "keep_solve_rate": None})
        self._other = open_data(options.held_out, rest) if options.held_out else None
        self.problems: Problems = self._main.found.problems
        self.splits = self._divide(held_out_size)
        self.data_digest = self._main.digest
        if self._other is not None:
            both = f"shoal/dataset/two/v1\n{self._main.digest}\n{self._other.digest}"
            self.data_digest = hashlib.sha256(both.encode()).hexdigest()
        self.digest = self._digest(held_out_size)
        self._checked = [
            known_check(opened.table, opened.layout, self._grader, opened.found.graders) for opened in self._opened
        ]
        self._refuse_or_tell_kinds()
        if options.bad_rows == "refuse":
            self._refuse()
        self._tell()

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split) -> Sequence[Task]:
        return LazyTasks(len(self._rows(split)), lambda position: self.drawn(split, position))

    def _rows(self, split: Split) -> Numbers:
        return self.splits.train if split == "train" else self.splits.held_out

    def row_at(self, split: Split, position: int) -> int:
        """Which row of its data set a task is."""
        return int(self._rows(split)[position])

    def drawn(self, split: Split, position: int) -> Task:
        """The task at a position of a split; `UnusableTask` if its answer is no good (which is looked up once)."""
        row, opened = self.row_at(split, position), self._holder(split)
        task = self._task(opened, row)
        if self._checked[self._opened.index(opened)] is None:
            self._answer(opened, row, task.kind)
        return task

    def task(self, task_id: str) -> Task:
        """The task of that id. Its answer is not looked at: the hub has drawn it, and needs its prompt only."""
        opened, number = self._parse(task_id)
        if number is None or number >= opened.table.rows:
            raise EnvironmentSetupError(f"the data {self._main.path} has no task {task_id!r}")
        if not opened.found.usable[number]:
            raise UnusableTask(
                f"row {number} ({opened.table.where(number)}) cannot be used: it has no proper prompt or id"
            )
        task = self._task(opened, number)
        if task.id != task_id:
            raise EnvironmentSetupError(
                f"the data {self._main.path} has no task {task_id!r}; its row {number} is {task.id}"
            )
        return task

    def _parse(self, task_id: str) -> tuple[Opened, int | None]:
        opened, rest = self._main, task_id
        if self._other is not None and task_id.startswith(f"{ELSEWHERE}/"):
            opened, rest = self._other, task_id.removeprefix(f"{ELSEWHERE}/")
        number = rest.partition("/")[0]
        canonical = number.isascii() and number.isdecimal() and len(number) < 16 and str(int(number)) == number
        return opened, int(number) if canonical else None

    def _task(self, opened: Opened, row: int) -> Task:
        layout, checked = opened.layout, self._checked[self._opened.index(opened)]
        if checked is not None and row in checked.bad:
            raise UnusableTask(self._named(opened, row, checked.bad[row]))
        columns = tuple(dict.fromkeys([*([layout.id] if layout.id else []), *layout.asks]))
        try:
            values = opened.table.row(row, columns)
            question = layout.question(values)
        except UnusableTask as error:
            raise UnusableTask(self._named(opened, row, str(error))) from None
        return StoredTask(
            id=self._id(opened, row, values.get(layout.id)), prompt=question.prompt, kind=question.kind,
            history=question.history, load=lambda: self._answer(opened, row, question.kind),
        )  # fmt: skip

    def _id(self, opened: Opened, row: int, own: object) -> str:
        text = "" if own is None else str(own)
        fits = text.isprintable() and 0 < len(text) <= LONGEST_ID
        prefix = f"{ELSEWHERE}/" if opened is self._other else ""
        return f"{prefix}{row}/{text}" if fits else f"{prefix}{row}"

    def _answer(self, opened: Opened, row: int, kind: str) -> str:
        try:
            values = opened.table.row(row, opened.layout.answers)
            return usable_answer(opened.layout, values, kind, self._grader)
        except UnusableTask as error:
            raise UnusableTask(self._named(opened, row, str(error))) from None

    @staticmethod
    def _named(opened: Opened, row: int, reason: str) -> str:
        return f"row {row} ({opened.table.where(row)}) cannot be used: {reason}"

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────

    def score(self, task: Task, completion: str) -> Score:
        """By the grader of the task's kind. An answer that cannot be used is no fault of the completion: no sample."""
        try:
            answer = task.answer
        except UnusableTask as error:
            raise ScoringFailure(str(error)) from error
        return self._grader(task.kind).score(answer, completion)

    def prepare(self) -> None:
        """What the graders of its rows need of the machine."""
        for kind in sorted({kind for opened in self._opened for kind in opened.found.graders}):
            chosen = self._grader(kind)
            if isinstance(chosen, DemandingGrader):
                chosen.prepare()

    def _grader(self, kind: str) -> Grader:
        if kind not in self._graders:
            self._graders[kind] = grader(kind)
        return self._graders[kind]

    # ── what every row is ────────────────────────────────────────────────────────────────────────────────────────

    def prompt_digests(self, split: Split) -> Iterable[bytes]:
        """The digest of every prompt of a split, without reading the prompts again."""
        digests = self._holder(split).found.digests
        return (digests[row].tobytes() for row in self._rows(split).tolist())

    def check(self, progress: Callable[[int, int], None]) -> tuple[Finding, ...]:
        """Look at every answer of every row, of each data set (a held-out file is one of its own).

        `progress` is told how many rows are done, and how many there are.
        """
        return tuple(self._find(number, progress) for number in range(len(self._opened)))

    def _find(self, number: int, progress: Callable[[int, int], None]) -> Finding:
        opened, problems = self._opened[number], Problems()
        known = self._checked[number] or self._look(opened, lambda done: progress(done, opened.table.rows))
        self._checked[number] = known
        problems.add_all(opened.found.problems)
        problems.add_all(known.problems)
        return Finding(opened.path, problems, opened.table.where)

    def where(self, row: int) -> str:
        """Where a row of the data set is, for a person."""
        return self._main.table.where(row)

    @property
    def row_count(self) -> int:
        return self._main.table.rows

    @property
    def description(self) -> str:
        """The data set in a sentence."""
        main = self._main
        return (
            f"{main.path}: {count_of(self.row_count, 'row')} in {count_of(len(main.table.files), 'file')}, format"
            f" {main.layout.name} ({', '.join(main.found.graders)}): {'; '.join(self._counts())};"
            f" data digest {self.data_digest}"
        )

    def _counts(self) -> Iterator[str]:
        """What became of the rows of each data set; the numbers add up. Rows that are known to be bad come first."""
        for opened, checked in zip(self._opened, self._checked, strict=True):
            found, good = opened.found, _good(opened, checked)
            train = int(good[self.splits.train].sum()) if opened is self._main else 0
            held_out = int(good[self.splits.held_out].sum()) if opened is self._holder("held_out") else 0
            outside = int((good & ~found.kept).sum())
            rest = int(good.sum()) - train - held_out - outside
            counts = {
                "to train on": train, "held out": held_out, "outside the band of solve rates": outside,
                "with a held-out question" if opened is self._main else "beyond held_out_size": rest,
                "that cannot be used": len(good) - int(good.sum()),
            }  # fmt: skip
            told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
            yield told if opened is self._main else f"{count_of(opened.table.rows, 'row')} in {opened.path}: {told}"

    def kinds(self) -> Iterator[str]:
        """A line for each kind of rows: how many there are, can be used, are trained on."""
        for opened, checked in zip(self._opened, self._checked, strict=True):
            found, good, trained = opened.found, _good(opened, checked), np.zeros(opened.table.rows, bool)
            trained[self.splits.train if opened is self._main else []] = True
            for number, kind in enumerate(found.kinds):
                rows = found.kind_of == number
                counts = f"{int((good & rows).sum()):,} can be used, {int((good & trained & rows).sum()):,} to train on"
                yield f"{_kind_name(kind)}: {count_of(int(rows.sum()), 'row')}, {counts}"

    def _refuse_or_tell_kinds(self) -> None:
        """A kind of which no row can be used is dropped only by those who say so, and never silently."""
        for opened, unusable in self.useless_kinds():
            if self.options.bad_rows != "skip":
                raise EnvironmentSetupError(
                    f"the data {opened.path} has kinds of tasks of which no row can be used: {'; '.join(unusable)}"
                    ". To use the data without them, set environment.options.bad_rows to skip"
                )
            for kind in unusable:
                log.warning("%s: EVERY row of a kind is left out: %s", opened.path, kind)

    def useless_kinds(self) -> Iterator[tuple[Opened, list[str]]]:
        """The data sets with kinds of which no row can be used: a run refuses them unless it skips bad rows."""
        for opened, checked in zip(self._opened, self._checked, strict=True):
            if unusable := list(self._unusable_kinds(opened, checked)):
                yield opened, unusable

    def _unusable_kinds(self, opened: Opened, checked: Checked | None) -> Iterator[str]:
        """Each with its number of rows and the reason of the first; of answers that nobody checked, a few are read."""
        good = _good(opened, checked)
        for number, kind in enumerate(opened.found.kinds):
            rows = np.flatnonzero(opened.found.kind_of == number)
            usable = rows[good[rows]]
            spread = np.linspace(0, len(usable) - 1, min(PROBED, len(usable))).astype(int)
            looked = usable[spread].tolist()
            if kind and not (looked and (checked or any(not self._wrong(opened, row) for row in looked))):
                first = looked[0] if looked else int(rows[0])
                why = self._wrong(opened, first) or "repeated ids"
                yield f"all {count_of(len(rows), 'row')} of {_kind_name(kind)} ({why})"

    def _wrong(self, opened: Opened, row: int) -> str:
        """What is wrong with a row; empty if nothing is."""
        try:
            self._answer(opened, row, self._task(opened, row).kind)
        except UnusableTask as error:
            return str(error)
        return ""

    @property
    def _opened(self) -> tuple[Opened, ...]:
        return (self._main,) if self._other is None else (self._main, self._other)

    def _holder(self, split: Split) -> Opened:
        return self._other if split == "held_out" and self._other is not None else self._main

    def _look(self, opened: Opened, progress: Callable[[int], None]) -> Checked:
        return check(opened.table, opened.layout, opened.found, self._grader, progress)

    def _divide(self, held_out_size: int) -> Splits:
        found = self._main.found
        if self._other is None:
            splits = split_one(found, held_out_size)
        else:
            splits = split_two(found, self._other.found, held_out_size)
        if not len(splits.train):
            raise EnvironmentSetupError(f"the data {self._main.path} leaves no task to train on: {self._why_none()}")
        return splits

    def _why_none(self) -> str:
        found = self._main.found
        if found.problems.count:
            return found.problems.sentence(self.where)
        if not found.kept.all():
            return f"no row has a solve rate within {self.options.keep_solve_rate}"
        return "all of its questions are held-out ones"

    def _digest(self, held_out_size: int) -> str:
        kinds = sorted({kind for opened in self._opened for kind in opened.found.graders})
        options = self.options.model_dump(mode="json", exclude={"held_out", "bad_rows"})
        content = {
            "name": self.name, "version": self.version, "data": self.data_digest, "options": options,
            "layouts": [opened.layout.signature for opened in self._opened], "held_out_size": held_out_size,
            "graders": {kind: self._grader(kind).version for kind in kinds},
        }  # fmt: skip
        return hashlib.sha256(b"shoal/dataset/v1\n" + json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _refuse(self) -> None:
        for found in self.check(lambda _done, _total: None):
            if found.problems.count:
                raise EnvironmentSetupError(
                    f"{count_of(found.problems.count, 'row')} of the data {found.path} cannot be used:"
                    f' {found.problems.sentence(found.where)} (options.bad_rows = "skip" leaves them out;'
                    f" shoal data check {found.path} lists them)"
                )

    def _tell(self) -> None:
        for opened in self._opened:
            problems, rows = opened.found.problems, opened.table.rows
            if problems.count:
                log.warning(
                    "%s: %d of %s cannot be used and %s left out: %s", opened.path,
                    problems.count, count_of(rows, "row"), "is" if problems.count == 1 else "are",
                    problems.sentence(opened.table.where),
                )  # fmt: skip
        shared = self.splits.shared
        if shared:
            repeat, are = ("1 row repeats", "is") if shared == 1 else (f"{shared:,} rows repeat", "are")
            log.warning("%s: %s a held-out question and %s left out of training", self._main.path, repeat, are)


def _good(opened: Opened, checked: Checked | None) -> Flags:
    """Which rows can be used, as far as is known."""
    good = opened.found.usable.copy()
    good[list(checked.bad if checked else ())] = False
    return good


def _kind_name(kind: str) -> str:
    return f"kind {kind!r}" if kind else "no kind"


def make_dataset(options: Options, given: Ingredient) -> DatasetEnvironment:
    """The environment of a recipe's [environment] section."""
    if not isinstance(options, DatasetOptions):
        raise TypeError(f"a data set takes DatasetOptions, not {type(options).__name__}")
    if given.data is None:
        raise EnvironmentSetupError("environment dataset needs data: a Parquet or JSON lines file, or a folder of them")
    return DatasetEnvironment(options, given.data, given.held_out_size)
