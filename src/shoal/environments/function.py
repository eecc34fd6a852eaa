"""Your own reward: one Python file with tasks and a function that scores a completion.

    tasks = [{"prompt": "Name a prime: ", "answer": ""}, ...]       # or a function that returns them

    def score(prompt, completion, answer):                           # or score(task, completion)
        return 1.0 if is_prime(completion) else 0.0

A score is a number, a `Score`, or a mapping with `value` (and optionally `parts`, `notes`). A task is a `Task`, a
mapping with `prompt` (and optionally `answer`, `id`, `split`), or a (prompt, answer) pair. Tasks without a split are
divided by the hash of their prompt. Only trusted processes load the file, never one that came over the network. The
validator calls `score` in processes with limits. With `tool = "calculator"` (and `max_turns`) this tool answers the
model's turns, and `score` gets the last one.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from numbers import Real
from pathlib import Path
from types import ModuleType

from shoal.environments import protocol
from shoal.environments.protocol import SPLITS, DialogueRule, Score, Split, Task
from shoal.errors import EnvironmentSetupError, ScoringFailure

TASK_KEYS = frozenset({"id", "prompt", "answer", "split"})
SCORE_KEYS = frozenset({"value", "parts", "notes"})


class FunctionEnvironment:
    """Tasks and scoring from a user's file; `digest` covers the file's bytes, so hub and validator must share it."""

    def __init__(self, file: Path, held_out_size: int) -> None:
        try:
            source = file.read_bytes()
        except OSError as error:
            raise EnvironmentSetupError(f"cannot read environment.file {file}: {error.strerror or error}") from None
        module = _load(file)
        self.name, self._file = file.stem, file
        self.digest = hashlib.sha256(b"shoal/function/%d\n" % held_out_size + source).hexdigest()
        wanted = "score(prompt, completion, answer) or score(task, completion)"
        score = getattr(module, "score", None)
        if not callable(score):
            raise EnvironmentSetupError(f"the reward file {file} defines no function {wanted}")
        self._score, self._parameters = score, len(inspect.signature(score).parameters)
        if self._parameters not in (2, 3):
            raise EnvironmentSetupError(f"score() in {file} takes {self._parameters} parameters; it must be {wanted}")
        # hold out prompts by their hash, at most a fifth; all tasks of a prompt are in the same split
        tasks = getattr(module, "tasks", None)
        if tasks is None:
            raise EnvironmentSetupError(
                f"the reward file {file} defines no tasks: add a list or a function of that name"
            )
        try:
            items = list(tasks() if callable(tasks) else tasks)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise EnvironmentSetupError(f"tasks in {file} cannot be listed: {type(error).__name__}: {error}") from error
        if not items:
            raise EnvironmentSetupError(f"tasks in {file} is empty")
        parsed = [_parse(item, index, file) for index, item in enumerate(items)]
        task_id, count = Counter(task.id for task, _ in parsed).most_common(1)[0]
        if count > 1:
            raise EnvironmentSetupError(f"two tasks in {file} have the id {task_id!r}")
        train = [task for task, split in parsed if split == "train"]
        held_out = [task for task, split in parsed if split == "held_out"]
        free = [task for task, split in parsed if split is None]
        prompts = sorted({task.prompt for task in free}, key=lambda p: hashlib.sha256(p.encode()).digest())
        aside = set(prompts[: max(0, min(held_out_size - len(held_out), len(prompts) // 5))])
        train += [task for task in free if task.prompt not in aside]
        held_out += [task for task in free if task.prompt in aside]
        if not train:
            raise EnvironmentSetupError(f"{file} leaves no task to train on")
        self._tasks = {"train": tuple(train), "held_out": tuple(held_out)}
        self._by_id = {task.id: task for split in self._tasks.values() for task in split}
        tool, max_turns = getattr(module, "tool", None), getattr(module, "max_turns", protocol.DEFAULT_TURNS)
        if isinstance(tool, str):
            if not isinstance(max_turns, int) or not 2 <= max_turns <= protocol.MAX_TURNS:
                raise EnvironmentSetupError(f"max_turns in {file} is {max_turns!r:.80}; 2 to {protocol.MAX_TURNS}")
            rule = DialogueRule(tool, max_turns)
            self.dialogue = lambda _task: rule  # makes this a `DialogueEnvironment`

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def task(self, task_id: str) -> Task:
        if task_id not in self._by_id:
            raise EnvironmentSetupError(f"{self._file} has no task {task_id!r}")
        return self._by_id[task_id]

    def score(self, task: Task, completion: str) -> Score:
        """The file's score. An exception is a failure of the machinery: unscored, never reward 0."""
        given = (task, completion) if self._parameters == 2 else (task.prompt, completion, task.answer)
        try:
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


class _AsItIs(SourceFileLoader):
    """Ignores compiled files, which may be stale if the file was changed twice in a second."""

    def path_stats(self, path: str) -> Mapping[str, object]:
        raise OSError(f"{path} is compiled again")


def _load(file: Path) -> ModuleType:
    if file.suffix != ".py":
        raise EnvironmentSetupError(f"the reward file {file} is no Python file (its name must end in .py)")
    module = ModuleType(f"shoal_reward_{file.stem}")
    module.__file__ = str(file)
    try:
        _AsItIs(module.__name__, str(file)).exec_module(module)
    except (Exception, SystemExit) as error:
        detail = f"{type(error).__name__}: {error}"
        raise EnvironmentSetupError(f"the reward file {file} does not load: {detail}") from error
    return module


def _parse(item: object, index: int, file: Path) -> tuple[Task, Split | None]:
    if isinstance(item, Task):
        return item, None
    if isinstance(item, tuple) and len(item) == 2:
        item = {"prompt": item[0], "answer": item[1]}
    if not isinstance(item, Mapping):
        problem = f"task {index} in {file} is {type(item).__name__}; give a mapping or (prompt, answer)"
        raise EnvironmentSetupError(problem)
    split = item.get("split")
    if "prompt" not in item or not item.keys() <= TASK_KEYS or split not in (None, *SPLITS):
        needs = "needs `prompt`, and may have `answer`, `id` and `split` (train or held_out)"
        raise EnvironmentSetupError(f"task {index} in {file} {needs}; it has {sorted(map(str, item))}")
    task_id, answer = str(item.get("id", f"{file.stem}/{index}")), str(item.get("answer", ""))
    return Task(id=task_id, prompt=str(item["prompt"]), answer=answer), split
