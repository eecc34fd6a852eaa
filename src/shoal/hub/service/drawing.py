"""Which task a unit gets, and the tokens that ask for it.

unit ─► candidates ─► does difficulty allow it, by its row as of the last batch? ─► can it be used? ─► task, prompt
        (`state.draws`)                                                              └─ no: the next candidate
before a decision   tasks are made, read and encoded: that may take seconds  ─► a sheet for each unit
inside of it        sheets are looked up; what is not there is `NotReady`: undone, made, and decided again
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

from shoal.environments import Task, budget_of, dialogue_of, has_dialogues
from shoal.errors import EnvironmentSetupError, ModelError, UnusableTask
from shoal.hub.service.context import Context
from shoal.hub.state import Command, Moment, UnitRow, draws
from shoal.hub.storage import Reader, StaleRow
from shoal.protocol import MAX_PROMPT_TOKENS, DialogueTerms

log = logging.getLogger("shoal.hub")

HELD_OUT = "held_out"
MOST_NAMED = 1000  # unusable tasks that are named in the log; after that they are only counted
MOST_KEPT = 1024  # units whose prompts are kept: more than a request asks for, and those likely to be given out again
MAKING_S = 2.0  # so long one request makes tasks; then it gets those units that are made


class NotReady(StaleRow):
    def __init__(self, first: int | None = None, again: Sequence[UnitRow] = ()) -> None:
        super().__init__(f"the tasks of unit {first} or {[unit.unit for unit in again]} are not made yet")
        self.first, self.again = first, again


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    length_target: int | None = None
    dialogue: DialogueTerms | None = None


@dataclass
class Sheet:
    """What has been made for one unit: names of its candidates in order (None: cannot be used), prompts by name."""

    names: list[str | None] = field(default_factory=list)
    prompts: dict[str, Prompt | Exception] = field(default_factory=dict)


class Drawing:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._named: set[tuple[str, int]] = set()
        self._sheets: OrderedDict[int, Sheet] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()  # who comes second finds made what the first one made
        self._has_dialogues = has_dialogues(context.config.environment)
        self.unusable = 0  # tasks passed over since the start because they cannot be used

    def prepare(self, first: int, count: int) -> None:
        """Make the tasks of the units from `first` on: at least one, and as many more as `MAKING_S` allows."""
        clock = self._context.clock
        until_s = clock.monotonic_s() + MAKING_S
        for unit in range(first, first + count):
            with self._making:
                picked = self._make(unit, self._sheet(unit))
            if picked.task is None or clock.monotonic_s() >= until_s:
                return

    def unit(self, number: int) -> UnitRow | None:
        """A unit with its task, made now; None if no task can be used."""
        with self._making:
            task = self._make(number, self._sheet(number)).task
        return None if task is None else UnitRow(number, task)

    def prepare_again(self, units: Sequence[UnitRow]) -> None:
        for unit in units:
            with self._making:
                sheet = self._sheet(unit.unit)
                if unit.task not in sheet.prompts:
                    sheet.prompts[unit.task] = self._prompt_or_error(unit.unit, unit.task)

    def fresh_units(self, reader: Reader, moment: Moment, count: int) -> tuple[list[UnitRow], list[Command]]:
        """New units in order, up to one that has no task or whose task is not made; and alarms."""
        units, alarms = list[UnitRow](), list[Command]()
        for number in range(moment.progress.next_unit, moment.progress.next_unit + count):
            picked = self._pick(number, self._known(number), reader)
            if picked.unknown is not None:
                if not units:
                    raise NotReady(first=number)
                break
            alarms += draws.alarms(moment, number, picked)
            if picked.task is None:
                break
            units.append(UnitRow(number, picked.task))
        return units, alarms

    def is_made(self, unit: UnitRow) -> bool:
        return unit.task in self._known(unit.unit).prompts

    def prompt_of(self, unit: UnitRow) -> Prompt:
        if isinstance(found := self._known(unit.unit).prompts[unit.task], Exception):
            raise found
        return found

    def _pick(self, unit: int, sheet: Sheet, reader: Reader | None) -> draws.Pick:
        rules, rows, known = self._context.rules.pools, {}, []
        if rules is not None:
            with self._context.storage.read() if reader is None else nullcontext(reader) as own:
                rows = own.task_rows([name for name in sheet.names if name is not None])
        for name in sheet.names:
            is_usable = isinstance(sheet.prompts[name], Prompt) if name in sheet.prompts else None
            known.append(draws.Drawn(name, rows.get(name or ""), is_usable))
        return draws.pick(rules, self._context.config.run.seed, unit, known)

    def _make(self, unit: int, sheet: Sheet) -> draws.Pick:
        tasks, made = self._context.tasks, dict[str, tuple[int, Task]]()
        while True:
            picked = self._pick(unit, sheet, None)
            attempt = picked.unknown
            if attempt is None:
                return picked
            if attempt < len(sheet.names):
                name = sheet.names[attempt] or ""
                sheet.prompts[name] = self._prompt_or_error(unit, name, made.get(name))
                continue
            index = next(islice(draws.candidates(len(tasks), self._context.config.run.seed, unit), attempt, None))
            try:
                task = tasks[index]
            except (EnvironmentSetupError, ModelError) as error:
                self.pass_over("train", index, error)
                sheet.names.append(None)
            else:
                made[task.id] = (index, task)
                sheet.names.append(task.id)

    def _prompt_or_error(self, unit: int, name: str, made: tuple[int, Task] | None = None) -> Prompt | Exception:
        config = self._context.config
        try:
            return self.prompt(made[1] if made else config.environment.task(name), config.run_id, unit)
        except (EnvironmentSetupError, ModelError) as error:
            if made:
                self.pass_over("train", made[0], error)
            return error.with_traceback(None)

    def prompt(self, task: Task, run: str, number: int) -> Prompt:
        """The tokens that ask for a task. A length target follows from `run` and `number`; held-out tasks have the same
        in every run."""
        config = self._context.config
        budget = budget_of(config.environment)
        target = None if budget is None else budget.target(run, number)
        ids = tuple(config.encode(task if budget is None or target is None else budget.ask(task, target)))
        if not ids:
            raise UnusableTask(f"its prompt has no tokens: the tokenizer does not fit the environment (task {task.id})")
        if len(ids) > MAX_PROMPT_TOKENS:
            raise UnusableTask(f"its prompt has {len(ids)} tokens, more than {MAX_PROMPT_TOKENS} (task {task.id})")
        rule = dialogue_of(config.environment, task) if self._has_dialogues else None
        if rule is None:
            return Prompt(ids, target)
        before, after = config.frame
        return Prompt(ids, target, DialogueTerms(tool=rule.tool, max_turns=rule.max_turns, before=before, after=after))

    def pass_over(self, split: str, index: int, error: Exception) -> None:
        with self._lock:
            self.unusable += 1
            is_new = (split, index) not in self._named and len(self._named) < MOST_NAMED
            if is_new:
                self._named.add((split, index))
        if is_new:
            what = "it is left out" if split == HELD_OUT else "another one is drawn"
            log.warning("task number %d of the %s split cannot be used, %s: %s", index, split, what, error)

    def _sheet(self, unit: int) -> Sheet:
        with self._lock:
            sheet = self._sheets.setdefault(unit, Sheet())
            self._sheets.move_to_end(unit)
            while len(self._sheets) > MOST_KEPT:
                self._sheets.popitem(last=False)
            return sheet

    def _known(self, unit: int) -> Sheet:
        with self._lock:
            return self._sheets.get(unit) or Sheet()
