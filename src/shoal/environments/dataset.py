"""Tasks from a data set: Parquet or JSON lines, of any size. Rows are read when they are asked for.

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
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from shoal.environments.data import scanning
from shoal.environments.data.scanning import Numbers, Problems, Splits
from shoal.environments.formats import DatasetOptions
from shoal.environments.graders.registry import DemandingGrader, grader
from shoal.environments.protocol import LazyTasks, Score, Split, Task
from shoal.errors import EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.runtime.text import count_of

log = logging.getLogger("shoal.environments.rows")
LONGEST_ID = 100
PROBED = 16
"""Rows of each kind whose answers are looked at when a data set is opened: one good one is enough."""


@dataclass(frozen=True)
class StoredTask(Task):
    """A task whose answer is read from the data set when somebody asks for it, and then kept.

    Drawing one looks at its answer, unless the data set has been checked; making one by its id does not.
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
        self._grader = lru_cache(maxsize=None)(grader)
        self._data = scanning.open_data(path, options)
        self.problems: Problems = self._data.found.problems
        self.splits = self._divide(held_out_size)
        self.data_digest = self._data.digest
        self._kinds = self._data.found.graders
        content = {
            "name": self.name, "version": self.version, "data": self.data_digest, "held_out_size": held_out_size,
            "options": options.model_dump(mode="json", exclude={"bad_rows"}), "layout": self._data.layout.signature,
            "graders": {kind: self._grader(kind).version for kind in self._kinds},
        }  # fmt: skip
        said = json.dumps(content, sort_keys=True).encode()
        self.digest = hashlib.sha256(b"shoal/dataset/v1\n" + said).hexdigest()
        self._data.checked = scanning.known_check(self._data, self._grader)
        self._refuse_or_tell()

    def tasks(self, split: Split) -> Sequence[Task]:
        return LazyTasks(len(self._rows(split)), lambda position: self._drawn(split, position))

    def _rows(self, split: Split) -> Numbers:
        return self.splits.train if split == "train" else self.splits.held_out

    def row_at(self, split: Split, position: int) -> int:
        return int(self._rows(split)[position])

    def _drawn(self, split: Split, position: int) -> Task:
        """`UnusableTask` if its answer is no good (which is looked up once)."""
        row = self.row_at(split, position)
        task = self._task(row)
        if self._data.checked is None:
            self._answer(row, task.kind)
        return task

    def task(self, task_id: str) -> Task:
        """The task of that id. Its answer is not looked at: the hub has drawn it, and needs its prompt only."""
        number = task_id.partition("/")[0]
        canonical = number.isascii() and number.isdecimal() and len(number) < 16 and str(int(number)) == number
        if not canonical or int(number) >= self.row_count:
            raise EnvironmentSetupError(f"the data {self._data.path} has no task {task_id!r}")
        row = int(number)
        if not self._data.found.usable[row]:
            raise UnusableTask(self._named(row, "it has no proper prompt or id"))
        task = self._task(row)
        if task.id != task_id:
            raise EnvironmentSetupError(
                f"the data {self._data.path} has no task {task_id!r}; its row {row} is {task.id}"
            )
        return task

    def _task(self, row: int) -> Task:
        layout, checked = self._data.layout, self._data.checked
        if checked is not None and row in checked.bad:
            raise UnusableTask(self._named(row, checked.bad[row]))
        columns = tuple(dict.fromkeys([*([layout.id] if layout.id else []), *layout.asks]))
        try:
            values = self._data.table.row(row, columns)
            question = layout.question(values)
        except UnusableTask as error:
            raise UnusableTask(self._named(row, str(error))) from None
        own = values.get(layout.id)
        text = "" if own is None else str(own)
        fits = text.isprintable() and 0 < len(text) <= LONGEST_ID
        return StoredTask(
            id=f"{row}/{text}" if fits else f"{row}", prompt=question.prompt, kind=question.kind,
            history=question.history, load=lambda: self._answer(row, question.kind),
        )  # fmt: skip

    def _answer(self, row: int, kind: str) -> str:
        try:
            values = self._data.table.row(row, self._data.layout.answers)
            return scanning.usable_answer(self._data.layout, values, kind, self._grader)
        except UnusableTask as error:
            raise UnusableTask(self._named(row, str(error))) from None

    def score(self, task: Task, completion: str) -> Score:
        """By the grader of the task's kind. An answer that cannot be used is no fault of the completion: unscored."""
        try:
            answer = task.answer
        except UnusableTask as error:
            raise ScoringFailure(str(error)) from error
        return self._grader(task.kind).score(answer, completion)

    def prepare(self) -> None:
        for kind in self._kinds:
            chosen = self._grader(kind)
            if isinstance(chosen, DemandingGrader):
                chosen.prepare()

    def prompt_digests(self, split: Split) -> Iterable[bytes]:
        """The digest of every prompt of a split, without reading the prompts again."""
        return (self._data.found.digests[row].tobytes() for row in self._rows(split).tolist())

    def check(self, progress: Callable[[int, int], None]) -> Finding:
        """Look at every answer; `progress` is told how many rows are done, and how many there are."""
        data = self._data
        data.checked = data.checked or scanning.check(data, self._grader, progress)
        return Finding(data.path, data.found.problems.joined(data.checked.problems), data.table.where)

    @property
    def row_count(self) -> int:
        return self._data.table.rows

    def where(self, row: int) -> str:
        return self._data.table.where(row)

    @property
    def description(self) -> str:
        """Which data it is and what became of its rows; the numbers add up, and rows known to be bad come first."""
        data, good = self._data, self._data.good()
        train, held_out = (int(good[rows].sum()) for rows in (self.splits.train, self.splits.held_out))
        outside = int((good & ~data.found.kept).sum())
        counts = {
            "to train on": train, "held out": held_out, "outside the band of solve rates": outside,
            "with a held-out question": int(good.sum()) - train - held_out - outside,
            "that cannot be used": len(good) - int(good.sum()),
        }  # fmt: skip
        told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        return (
            f"{data.path}: {count_of(data.table.rows, 'row')} in {count_of(len(data.table.files), 'file')}, format"
            f" {data.layout.name} ({', '.join(data.found.graders)}): {told}; data digest {self.data_digest}"
        )

    def kinds(self) -> Iterator[str]:
        """A line for each kind of rows: how many there are, can be used, are trained on."""
        found, good, trained = self._data.found, self._data.good(), np.zeros(self.row_count, bool)
        trained[self.splits.train] = True
        for number, kind in enumerate(found.kinds):
            rows = found.kind_of == number
            counts = f"{int((good & rows).sum()):,} can be used, {int((good & trained & rows).sum()):,} to train on"
            yield f"{_kind_name(kind)}: {count_of(int(rows.sum()), 'row')}, {counts}"

    def useless_kinds(self) -> Iterator[str]:
        """Kinds of which no row can be used, which a run refuses unless it skips bad rows: each with its number of rows
        and the reason of the first; of answers that nobody checked, a few are read."""
        good, found = self._data.good(), self._data.found
        for number, kind in enumerate(found.kinds):
            rows = np.flatnonzero(found.kind_of == number)
            usable = rows[good[rows]]
            spread = np.linspace(0, len(usable) - 1, min(PROBED, len(usable))).astype(int)
            looked = usable[spread].tolist()
            if kind and not (looked and (self._data.checked or any(not self._wrong(row) for row in looked))):
                why = self._wrong(looked[0] if looked else int(rows[0])) or "repeated ids"
                yield f"all {count_of(len(rows), 'row')} of {_kind_name(kind)} ({why})"

    def _wrong(self, row: int) -> str:
        try:
            self._answer(row, self._task(row).kind)
        except UnusableTask as error:
            return str(error)
        return ""

    def _divide(self, held_out_size: int) -> Splits:
        found = self._data.found
        splits = scanning.split(found, held_out_size)
        if len(splits.train):
            return splits
        why = "all of its questions are held-out ones"
        if found.problems.count:
            why = found.problems.sentence(self.where)
        elif not found.kept.all():
            why = f"no row has a solve rate within {self.options.keep_solve_rate}"
        raise EnvironmentSetupError(f"the data {self._data.path} leaves no task to train on: {why}")

    def _refuse_or_tell(self) -> None:
        """A kind of which no row can be used is dropped only by those who say so, and never silently."""
        path, unusable = self._data.path, list(self.useless_kinds())
        if unusable and self.options.bad_rows != "skip":
            raise EnvironmentSetupError(
                f"the data {path} has kinds of tasks of which no row can be used: {'; '.join(unusable)}"
                ". To use the data without them, set environment.options.bad_rows to skip"
            )
        for kind in unusable:
            log.warning("%s: EVERY row of a kind is left out: %s", path, kind)
        problems = self.problems
        if self.options.bad_rows == "refuse":
            problems = self.check(lambda _done, _total: None).problems
            if problems.count:
                raise EnvironmentSetupError(
                    f"{count_of(problems.count, 'row')} of the data {path} cannot be used:"
                    f' {problems.sentence(self.where)} (options.bad_rows = "skip" leaves them out;'
                    f" shoal data check {path} lists them)"
                )
        if problems.count:
            of, told = count_of(self.row_count, "row"), problems.sentence(self.where)
            log.warning("%s: %d of %s left out, for they cannot be used: %s", path, problems.count, of, told)
        if self.splits.shared:
            rows = count_of(self.splits.shared, "row")
            log.warning("%s: %s left out of training: a held-out question is repeated", path, rows)

    def _named(self, row: int, reason: str) -> str:
        return f"row {row} ({self.where(row)}) cannot be used: {reason}"


def _kind_name(kind: str) -> str:
    return f"kind {kind!r}" if kind else "no kind"
