"""Environments that answer the model: a task may name a tool that speaks between the model's turns.

    prompt ─► turn ─► tool ─┬─ an answer ─► turn ─► tool ─► …
                            └─ none, or `max_turns` ─► the last turn is what is scored

Only tools that ship with shoal can be named (`tools`): contributors run them, and nothing that an owner or a model
wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.environments.composed import Composed
from shoal.environments.protocol import Environment, Task
from shoal.environments.tools import TOOLS
from shoal.errors import EnvironmentSetupError

DEFAULT_TURNS = 3
MAX_TURNS = 64  # as many as a lease can say


@dataclass(frozen=True)
class DialogueRule:
    """Which tool answers, and how many turns the model has at most. `max_turns` 1 is no dialogue."""

    tool: str
    max_turns: int

    def __post_init__(self) -> None:
        if self.tool not in TOOLS:
            raise EnvironmentSetupError(f"there is no tool {self.tool!r}; there are {', '.join(sorted(TOOLS))}")


@runtime_checkable
class DialogueEnvironment(Environment, Protocol):
    """An environment whose tasks, or some of them, are dialogues. What is scored is the model's last turn."""

    def dialogue(self, task: Task) -> DialogueRule | None: ...


def has_dialogues(environment: Environment) -> bool:
    """Whether some task of the environment may be a dialogue: what is asked before tasks are looked up."""
    from shoal.environments.mix import MixedEnvironment  # which hands dialogues of its parts on, and so imports this

    inner = _inner(environment)
    if isinstance(inner, MixedEnvironment):
        return any(has_dialogues(part.environment) for part in inner.parts)
    return isinstance(inner, DialogueEnvironment)


def dialogue_of(environment: Environment, task: Task) -> DialogueRule | None:
    """How the environment answers in this task; None if it does not."""
    inner = _inner(environment)
    return inner.dialogue(task) if isinstance(inner, DialogueEnvironment) else None


def _inner(environment: Environment) -> Environment:
    return environment.inner if isinstance(environment, Composed) else environment
