"""Your own reward: one Python file with tasks and a function that scores a completion.

    tasks = [{"prompt": "Name a prime: ", "answer": ""}, ...]       # or a function that returns them

    def score(prompt, completion, answer):                           # or score(task, completion)
        return 1.0 if is_prime(completion) else 0.0

A score is a number, a `Score`, or a mapping with `value` (and optionally `parts`, `notes`). A task is a `Task`, a
mapping with `prompt` (and optionally `answer`, `id`, `split`), or a (prompt, answer) pair. Tasks without a split are
divided by the hash of their prompt. A prompt is a text, or a list of chat messages that ends with the user's.

Or reward functions as TRL calls them, each a part of the score, with all columns of the tasks (or of the data):

    def accuracy(completions, ground_truth, **columns):              # or `async def`; None: it does not apply
        return [float(text == truth) for text, truth in zip(completions, ground_truth)]

Only trusted processes load the file, never one that came over the network. The validator calls it in processes with
limits. With `tool = "calculator"` (and `max_turns`) this tool answers the model's turns, and the last one is scored.
"""

import asyncio
import hashlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.environments import protocol
from shoal.environments.formats import conversation
from shoal.environments.protocol import SPLITS, DialogueRule, Score, Split, Task
from shoal.environments.tools import TOOLS
from shoal.errors import EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.runtime.extensions import load_file

TASK_KEYS = frozenset({"id", "prompt", "answer", "split"})
SCORE_KEYS = frozenset({"value", "parts", "notes"})
TOKENS = "completion_ids"
NOT_COLUMNS = frozenset({"prompt", "completion", TOKENS})  # TRL passes these in other ways
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class FunctionEnvironment:
    """Tasks and scoring from a user's file. `digest` covers the file's bytes and the tasks that it gives, so that hub,
    validator and scoring processes have the same ones under the same ids. With `data` the tasks are its rows."""

    def __init__(self, file: Path, held_out_size: int, data: Path | None = None) -> None:
        try:
            source = file.read_bytes()
        except OSError as error:
            raise EnvironmentSetupError(f"cannot read environment.file {file}: {error.strerror or error}") from None
        module = load_file("the reward file", file, source, EnvironmentSetupError)
        self.name, self._file, digest = file.stem, file, hashlib.sha256(b"shoal/function/%d\n" % held_out_size + source)
        items, self.data_digest = _items(module, file) if data is None else _rows(module, file, data)
        named = _reward_functions(module, file)
        self._score: Callable[..., Any] | None = None
        if not named:
            self._score, self._parameters = _own_score(module, file)
        rows = [_parse(item, index, file, is_strict=not named and data is None) for index, item in enumerate(items)]
        task_id, count = Counter(row.task.id for row in rows).most_common(1)[0]
        if count > 1:
            raise EnvironmentSetupError(f"two tasks in {file} have the id {task_id!r}")
        self._rows = {row.task.id: row for row in rows}
        drawn = [[row.task.id, _asked(row.task), row.task.answer, row.columns] for row in rows]
        text = self.data_digest or json.dumps(drawn, skipkeys=True, default=lambda value: type(value).__name__)
        self.digest = hashlib.sha256(digest.digest() + text.encode()).hexdigest()
        columns = dict.fromkeys(name for row in rows for name in row.columns)
        self._rewards = RewardFunctions(file, module, named, tuple(columns)) if named else None
        # hold out prompts by their hash, at most a fifth; all tasks of a prompt are in the same split
        train = [row.task for row in rows if row.split == "train"]
        held_out = [row.task for row in rows if row.split == "held_out"]
        free = [row.task for row in rows if row.split is None]
        prompts = sorted({_asked(task) for task in free}, key=lambda p: hashlib.sha256(p.encode()).digest())
        aside = set(prompts[: max(0, min(held_out_size - len(held_out), len(prompts) // 5))])
        train += [task for task in free if _asked(task) not in aside]
        held_out += [task for task in free if _asked(task) in aside]
        if not train:
            raise EnvironmentSetupError(f"{file} leaves no task to train on")
        self._tasks = {"train": tuple(train), "held_out": tuple(held_out)}
        rule = _dialogue_rule(module, file)
        if rule is not None:
            self.dialogue = lambda _task: rule  # makes this a `DialogueEnvironment`

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def task(self, task_id: str) -> Task:
        if task_id not in self._rows:
            raise EnvironmentSetupError(f"{self._file} has no task {task_id!r}")
        return self._rows[task_id].task

    def columns(self, task_id: str) -> Mapping[str, Any]:
        return self._rows[task_id].columns

    @property
    def reads_tokens(self) -> bool:
        return self._rewards is not None and self._rewards.reads_tokens

    def score(self, task: Task, completion: str, token_ids: Sequence[int] | None = None) -> Score:
        """The file's score. An exception is a failure of the machinery: unscored, never reward 0."""
        if self._rewards is not None:
            return self._rewards.score(self._rows[task.id], completion, token_ids)
        given = (task, completion) if self._parameters == 2 else (task.prompt, completion, task.answer)
        try:
            assert self._score is not None
            result = self._score(*given)
        except (Exception, SystemExit) as error:
            detail = f"raised {type(error).__name__}: {error} on task {task.id}"
            raise ScoringFailure(f"score() in {self._file} {detail}") from error
        try:
            # a result of a user's function as a `Score` of finite numbers, or `TypeError` or `ValueError`
            if isinstance(result, Mapping):
                if "value" not in result or not result.keys() <= SCORE_KEYS:
                    raise ValueError("a mapping has `value`, and may have `parts` and `notes`")
                result = Score(result["value"], result.get("parts") or {}, str(result.get("notes") or ""))
            if not isinstance(result, Score):
                return Score(_number(result, "not a number"))
            if not isinstance(result.parts, Mapping):
                raise TypeError("parts must be a mapping from names to numbers")
            taken = next((str(name) for name in result.parts if protocol.is_reserved(str(name))), None)
            if taken is not None:
                raise ValueError(f"{protocol.RESERVED_NAMES} are shoal's own parts; call {taken!r:.40} something else")
            parts = {
                str(name): _number(part, f"part {name!s:.40} is not a number") for name, part in result.parts.items()
            }
            return Score(_number(result.value, "its value is not a number"), parts, str(result.notes))
        except (TypeError, ValueError) as error:
            detail = f"returned {result!r:.200} on task {task.id}: {error}"
            raise ScoringFailure(f"score() in {self._file} {detail}") from None


def _number(value: object, problem: str) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(problem)
    return number


@dataclass(frozen=True)
class RewardRow:
    """A task with the other columns of its row; `messages` is its prompt, if that is a list of messages."""

    task: Task
    split: Split | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: Any = None


class RewardFunctions:
    """Reward functions as TRL calls them: keyword arguments that are lists, here of one completion each. The score is
    their weighted sum; a function that returns None for a completion does not apply to it."""

    def __init__(self, file: Path, module: ModuleType, named: Mapping[str, Any], columns: Sequence[str]) -> None:
        self._file, self._named, self._columns = file, named, columns
        self._weights = list(getattr(module, "reward_weights", [1.0] * len(named)))
        if len(self._weights) != len(named):
            found = f"{len(self._weights)} reward_weights for {len(named)} reward functions ({', '.join(named)})"
            raise EnvironmentSetupError(f"{file} has {found}: give one for each")
        passed = {"prompts", "completions", TOKENS, *columns}
        self.reads_tokens = False
        for name, function in named.items():
            parameters = inspect.signature(function).parameters.values()
            self.reads_tokens |= any(each.name == TOKENS for each in parameters)
            needed = {each.name for each in parameters if each.default is each.empty and each.kind not in VARIADIC}
            if protocol.is_reserved(name):
                raise EnvironmentSetupError(
                    f"{name}() in {file}: {protocol.RESERVED_NAMES} are shoal's own parts: rename"
                )
            if missing := sorted(needed - passed):
                why = "a reward follows from the task's columns and the completion alone"
                have = f"it can have {', '.join(sorted(passed))}"
                raise EnvironmentSetupError(f"{name}() in {file} asks for {', '.join(missing)}: {why}; {have}")

    def score(self, row: RewardRow, completion: str, token_ids: Sequence[int] | None) -> Score:
        """`token_ids` go to functions that name `completion_ids`, and to no others."""
        if self.reads_tokens and token_ids is None:
            raise ScoringFailure(f"a function in {self._file} asks for completion_ids; only the text is known here")
        values = self._values(row, completion, list(token_ids or ()))
        parts = {name: value for name, value in values.items() if value is not None}
        total = sum(weight * parts[name] for name, weight in zip(values, self._weights, strict=True) if name in parts)
        return Score(float(total), parts, "" if parts else "no reward function applies")

    def _values(self, row: RewardRow, completion: str, token_ids: list[int]) -> dict[str, float | None]:
        is_chat = row.messages is not None
        lists = {name: [row.columns.get(name)] for name in self._columns}
        lists[TOKENS] = [token_ids]
        lists["prompts"] = [row.messages if is_chat else row.task.prompt]
        lists["completions"] = [[{"role": "assistant", "content": completion}] if is_chat else completion]
        task = row.task
        found, waiting = dict[str, Any](), dict[str, Any]()
        for name, function in self._named.items():
            taken = inspect.signature(function).parameters
            takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
            given = {
                key: deepcopy(value) for key, value in lists.items() if key in taken or (takes_all and key != TOKENS)
            }
            try:
                found[name] = function(**given)
                if inspect.isawaitable(found[name]):
                    waiting[name] = found[name]
            except (Exception, SystemExit) as error:
                raise self._failure(name, task, error) from error
        if waiting:
            for name, result in zip(waiting, asyncio.run(_together(list(waiting.values()))), strict=True):
                if isinstance(result, BaseException):
                    raise self._failure(name, task, result) from result
                found[name] = result
        return {name: self._number(name, task, result) for name, result in found.items()}

    def _failure(self, name: str, task: Task, error: BaseException) -> ScoringFailure:
        return ScoringFailure(f"{name}() in {self._file} raised {type(error).__name__}: {error} on task {task.id}")

    def _number(self, name: str, task: Task, result: Any) -> float | None:
        """The one number of a function's list, which may be an array's or a tensor's; None if it does not apply."""
        try:
            [value] = result
            number = None if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if number is not None and not math.isfinite(number):
            detail = f"returned {result!r:.200} on task {task.id}; it must be a list with one number, or None, for each"
            raise ScoringFailure(f"{name}() in {self._file} {detail} completion")
        return number


async def _together(waiting: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*waiting, return_exceptions=True)


def _reward_functions(module: ModuleType, file: Path) -> dict[str, Any]:
    """TRL's reward functions of a file by name: `reward_funcs`, or every public function of it that takes
    `completions` or `completion_ids`. A file with a `score` of shoal's form has none."""
    listed, score = getattr(module, "reward_funcs", None), getattr(module, "score", None)
    functions = list(listed) if isinstance(listed, list | tuple) else [] if listed is None else [listed]
    is_own = callable(score) and not _takes_completions(score)
    if is_own and functions:
        raise EnvironmentSetupError(f"{file} defines reward_funcs and score(prompt, completion, answer): leave one out")
    if not functions and not is_own:
        members = [each for name, each in vars(module).items() if not name.startswith("_") and inspect.isfunction(each)]
        functions = [each for each in members if each.__module__ == module.__name__ and _takes_completions(each)]
    found = {str(getattr(each, "__name__", type(each).__name__)): each for each in functions}
    if len(found) < len(functions) or not all(map(callable, functions)):
        raise EnvironmentSetupError(f"reward_funcs in {file} must be functions with different names")
    return found


def _takes_completions(function: Any) -> bool:
    return not {"completions", TOKENS}.isdisjoint(inspect.signature(function).parameters)


def _own_score(module: ModuleType, file: Path) -> tuple[Callable[..., Any], int]:
    wanted = "score(prompt, completion, answer) or score(task, completion)"
    score = getattr(module, "score", None)
    if not callable(score):
        other = "nor one that takes `completions`, as TRL's reward functions do"
        raise EnvironmentSetupError(f"the reward file {file} defines no function {wanted}, {other}")
    parameters = len(inspect.signature(score).parameters)
    if parameters not in (2, 3):
        raise EnvironmentSetupError(f"score() in {file} takes {parameters} parameters; it must be {wanted}")
    return score, parameters


def _dialogue_rule(module: ModuleType, file: Path) -> DialogueRule | None:
    tool, max_turns = getattr(module, "tool", None), getattr(module, "max_turns", protocol.DEFAULT_TURNS)
    if (tool is not None and not isinstance(tool, str)) or isinstance(getattr(module, "tools", None), list | tuple):
        why = "tools run on workers, which run no code of others, trusted ones neither"
        names = ", ".join(sorted(TOOLS))
        remedy = f'name a built-in one (tool = "{names}"), add yours to shoal (CONTRIBUTING.md), or rename it'
        raise EnvironmentSetupError(f"{file} defines a tool of its own, which is not possible: {why}; {remedy}")
    if tool is None:
        return None
    if not isinstance(max_turns, int) or not 2 <= max_turns <= protocol.MAX_TURNS:
        raise EnvironmentSetupError(f"max_turns in {file} is {max_turns!r:.80}; 2 to {protocol.MAX_TURNS}")
    return DialogueRule(tool, max_turns)


def _items(module: ModuleType, file: Path) -> tuple[list[Any], str]:
    tasks = getattr(module, "tasks", None)
    if tasks is None:
        raise EnvironmentSetupError(
            f"the reward file {file} defines no tasks: add a list or a function of that name, or set environment.data"
        )
    try:
        items = list(tasks() if callable(tasks) else tasks)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise EnvironmentSetupError(f"tasks in {file} cannot be listed: {type(error).__name__}: {error}") from error
    if not items:
        raise EnvironmentSetupError(f"tasks in {file} is empty")
    return items, ""


def _rows(module: ModuleType, file: Path, data: Path) -> tuple[list[Any], str]:
    from shoal.environments.data.cache import data_digest
    from shoal.environments.data.locating import locate
    from shoal.environments.data.readers import Broken, DataTable, rows_of  # pyarrow takes a moment to load

    if hasattr(module, "tasks"):
        raise EnvironmentSetupError(f"the reward file {file} defines tasks, and environment.data is set: leave one out")
    table = DataTable(locate(data))
    table.agree(table.columns)
    rows = list[Any]()
    for number, row in enumerate(each for batch in table.scan(table.columns) for each in rows_of(batch)):
        if isinstance(row, Broken):
            raise EnvironmentSetupError(f"{data}: {table.where(number)} cannot be read: {row.reason}")
        rows.append(row)
    return rows, data_digest(table.paths)


def _parse(item: object, index: int, file: Path, *, is_strict: bool) -> RewardRow:
    """`is_strict`: there are no other columns."""
    if isinstance(item, Task):
        return RewardRow(item, None, {"answer": item.answer})
    if isinstance(item, tuple) and len(item) == 2:
        item = {"prompt": item[0], "answer": item[1]}
    if not isinstance(item, Mapping):
        problem = f"task {index} in {file} is {type(item).__name__}; give a mapping or (prompt, answer)"
        raise EnvironmentSetupError(problem)
    split = item.get("split")
    if split not in (None, *SPLITS) and not is_strict:
        split = None  # a column that only has this name
    if "prompt" not in item or (is_strict and not item.keys() <= TASK_KEYS) or split not in (None, *SPLITS):
        needs = "needs `prompt`, and may have `answer`, `id` and `split` (train or held_out)"
        raise EnvironmentSetupError(f"task {index} in {file} {needs}; it has {sorted(map(str, item))}")
    task_id, answer, prompt = str(item.get("id", f"{file.stem}/{index}")), str(item.get("answer", "")), item["prompt"]
    columns = {str(name): value for name, value in item.items() if name not in NOT_COLUMNS}
    if isinstance(prompt, str | int | float):
        return RewardRow(Task(id=task_id, prompt=str(prompt), answer=answer), split, columns)
    try:
        text, history = conversation(prompt, "prompt")
    except UnusableTask as error:
        raise EnvironmentSetupError(f"task {index} in {file}: {error}") from None
    return RewardRow(Task(task_id, text, answer, history=history), split, columns, prompt)


def _asked(task: Task) -> str:
    return json.dumps([*task.history, task.prompt]) if task.history else task.prompt
