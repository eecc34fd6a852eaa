"""Which task a unit gets, and the tokens that ask for it.

    unit ─► candidates (`state.draws`) ─► does difficulty allow it? (`state.pools`) ─► can it be used? ─► task, prompt
                                            (its row as of the last batch)              └─ no: said once, counted, the
                                                                                           next candidate
    before a decision   tasks are made, read and encoded: that may take seconds  ─► a sheet for each unit
    inside of it        sheets are looked up; what is not there is `NotReady`: undone, prepared, decided again

Both follow from the run's seed, its data, and what the last batch says about the tasks: anyone can draw them again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.environments import Task, budget_of, dialogue_of, has_dialogues
from shoal.errors import EnvironmentSetupError, ModelError, UnusableTask
from shoal.hub.service.context import Context
from shoal.hub.state import draws, pools
from shoal.hub.state.commands import Command
from shoal.hub.state.rows import Moment, TaskRow, UnitRow
from shoal.hub.storage import Reader
from shoal.protocol import DialogueTerms
from shoal.protocol.lease import MAX_PROMPT_TOKENS

log = logging.getLogger("shoal.hub")

HELD_OUT = "held_out"
MOST_NAMED = 1000
"""Unusable tasks that are named in the log; after that they are only counted."""
MOST_KEPT = 1024
"""Units that tasks are kept for until they are leased: more than any request asks for."""
MAKING_S = 2.0
"""So long one request makes tasks; if it has not got all that it asked for by then, it gets fewer units."""


class NotReady(Exception):
    """A decision needs tasks that have not been made yet: those of new units from `first` on, or those of `again`."""

    def __init__(self, first: int | None = None, again: Sequence[UnitRow] = ()) -> None:
        super().__init__(f"the tasks of unit {first} or {[unit.unit for unit in again]} are not made yet")
        self.first, self.again = first, tuple(again)


@dataclass(frozen=True)
class Prompt:
    """What a unit asks: the tokens, the length that they name, and how the environment answers."""

    ids: tuple[int, ...]
    length_target: int | None = None
    dialogue: DialogueTerms | None = None


@dataclass
class Sheet:
    """What has been made for one unit: names of its candidates by attempt (None: cannot be used), prompts by name."""

    names: dict[int, str | None] = field(default_factory=dict)
    tasks: dict[str, tuple[int, Task]] = field(default_factory=dict)
    prompts: dict[str, Prompt | Exception] = field(default_factory=dict)


class Drawing:
    """Draws tasks for the units of a run. What is slow is `prepare` and `prepare_again`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._named: set[tuple[str, int]] = set()
        self._sheets: OrderedDict[int, Sheet] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()  # who comes second finds made what the first one made
        self._has_dialogues = has_dialogues(context.config.environment)
        self.unusable = 0  # tasks passed over since the start because they cannot be used

    # ── before a decision ────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, first: int, count: int) -> None:
        """Make the tasks of the units from `first` on; at least one, and as many more as `MAKING_S` allows."""
        clock = self._context.clock
        until_s = clock.monotonic_s() + MAKING_S
        for unit in range(first, first + count):
            with self._making:
                sheet = self._sheet(unit)
                picked = self._pick(unit, sheet, self._row, makes=True)
                sheet.tasks.clear()
            if picked.task is None or clock.monotonic_s() >= until_s:
                return

    def prepare_again(self, units: Sequence[UnitRow]) -> None:
        """Make the prompts of units that have their tasks."""
        for unit in units:
            with self._making:
                sheet = self._sheet(unit.unit)
                if unit.task not in sheet.prompts:
                    sheet.prompts[unit.task] = self._made_again(unit)

    def forget(self, units: Sequence[int]) -> None:
        """These units are leased: what was made for them is in their leases."""
        with self._lock:
            for unit in units:
                self._sheets.pop(unit, None)

    # ── inside of it ─────────────────────────────────────────────────────────────────────────────────────────────

    def task_of(self, reader: Reader, moment: Moment, unit: int) -> tuple[str | None, list[Command]]:
        """The task of a new unit, or None if none can be used; and the alarm that this may deserve."""
        picked = self._pick(unit, self._known(unit), reader.task_row, makes=False)
        return picked.task, pools.alarms(moment, unit, picked)

    def prompt_of(self, unit: UnitRow) -> Prompt:
        """What a unit asks; raises what is wrong with it if nothing can be asked any more."""
        found = self._known(unit.unit).prompts.get(unit.task)
        if found is None:
            raise NotReady(again=[unit])
        if isinstance(found, Exception):
            raise found
        return found

    def is_ready(self, unit: UnitRow) -> bool:
        """Whether the prompt of a unit that has its task is made."""
        return unit.task in self._known(unit.unit).prompts

    # ── how ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def held_out_prompt(self, task: Task, index: int) -> Prompt:
        """The tokens that ask for a held-out task; the length that they name is the same in every run."""
        return self._prompt(task, HELD_OUT, index)

    def pass_over(self, split: str, index: int, error: Exception) -> None:
        """Count a task that cannot be used; the first time, say so."""
        with self._lock:
            self.unusable += 1
            is_new = (split, index) not in self._named and len(self._named) < MOST_NAMED
            if is_new:
                self._named.add((split, index))
        if is_new:
            what = "it is left out" if split == HELD_OUT else "another one is drawn"
            log.warning("task number %d of the %s split cannot be used, %s: %s", index, split, what, error)

    def _pick(self, unit: int, sheet: Sheet, row_of: Callable[[str], TaskRow | None], makes: bool) -> pools.Pick:
        def usable(task: str) -> bool:
            if task not in sheet.prompts:
                if not makes:
                    raise NotReady(unit)
                sheet.prompts[task] = self._made(sheet, unit, task)
            return isinstance(sheet.prompts[task], Prompt)

        dice = (self._context.config.run.seed, unit)
        return pools.pick(self._context.rules.pools, dice, self._names(unit, sheet, makes), row_of, usable)

    def _names(self, unit: int, sheet: Sheet, makes: bool) -> Iterator[str | None]:
        tasks = self._context.tasks
        for attempt, index in enumerate(draws.candidates(len(tasks), self._context.config.run.seed, unit)):
            if attempt not in sheet.names:
                if not makes:
                    raise NotReady(unit)
                sheet.names[attempt] = self._name(sheet, index)
            yield sheet.names[attempt]

    def _name(self, sheet: Sheet, index: int) -> str | None:
        try:
            task = self._context.tasks[index]
        except (EnvironmentSetupError, ModelError) as error:
            self.pass_over("train", index, error)
            return None
        sheet.tasks[task.id] = (index, task)
        return task.id

    def _made(self, sheet: Sheet, unit: int, name: str) -> Prompt | Exception:
        index, task = sheet.tasks.get(name, (None, None))
        try:
            return self._prompt(task or self._context.config.environment.task(name), self._context.config.run_id, unit)
        except (EnvironmentSetupError, ModelError) as error:
            if index is not None:
                self.pass_over("train", index, error)
            return error.with_traceback(None)

    def _made_again(self, unit: UnitRow) -> Prompt | Exception:
        return self._made(Sheet(), unit.unit, unit.task)

    def _prompt(self, task: Task, run: str, number: int) -> Prompt:
        config = self._context.config
        budget = budget_of(config.environment)
        target = None if budget is None else budget.target(run, number)
        asked = task if budget is None or target is None else budget.ask(task, target)
        ids = tuple(config.encode(asked))
        if not ids:
            raise UnusableTask(f"its prompt has no tokens: the tokenizer does not fit the environment (task {task.id})")
        if len(ids) > MAX_PROMPT_TOKENS:
            raise UnusableTask(f"its prompt has {len(ids)} tokens, more than {MAX_PROMPT_TOKENS} (task {task.id})")
        return Prompt(ids, target, self._dialogue(task))

    def _dialogue(self, task: Task) -> DialogueTerms | None:
        """How the environment answers in a task, with what frames its words."""
        config = self._context.config
        rule = dialogue_of(config.environment, task) if self._has_dialogues else None
        if rule is None:
            return None
        before, after = config.frame
        return DialogueTerms(tool=rule.tool, max_turns=rule.max_turns, before=before, after=after)

    def _row(self, task: str) -> TaskRow | None:
        with self._context.storage.read() as reader:
            return reader.task_row(task)

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
