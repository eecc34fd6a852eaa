"""What an environment is: a sequence of tasks per split, and a function that scores a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class Task:
    """One question. `answer` never leaves the trusted side: workers are sent prompts only.

    >>> Task(id="sort/train/0", prompt="3142=", answer="1234").prompt
    '3142='
    """

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Score:
    """What a completion is worth: `value` is trained on, `parts` and `notes` are for people."""

    value: float
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    notes: str = ""


@runtime_checkable
class Environment(Protocol):
    """Tasks and their scoring, both deterministic.

    `score` returns a low value for a bad completion, and raises `ScoringFailure` only when the machinery itself
    failed: the first is a sample, the second is none.
    """

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """Hex SHA-256 over everything that determines tasks and scores."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of one split; indexing is cheap, nothing is listed in advance."""
        ...

    def task(self, task_id: str) -> Task:
        """The task of that id, whichever split holds it; an unknown id is an `EnvironmentSetupError`."""
        ...

    def score(self, task: Task, completion: str) -> Score: ...


@runtime_checkable
class ObjectingEnvironment(Environment, Protocol):
    """An environment that may refuse a completion whatever its score: one that attacks the grader, say."""

    def objection(self, task: Task, completion: str) -> str:
        """What is wrong with the completion, in a sentence for whoever generated it; empty if nothing is.

        An objection rejects the whole group: no reward, no credit, no strike. It must be deterministic, and must not
        depend on who generated: dice alone may come to such a completion.
        """
        ...
