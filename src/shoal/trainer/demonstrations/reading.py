"""Demonstrations in files: JSON lines, Parquet, Arrow or CSV, several of them, read a batch of rows at a time.

    messages             [{role, content}, …]   every turn of the assistant is learnt
    prompt, completion   text, or messages that end with the user's, and what the assistant says then
    text                 nothing but text, all of it learnt

A column `task` (or `task_id`, `problem_id`) names the task of an environment that a demonstration answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.environments.data.digest import data_digest
from shoal.environments.data.locating import locate
from shoal.environments.data.scanning import rows_of
from shoal.environments.data.source import Broken
from shoal.environments.data.table import Table
from shoal.environments.formats.texts import conversation, messages_of, required
from shoal.errors import ConfigError, EnvironmentSetupError, UnusableTask

Message = tuple[str, str]
CALLS = ("tool_calls", "function_call")
TASK_COLUMNS = ("task", "task_id", "problem_id")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}


@dataclass(frozen=True)
class Demonstration:
    """What somebody said, to be imitated. Messages before number `given` are context; bare text has no messages.

    >>> Demonstration(0, (("user", "2+2?"), ("assistant", "4"))).completion
    '4'
    """

    row: int
    messages: tuple[Message, ...] = ()
    given: int = 0
    text: str = ""
    task: str = ""

    @property
    def completion(self) -> str:
        """What is said last."""
        return self.messages[-1][1] if self.messages else self.text

    @property
    def prompt(self) -> str:
        """What the last words answer; empty for bare text."""
        return self.messages[-2][1] if self.messages else ""

    @property
    def history(self) -> tuple[Message, ...]:
        """What was said before the prompt."""
        return self.messages[:-2]


class Demonstrations:
    """All rows of all files, numbered through. `digest` names their content, `layout` the columns that count."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._table = _opened(paths)
        self.layout = _layout(self._table.columns)
        self._columns = LAYOUTS[self.layout]
        self._task = next((name for name in TASK_COLUMNS if name in self._table.columns), None)
        try:
            self._agree()
            self._refuse_other_layouts()
            self.digest = data_digest(self._table.paths)
        except EnvironmentSetupError as error:
            raise _for_people(error) from error

    def _agree(self) -> None:
        """Refuse files that lack a column that others have. Lines say no types, so that only files of a kind can."""
        columns = [*self._columns, *([self._task] if self._task else [])]
        for kind in {file.kind for file in self._table.files}:
            alike = Table([file for file in self._table.files if file.kind == kind])
            alike.agree(columns)
            alike.close()

    def _refuse_other_layouts(self) -> None:
        """Rows of a file of another layout would all be left out."""
        first, *others = self._table.columns_by_file
        for path, columns in others:
            lacking = next((name for name in self._columns if name not in columns), None)
            if lacking:
                raise ConfigError(
                    f"the files differ: {path} has no column {lacking}, which {first[0]} has; it has "
                    f"{', '.join(columns)}: train on files of one layout at a time, or rename columns"
                )

    @property
    def rows(self) -> int:
        return self._table.rows

    @property
    def has_tasks(self) -> bool:
        return self._task is not None

    def where(self, row: int) -> str:
        """Where a row is, for a person: `demos.jsonl line 18`."""
        return self._table.where(row)

    def read(self) -> Iterator[Demonstration | tuple[int, str]]:
        """Every row in order: a demonstration, or its number and what is wrong with it."""
        columns = [*self._columns, *([self._task] if self._task else [])]
        number = 0
        for batch in self._table.scan(columns):
            for row in rows_of(batch):
                yield self._demonstration(number, row)
                number += 1

    def originals(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Rows as they are in the files, with all their columns; `rows` ascend."""
        wanted, number = iter(rows), 0
        following = next(wanted, None)
        for batch in self._table.scan(self._table.columns):
            for row in rows_of(batch):
                if number == following:
                    assert not isinstance(row, Broken), "a row that cannot be read was chosen"
                    yield row
                    following = next(wanted, None)
                number += 1

    def _demonstration(self, number: int, row: dict[str, Any] | Broken) -> Demonstration | tuple[int, str]:
        if isinstance(row, Broken):
            return number, row.reason
        try:
            task = "" if self._task is None or row[self._task] is None else str(row[self._task])
            return _parsed(self.layout, number, row, task)
        except UnusableTask as error:
            return number, str(error)


def _opened(paths: Sequence[Path]) -> Table:
    try:
        files = [file for path in paths for file in locate(path)]
        for file in files:
            if file.path.stat().st_size == 0:
                raise ConfigError(f"{file.path} is empty: there is nothing to learn from; check --data")
        return Table(files)
    except EnvironmentSetupError as error:
        raise _for_people(error) from error


def _for_people(error: EnvironmentSetupError) -> ConfigError:
    """Data is named in a recipe elsewhere, and here on the command line."""
    said = str(error).replace("environment.options.split", "--data to the files of one split")
    return ConfigError(said.replace("environment.data", "--data"))


def _layout(columns: Sequence[str]) -> str:
    for name, needed in LAYOUTS.items():
        if all(column in columns for column in needed):
            return name
    raise ConfigError(
        f"no demonstrations are in the columns {', '.join(columns)}: there must be messages (a list of role and "
        "content), or prompt and completion, or text; rename the columns"
    )


def _parsed(layout: str, number: int, row: Mapping[str, Any], task: str) -> Demonstration:
    if layout == "text":
        return Demonstration(number, text=required(row["text"], "text"), task=task)
    if layout == "completion":
        prompt, history = conversation(row["prompt"], "prompt")
        _refuse_calls(row["prompt"])
        said = (*history, ("user", prompt), ("assistant", required(row["completion"], "completion")))
        return Demonstration(number, said, len(said) - 1, task=task)
    messages = messages_of(row["messages"], "messages")
    if any(message.get("reasoning_content") for message in row["messages"]):
        raise UnusableTask("a message has reasoning_content, which would be lost: write it into its content")
    _refuse_calls(row["messages"])
    return Demonstration(number, _alternating(messages), task=task)


def _refuse_calls(messages: str | Sequence[Mapping[str, Any]]) -> None:
    """Without its call of a tool, a turn would be learnt as one that ends there."""
    said = () if isinstance(messages, str) else messages
    called = next((key for key in CALLS for message in said if message.get(key)), None)
    if called:
        raise UnusableTask(f"a message has {called}, which would be lost: there is no way to learn it")


def _alternating(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages up to the assistant's last, if roles are as they must be; what the user says after is left out."""
    last = max((index for index, (role, _text) in enumerate(messages) if role == "assistant"), default=-1)
    if last < 0:
        raise UnusableTask("messages has no turn of the assistant: there is nothing to learn")
    begin = 1 if messages[0][0] == "system" else 0
    for index, (role, text) in enumerate(messages[begin : last + 1]):
        due = ("user", "assistant")[index % 2]
        if role != due:
            raise UnusableTask(f"message {begin + index} is of the role {role}, not {due}: turns must alternate")
        required(text, f"the content of message {begin + index}")
    return messages[: last + 1]
