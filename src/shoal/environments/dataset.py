"""Tasks from a data set of any size, Parquet or JSON lines. Rows are read on demand. A task's id is its row number and
its own id (`17/math_17`), so leaving a row out changes no other id. Rows with an unusable *prompt* are in no split. An
*answer* is checked when it is read: a bad one is an `UnusableTask`."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.environments.data import scanning
from shoal.environments.data.scanning import OpenedData, Problems, Splits
from shoal.environments.formats import DatasetOptions, known_kinds
from shoal.environments.graders import GRADERS, TASK_TYPES, Grader, grader
from shoal.environments.protocol import LazyTasks, Score, Split, Task, require_scoring
from shoal.errors import EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.runtime.extensions import check_word, resolve, unpinned
from shoal.runtime.text import count_of

log = logging.getLogger("shoal.environments.rows")
LONGEST_ID = 100
PROBED = 16  # rows of each kind whose answers are checked when a data set is opened: one good one is enough
ELSEWHERE = "held_out/"  # prefix of the ids of tasks from a separate held-out file


@dataclass(frozen=True)
class StoredTask(Task):
    answer: str = field(init=False, repr=False, compare=False)
    load: Callable[[], str] = field(kw_only=True, repr=False, compare=False)

    def __getattr__(self, name: str) -> str:
        if name != "answer":
            raise AttributeError(name)
        value = self.load()
        object.__setattr__(self, "answer", value)
        return value


class DatasetEnvironment:
    """Implements `Environment`. `problems` are the rows that cannot be asked."""

    name: ClassVar[str] = "dataset"
    version: ClassVar[int] = 1

    def __init__(self, options: DatasetOptions, path: Path, held_out_size: int) -> None:
        self.options = options
        self._grader = lru_cache(maxsize=None)(partial(_grader, options.grader))
        self._main = scanning.open_data(path, options)
        rest = options.model_copy(update={"split": "", "keep_solve_rate": None})
        other = scanning.open_data(options.held_out, rest) if options.held_out else None
        self._held_out = other or self._main
        self._opened = (self._main, other) if other else (self._main,)
        self.problems: Problems = self._main.found.problems
        self.splits = self._divide(held_out_size)
        self.data_digest = self._main.digest
        if other is not None:
            both = f"shoal/dataset/two/v1\n{self._main.digest}\n{other.digest}"
            self.data_digest = hashlib.sha256(both.encode()).hexdigest()
        self._kinds = sorted({kind for opened in self._opened for kind in opened.found.graders})
        content = {
            "name": self.name, "version": self.version, "data": self.data_digest, "held_out_size": held_out_size,
            "options": options.model_dump(mode="json", exclude={"held_out", "bad_rows"}),
            "layouts": [opened.layout.signature for opened in self._opened],
            "graders": {kind: self._grader(kind).version for kind in self._kinds},
        }  # fmt: skip
        encoded = json.dumps(content, sort_keys=True).encode()
        self.digest = hashlib.sha256(b"shoal/dataset/v1\n" + encoded).hexdigest()
        for opened in self._opened:
            opened.checked = scanning.check(opened, self._grader)
        # refuse kinds without a usable row unless `bad_rows` is skip; warn of everything that is left out
        for opened, unusable in self.useless_kinds():
            if self.options.bad_rows != "skip":
                advice = "to run without them: --set environment.options.bad_rows=skip"
                raise EnvironmentSetupError(f"{opened.path}: no row of these can be used: {unusable}; {advice}")
            log.warning("%s: EVERY row of a kind is left out: %s", opened.path, unusable)
        for found in self.check(lambda _done, _total: None) if self.options.bad_rows == "refuse" else ():
            if found.problems.count:
                rows, detail = count_of(found.problems.count, "row"), found.problems.sentence(found.where)
                raise EnvironmentSetupError(f"{rows} of the data {found.path} cannot be used: {detail}")
        for opened in self._opened:
            if problems := opened.found.problems.count:
                of, detail = count_of(opened.table.rows, "row"), opened.found.problems.sentence(opened.where)
                log.warning("%s: %d of %s cannot be used and are left out: %s", opened.path, problems, of, detail)
        if self.splits.shared:
            rows = count_of(self.splits.shared, "row")
            log.warning("%s: %s left out of training: a held-out question is repeated", self._main.path, rows)

    def tasks(self, split: Split) -> Sequence[Task]:
        return LazyTasks(len(self._rows(split)), partial(self._drawn, split))

    def _rows(self, split: Split) -> scanning.Numbers:
        return self.splits.train if split == "train" else self.splits.held_out

    def row_at(self, split: Split, position: int) -> int:
        return int(self._rows(split)[position])

    def _drawn(self, split: Split, position: int) -> Task:
        """`UnusableTask` if its answer is bad; the answer is read unless the data set has been checked."""
        row, opened = self.row_at(split, position), self._main if split == "train" else self._held_out
        task = self._task(opened, row)
        if opened.checked is None:
            self._answer(opened, row, task.kind)
        return task

    def columns(self, task_id: str) -> Mapping[str, Any]:
        opened, row = self._place(task_id)
        asked = (opened.layout.plain, *(opened.layout.asks if opened.layout.write else ()))
        return opened.table.row(row, tuple(name for name in opened.table.columns if name not in asked))

    def task(self, task_id: str) -> Task:
        """The answer is not checked: `tasks` did that, and the hub needs the prompt only."""
        opened, row = self._place(task_id)
        if row < opened.table.rows and not opened.found.usable[row]:
            raise UnusableTask(_named(opened, row, "it has no proper prompt or id"))
        task = self._task(opened, row) if row < opened.table.rows else None
        if task is None or task.id != task_id:
            raise EnvironmentSetupError(f"the data {self._main.path} has no task {task_id!r}")
        return task

    def _place(self, task_id: str) -> tuple[OpenedData, int]:
        """The data set and the row that an id names; a row beyond the last if it names none."""
        elsewhere = len(self._opened) > 1 and task_id.startswith(ELSEWHERE)
        opened = self._held_out if elsewhere else self._main
        number = task_id.removeprefix(ELSEWHERE if elsewhere else "").partition("/")[0]
        is_number = number.isascii() and number.isdecimal() and len(number) < 16
        return opened, int(number) if is_number else opened.table.rows

    def _task(self, opened: OpenedData, row: int) -> Task:
        layout = opened.layout
        if opened.checked is not None and row in opened.checked:
            raise UnusableTask(_named(opened, row, opened.checked[row]))
        try:
            values = opened.table.row(row, tuple(dict.fromkeys([*filter(None, [layout.id]), *layout.asks])))
            question = layout.question(values)
        except UnusableTask as error:
            raise UnusableTask(_named(opened, row, str(error))) from None
        prefix, own = "" if opened is self._main else ELSEWHERE, values.get(layout.id)
        text = "" if own is None else str(own)
        fits = text.isprintable() and 0 < len(text) <= LONGEST_ID
        return StoredTask(
            id=f"{prefix}{row}/{text}" if fits else f"{prefix}{row}", prompt=question.prompt, kind=question.kind,
            history=question.history, load=partial(self._answer, opened, row, question.kind),
        )  # fmt: skip

    def _answer(self, opened: OpenedData, row: int, kind: str) -> str:
        try:
            values = opened.table.row(row, opened.layout.answers)
            return scanning.usable_answer(opened.layout, values, kind, self._grader)
        except UnusableTask as error:
            raise UnusableTask(_named(opened, row, str(error))) from None

    def score(self, task: Task, completion: str) -> Score:
        try:
            answer = task.answer
        except UnusableTask as error:
            raise ScoringFailure(str(error)) from error
        return self._grader(task.kind).score(answer, completion)

    def prepare(self) -> None:
        for kind in self._kinds:
            require_scoring(self._grader(kind))

    def prompt_digests(self, split: Split) -> Iterable[bytes]:
        digests = (self._main if split == "train" else self._held_out).found.digests
        return (digests[row].tobytes() for row in self._rows(split).tolist())

    def check(self, progress: Callable[[int, int], None]) -> tuple[OpenedData, ...]:
        for opened in self._opened:
            if opened.checked is None:
                opened.checked = scanning.check(opened, self._grader, progress)
        return self._opened

    @property
    def description(self) -> str:
        table, layout, graders = self._main.table, self._main.layout, ", ".join(self._main.found.graders)
        files = f"{count_of(table.rows, 'row')} in {count_of(len(table.paths), 'file')}"
        detail = f"{self._main.path}: {files}, format {layout.name} ({graders}): {'; '.join(self._counts())}"
        return f"{detail}; data digest {self.data_digest}"

    def _counts(self) -> Iterator[str]:
        """How many rows of each data set are in which split or left out; the numbers add up."""
        for opened in self._opened:
            good = opened.good()
            train = int(good[self.splits.train].sum()) if opened is self._main else 0
            held_out = int(good[self.splits.held_out].sum()) if opened is self._held_out else 0
            outside = int((good & ~opened.found.kept).sum())
            counts = {
                "to train on": train, "held out": held_out, "outside the band of solve rates": outside,
                "with a held-out question" if opened is self._main else "beyond held_out_size":
                    int(good.sum()) - train - held_out - outside,
                "that cannot be used": len(good) - int(good.sum()),
            }  # fmt: skip
            detail = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
            yield detail if opened is self._main else f"{count_of(opened.table.rows, 'row')} in {opened.path}: {detail}"

    def kinds(self) -> Iterator[str]:
        for opened in self._opened:
            good, trained = opened.good(), np.zeros(opened.table.rows, bool)
            trained[self.splits.train if opened is self._main else []] = True
            for number, kind in enumerate(opened.found.kinds):
                rows = opened.found.kind_of == number
                counts = f"{int((good & rows).sum()):,} can be used, {int((good & trained & rows).sum()):,} to train on"
                yield f"{f'kind {kind!r}' if kind else 'no kind'}: {count_of(int(rows.sum()), 'row')}, {counts}"

    def useless_kinds(self) -> Iterator[tuple[OpenedData, str]]:
        """Data sets with kinds of which no row can be used, and why; if answers are unchecked, a few are read."""
        for opened in self._opened:
            good, detail = opened.good(), list[str]()
            for number, kind in enumerate(opened.found.kinds):
                rows = np.flatnonzero(opened.found.kind_of == number)
                usable = rows[good[rows]]
                looked = usable[np.linspace(0, len(usable) - 1, min(PROBED, len(usable))).astype(int)].tolist()
                fine = looked and (opened.checked is not None or any(not self._wrong(opened, row) for row in looked))
                if kind and not fine:
                    why = self._wrong(opened, looked[0] if looked else int(rows[0]))
                    detail.append(f"kind {kind!r}, {count_of(len(rows), 'row')} ({why})")
            if detail:
                yield opened, "; ".join(detail) + known_kinds("".join(detail))

    def _wrong(self, opened: OpenedData, row: int) -> str:
        try:
            self._answer(opened, row, self._task(opened, row).kind)
        except UnusableTask as error:
            return str(error)
        return ""

    def _divide(self, held_out_size: int) -> Splits:
        found = self._main.found
        splits = scanning.split(found, self._held_out.found if len(self._opened) > 1 else None, held_out_size)
        if len(splits.train):
            return splits
        why = "all of its questions are held-out ones"
        if found.problems.count:
            why = found.problems.sentence(self._main.where)
            why += known_kinds(why)
        elif not found.kept.all():
            why = f"no row has a solve rate within {self.options.keep_solve_rate}"
        raise EnvironmentSetupError(f"the data {self._main.path} leaves no task to train on: {why}")


def _grader(chosen: str, name: str) -> Grader:
    """A grader by its name. Only the recipe's own word may name the owner's code, never a row."""
    if name != chosen or name in (*GRADERS, *TASK_TYPES):
        return grader(name)
    try:
        found = resolve("environment.options.grader", "grader", check_word("grader", name, GRADERS))()
    except ValueError as error:
        raise EnvironmentSetupError(str(error)) from None
    if not isinstance(found, Grader):
        lacks = "has not all of name, version, problem(answer) and score(answer, completion)"
        raise EnvironmentSetupError(f"environment.options.grader: what {unpinned(name)} gives {lacks}")
    return found


def _named(opened: OpenedData, row: int, reason: str) -> str:
    return f"row {row} ({opened.where(row)}) cannot be used: {reason}"
