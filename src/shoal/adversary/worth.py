"""What a completion is worth to a cheat that chooses, and what the right answer would be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property

from shoal.adversary.base import Loot
from shoal.engines import Completion
from shoal.environments import ENVIRONMENTS, Environment, EnvironmentSettings, Task, build
from shoal.models import TextTokenizer

_listing = threading.Lock()


class Worth:
    """A completion's reward if the task can be found, else how likely the policy finds it.

    Prompts are all that a lease gives away, but a built-in environment is public, its tasks and answers with it.
    """

    def __init__(self, loot: Loot) -> None:
        self._loot = loot

    def of(self, prompt_ids: Sequence[int]) -> Callable[[Completion], float]:
        """How to value completions of this prompt."""
        task = self.task(prompt_ids)
        if task is None:
            return likelihood
        environment, tokenizer = _environment(self._loot.environment), self.tokenizer
        return lambda completion: environment.score(task, tokenizer.decode(_last_turn(completion))).value

    def task(self, prompt_ids: Sequence[int]) -> Task | None:
        """The task of this prompt, if anyone can know it."""
        if self._loot.environment not in ENVIRONMENTS or "tokenizer.json" not in self._loot.files:
            return None
        return _tasks(self._loot.environment).get(self.tokenizer.decode(prompt_ids))

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self._loot.files)


def _last_turn(completion: Completion) -> list[int]:
    """What is scored: of a dialogue what the model says last."""
    ids: list[int] = completion.token_ids.tolist()
    return ids[sum(completion.given[-1]) :] if completion.given else ids


@cache
def _environment(name: str) -> Environment:
    return build(EnvironmentSettings(name=name))


def _tasks(name: str) -> Mapping[str, Task]:
    """Every training task by its prompt; listing them takes seconds, once."""
    with _listing:
        return _listed(name)


@cache
def _listed(name: str) -> Mapping[str, Task]:
    return {task.prompt: task for task in _environment(name).tasks("train")}


def likelihood(completion: Completion) -> float:
    return float(completion.logprobs.sum())
