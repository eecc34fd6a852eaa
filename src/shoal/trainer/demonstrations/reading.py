"""Demonstrations in files (JSON lines, Parquet) as conversations, and as token ids.

    messages             [{role, content}, …]   every turn of the assistant is trained on
    prompt, completion   text, or messages that end with the user's; then what the assistant answers
    text                 only text, all of it trained on

A column `task` (or `task_id`, `problem_id`) names the task of an environment that a demonstration answers. A prompt
becomes the same ids as the prompt of a rollout (PromptEncoder). An answer becomes its own ids, without control tokens,
then the end-of-sequence token. Nothing is searched for in rendered text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.environments.data.cache import data_digest
from shoal.environments.data.locating import kind_of, locate
from shoal.environments.data.readers import Broken, DataTable, rows_of
from shoal.environments.formats import conversation, messages_of, required
from shoal.environments.protocol import prompt_digest, question_digest
from shoal.environments.settings import PromptSettings
from shoal.errors import ConfigError, EnvironmentSetupError, ModelError, UnusableTask
from shoal.models import PromptEncoder, read_config

Message = tuple[str, str]
LAYOUTS = {"messages": ("messages",), "completion": ("prompt", "completion"), "text": ("text",)}
LOST = ("tool_calls", "function_call", "reasoning_content")
THINKING, TAIL = "<think>", 8  # tokens at the end of a prompt, which may begin the answer


@dataclass(frozen=True)
class Tokens:
    """Token ids, and which are trained on. The first never is: no token before it could predict it."""

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, ids: Sequence[int], trained: Sequence[bool]) -> Tokens:
        return cls(np.array(ids, np.int32), np.array([False, *trained[1:]], np.bool_))


@dataclass(frozen=True)
class Demonstration:
    """One row of data. Messages before number `given` are context only; a bare text has no messages. `sequences` are
    the tokens, once it is encoded."""

    row: int
    messages: tuple[Message, ...] = ()
    given: int = 0
    text: str = ""
    task: str = ""
    sequences: tuple[Tokens, ...] = ()

    @property
    def completion(self) -> str:
        return self.messages[-1][1] if self.messages else self.text

    @property
    def prompt(self) -> str:
        """What the last answer replies to; empty for bare text."""
        return self.messages[-2][1] if self.messages else ""

    @property
    def question(self) -> bytes:
        """The digest of the question that is answered, or of the bare text."""
        return question_digest(self.prompt, self.messages[:-2]) if self.messages else question_digest(self.text)

    @property
    def begins(self) -> int:
        """A number that is equal for conversations with the same first question."""
        asked = next((text for role, text in self.messages if role == "user"), self.text)
        return int.from_bytes(prompt_digest(asked)[:7], "big")

    @property
    def digest(self) -> bytes:
        """For duplicates: of roles, texts and trained turns, ignoring case, width and repeated spaces."""
        parts = [
            f"{role}{index >= self.given and role == 'assistant'}\0"
            + " ".join(unicodedata.normalize("NFKC", text).casefold().split())
            for index, (role, text) in enumerate(self.messages or (("", self.text),))
        ]
        return sha256("\0".join(parts).encode(errors="surrogatepass")).digest()


class Demonstrations:
    """All rows of all files, numbered from 0. `digest` names their content, `layout` the columns that are used."""

    def __init__(self, paths: Sequence[Path]) -> None:
        try:
            files = [file for path in paths for file in locate(path)]
            if empty := next((file for file in files if file.stat().st_size == 0), None):
                raise ConfigError(f"{empty} is empty: there is nothing to train on; check --data")
            self._table = DataTable(files)
            (_, first), *others = self._table.columns_by_file
            self.layout = next((name for name, needed in LAYOUTS.items() if set(needed) <= set(first)), "")
            needed = LAYOUTS.get(self.layout, ())
            if not needed:
                details = "there must be messages, or prompt and completion, or text: rename the columns"
                raise ConfigError(f"no demonstrations are in the columns {', '.join(first)}: {details}")
            for path, columns in others:
                if lacking := [name for name in needed if name not in columns]:
                    has = f"which {self._table.paths[0]} has; it has {', '.join(columns)}: rename columns"
                    raise ConfigError(f"the files differ: {path} has no column {lacking[0]}, {has}")
            self._task = next((name for name in ("task", "task_id", "problem_id") if name in first), None)
            self._columns = [*needed, *([self._task] if self._task else [])]
            for kind in set(map(kind_of, files)):  # JSON lines declare no types, so files are compared by kind
                DataTable([file for file in files if kind_of(file) == kind]).agree(self._columns)
            self.digest = data_digest(self._table.paths)
        except EnvironmentSetupError as error:  # data is named in a recipe elsewhere, and here by --data
            message = str(error).replace("environment.options.split", "--data to the files of one split")
            raise ConfigError(message.replace("environment.data", "--data")) from error
        self.rows, self.where = self._table.rows, self._table.where

    def read(self) -> Iterator[Demonstration | UnusableTask]:
        scanned = (row for batch in self._table.scan(self._columns) for row in rows_of(batch))
        for number, row in enumerate(scanned):
            try:
                yield UnusableTask(row.reason) if isinstance(row, Broken) else self._demonstration(number, row)
            except UnusableTask as error:
                yield error

    def _demonstration(self, number: int, row: Mapping[str, Any]) -> Demonstration:
        task = "" if self._task is None or row[self._task] is None else str(row[self._task])
        if self.layout == "text":
            return Demonstration(number, text=required(row["text"], "text"), task=task)
        asked = row["prompt" if self.layout == "completion" else "messages"]
        if self.layout == "completion":
            prompt, history = conversation(asked, "prompt")
            text = (*history, ("user", prompt), ("assistant", required(row["completion"], "completion")))
        else:
            text = _alternating(messages_of(asked, "messages"))
        for key in LOST if not isinstance(asked, str) else ():  # a turn without its call would seem to end there
            if any(message.get(key) for message in asked):
                raise UnusableTask(f"a message has {key}, which would be lost: write it into the content")
        return Demonstration(number, text, len(text) - 1 if self.layout == "completion" else 0, task=task)


def _alternating(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages up to the last one of the assistant, if roles alternate; later messages of the user are dropped."""
    last = max((index for index, (role, _text) in enumerate(messages) if role == "assistant"), default=-1)
    if last < 0:
        raise UnusableTask("messages has no turn of the assistant: there is nothing to train on")
    begin = 1 if messages[0][0] == "system" else 0
    for index, (role, text) in enumerate(messages[begin : last + 1], begin):
        due = ("user", "assistant")[(index - begin) % 2]
        if role != due:
            raise UnusableTask(f"message {index} is of the role {role}, not {due}: turns must alternate")
        required(text, f"the content of message {index}")
    return messages[: last + 1]


class Encoder:
    def __init__(self, files: Mapping[str, bytes], manner: PromptSettings, layout: str) -> None:
        self._prompts = PromptEncoder(files, **manner.model_dump())
        self._thinking = manner.thinking.strip()
        self.tokenizer = self._prompts.tokenizer
        positions = read_config(files).get("max_position_embeddings")
        self.positions = positions if isinstance(positions, int) and positions > 0 else None
        if layout == "messages" and not self._prompts.uses_template:
            details = "the demonstrations are messages, but the model has no chat template (chat_template.jinja)"
            raise ModelError(f"{details}: add one to its folder, or give prompt and completion")

    def encode(self, demonstration: Demonstration) -> tuple[Tokens, ...]:
        """One sequence, if the chat template allows it. `UnusableTask` if it cannot be encoded."""
        try:
            return tuple(self._turns(demonstration))
        except (ModelError, UnicodeEncodeError) as error:
            raise UnusableTask(str(error)) from error

    def _turns(self, demonstration: Demonstration) -> Iterator[Tokens]:
        """A turn is appended to the sequence if its prompt begins with all ids so far. If not (templates drop earlier
        thinking, or end a turn in another way), it becomes a sequence of its own, so each turn is trained on after the
        exact ids that the model will be given."""
        messages = demonstration.messages
        ids: tuple[int, ...] = () if messages else self._spoken(demonstration.text)
        trained = [True] * len(ids)
        for index, (role, text) in enumerate(messages):
            if role != "assistant" or index < demonstration.given:
                continue
            asked = self._prompts.encode(messages[index - 1][1], messages[: index - 1])
            if not asked:
                raise UnusableTask("the prompt has no tokens")
            if ids and asked[: len(ids)] != ids:
                yield Tokens.of(ids, trained)
                trained = []
            # If the prompt has begun the answer already (`<think>`), the answer continues after that.
            tail, left = self.tokenizer.decode(asked[-TAIL:]), text.lstrip()
            for begun in (self._thinking, THINKING):
                if begun and tail.rstrip().endswith(begun) and left.startswith(begun):
                    text = left.removeprefix(begun).removeprefix("\n" if tail.endswith("\n") else "")
                    break
            spoken = self._spoken(text)
            trained += [False] * (len(asked) - len(trained)) + [True] * len(spoken)
            ids = asked + spoken
        yield Tokens.of(ids, trained)

    def _spoken(self, text: str) -> tuple[int, ...]:
        """Control tokens in the text are encoded as plain text."""
        return (*self.tokenizer.encode_plain(text), self._prompts.end_of_turn)
