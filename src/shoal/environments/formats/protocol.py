"""What a format is: how a row of a data set becomes a question and its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import EnvironmentSetupError

Row = Mapping[str, Any]
ROLES = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True)
class Wanted:
    """What a user may say about the columns; empty means: find out."""

    question: str = ""
    answer: str = ""
    id: str = ""
    grader: str = ""


@dataclass(frozen=True)
class Question:
    """What is asked: the last thing that the user says, what was said before, and who grades the answer."""

    prompt: str
    kind: str
    history: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Format:
    """How a row becomes a task. Both functions raise `UnusableTask` with the reason where a row does not fit.

    `asks` and `answers` are the columns that each of them reads: to look at every question, no answer is read.
    `plain` names the column that is the prompt word for word, where it is text; `kinds` the one that says of which kind
    a row is, and `judge` tells the grader of such a kind, or raises. Without it, `grader` is that of all rows.
    """

    name: str
    asks: tuple[str, ...]
    answers: tuple[str, ...]
    question: Callable[[Row], Question]
    answer: Callable[[Row], str]
    id: str = ""
    plain: str = ""
    kinds: str = ""
    grader: str = ""
    judge: Callable[[object], str] = str

    @property
    def columns(self) -> tuple[str, ...]:
        """Everything that is read of a row, without repeats."""
        return tuple(dict.fromkeys((*((self.id,) if self.id else ()), *self.asks, *self.answers)))

    @property
    def signature(self) -> str:
        """What two formats must share to give the same tasks."""
        fields = (self.name, self.asks, self.answers, self.id, self.plain, self.kinds, self.grader)
        return json.dumps(fields)


def need(columns: tuple[str, ...], *names: str, what: str) -> None:
    """Refuse a data set that lacks columns of its format."""
    missing = [name for name in names if name not in columns]
    if missing:
        raise EnvironmentSetupError(
            f"a data set in the format {what} needs the column {', '.join(missing)}; it has {', '.join(columns)}"
        )


def first_of(columns: tuple[str, ...], names: tuple[str, ...]) -> str:
    """The first of `names` that is a column, however it is capitalised; empty if none is."""
    spelled = {column.lower().replace(" ", "_"): column for column in reversed(columns)}
    return next((spelled[name] for name in names if name in spelled), "")
