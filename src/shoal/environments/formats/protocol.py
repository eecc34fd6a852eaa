"""What a format is: how a row of a data set becomes a question and its answer; and values of a row as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from shoal.environments.generated import Options
from shoal.errors import EnvironmentSetupError, UnusableTask

Row = Mapping[str, Any]
Messages = tuple[tuple[str, str], ...]
ROLES = frozenset({"system", "user", "assistant"})
BOXES = ("\\boxed{", "\\fbox{")


class Wanted(Options):
    """What a user may say about the columns; empty means: find out."""

    grader: str = Field(default="", description="who scores all rows; empty: by row (task_type), or by the format")
    question: str = Field(default="", description="the column that is the prompt; empty: found by its name")
    answer: str = Field(default="", description="the column that is the answer; empty: found by its name")
    id: str = Field(default="", description="the column that is the id; empty: found by its name, if there is one")


@dataclass(frozen=True)
class Question:
    """What is asked: the last thing that the user says, what was said before, and who grades the answer."""

    prompt: str
    kind: str
    history: Messages = ()


@dataclass(frozen=True)
class Format:
    """How a row becomes a task. `question` and `answer` raise `UnusableTask` with the reason where a row does not fit.

    `asks` and `answers` are the columns that each of them reads: to look at every question, no answer is read.
    The prompt is the column `plain` word for word, or a conversation that it holds; or else what `write` makes of a
    row. `grader` is that of all rows; without it, `kinds` is the column that says of which kind a row is, and `judge`
    tells the grader of such a kind, or raises.
    """

    name: str
    asks: tuple[str, ...]
    answers: tuple[str, ...]
    answer: Callable[[Row], str]
    id: str = ""
    plain: str = ""
    write: Callable[[Row], str] | None = None
    kinds: str = ""
    grader: str = ""
    judge: Callable[[object], str] = str

    def question(self, row: Row) -> Question:
        if self.write is not None:
            return Question(self.write(row), self.grader)
        prompt, history = conversation(row.get(self.plain), self.plain)
        return Question(prompt, self.grader or self.judge(row.get(self.kinds)), history)

    @property
    def columns(self) -> tuple[str, ...]:
        """Everything that is read of a row, without repeats."""
        return tuple(dict.fromkeys((*((self.id,) if self.id else ()), *self.asks, *self.answers)))

    @property
    def signature(self) -> str:
        """What two formats must share to give the same tasks."""
        return json.dumps((self.name, self.asks, self.answers, self.id, self.plain, self.kinds, self.grader))


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


def conversation(value: object, column: str) -> tuple[str, Messages]:
    """A prompt and what was said before it, of a text or of a list of messages that ends with the user's."""
    if isinstance(value, str):
        return required(value, column), ()
    said = messages_of(value, column)
    if not said or said[-1][0] != "user":
        raise UnusableTask(f"{column} must end with a message of the user")
    return required(said[-1][1], column), said[:-1]


def messages_of(value: object, column: str) -> Messages:
    """A list of messages as (role, text); a system message is the first or none."""
    if value is None:
        raise UnusableTask(f"{column} is missing")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UnusableTask(f"{column} is {type(value).__name__}, neither text nor a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise UnusableTask(f"{column} holds a message that is no {{role, content}}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UnusableTask(f"{column} holds a message of the role {role!r}; roles are {', '.join(sorted(ROLES))}")
        if not isinstance(content, str):
            raise UnusableTask(f"{column} holds a message whose content is no text")
        if role == "system" and number:
            raise UnusableTask(f"{column} has a system message that is not its first")
    return tuple((str(message["role"]), message["content"]) for message in value)


def required(value: object, column: str) -> str:
    """Text that must not be missing or empty."""
    if value is None:
        raise UnusableTask(f"{column} is missing")
    if not isinstance(value, str):
        raise UnusableTask(f"{column} is {type(value).__name__}, not text")
    if not value.strip():
        raise UnusableTask(f"{column} is empty")
    return value


def answer_text(value: object, column: str) -> str:
    """An answer of any simple type as text: numbers as they are written, lists and mappings as JSON.

    Of `true` nobody can say how a model should write it (yes? True? correct?), so its row must.
    """
    if isinstance(value, bool):
        raise UnusableTask(f"{column} is {json.dumps(value)}, neither text nor a number: write it as text")
    if isinstance(value, float):
        finite(value, column)
        return str(int(value)) if value.is_integer() else repr(value)
    return json.dumps(value) if isinstance(value, int | list | dict) else required(value, column)


def finite(value: object, column: str) -> None:
    """Refuse a number that is NaN or infinite: as text, `nan` would be an answer like any other."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableTask(f"{column} is {value}, which is NaN or infinite")


def parsed(value: object, column: str) -> Any:
    """What a column holds as JSON text, or already holds as a value."""
    try:
        return json.loads(value) if isinstance(value, str | bytes) else value
    except (ValueError, RecursionError) as error:
        raise UnusableTask(f"{column} is no JSON: {' '.join(str(error).split())[:120]}") from None


def final_answer(text: str) -> str:
    """What a worked solution comes to: what follows `####`, or the last box; the text itself if it has neither."""
    _work, mark, after = text.rpartition("####")
    if mark:
        return after.strip()
    start = max((text.rfind(box) + len(box) for box in BOXES if box in text), default=len(text))
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip() or text
    return text
