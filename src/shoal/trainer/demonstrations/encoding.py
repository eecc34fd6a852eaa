"""Demonstrations as token ids, and which of them are learnt: exact by construction, nothing is searched for in text.

    what was said before ─► PromptEncoder, as rollouts are asked ─► ids, read only
    what the assistant says ─► its own ids, no control token among them ─► learnt
    the end of its turn ─► the model's end-of-sequence token ─► learnt

The next turn is put behind the one before if the ids of its prompt begin with everything so far. Where they do not
(templates leave out earlier thinking, or end a turn otherwise), it becomes a sequence of its own. So each turn is
learnt behind the very ids that the model will be asked with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelError, UnusableTask
from shoal.models.folder import read_config
from shoal.models.prompts import Manner, PromptEncoder
from shoal.trainer.demonstrations.reading import Demonstration

THINKING = "<think>"
TAIL = 8  # tokens at the end of a prompt that tell how the answer was begun


@dataclass(frozen=True)
class Sequence:
    """Token ids, and which are learnt. The first never is: nothing comes before it that could predict it."""

    ids: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, ids: tuple[int, ...], learnt: list[bool]) -> Sequence:
        return cls(np.array(ids, np.int32), np.array([False, *learnt[1:]], np.bool_))

    def cut(self, most: int) -> Sequence:
        """Its beginning; what is cut off has no end of turn that would be learnt in the wrong place."""
        return self if len(self.ids) <= most else Sequence(self.ids[:most], self.learnt[:most])

    @property
    def tokens_learnt(self) -> int:
        return int(self.learnt.sum())


class Encoder:
    """Encodes demonstrations for one model. `chat` data needs a chat template: roles cannot be told otherwise."""

    def __init__(self, files: Mapping[str, bytes], manner: Manner, layout: str) -> None:
        self._prompts = PromptEncoder.of(files, manner)
        self._thinking = manner.thinking.strip()
        self.tokenizer = self._prompts.tokenizer
        positions = read_config(files).get("max_position_embeddings")
        self.positions = positions if isinstance(positions, int) and positions > 0 else None
        if layout == "messages" and not self._prompts.uses_template:
            raise ModelError(
                "the demonstrations are messages, but the model has no chat template that says how to write them "
                "(chat_template.jinja): add one to its folder, use a model that has one, or give prompt and completion"
            )

    def encode(self, demonstration: Demonstration) -> tuple[Sequence, ...]:
        """The sequences of a demonstration: one, where the template allows it. `UnusableTask` if there is no way."""
        try:
            if not demonstration.messages:
                ids = self._spoken(demonstration.text)
                return (Sequence.of(ids, [True] * len(ids)),)
            return tuple(self._turns(demonstration))
        except (ModelError, UnicodeEncodeError) as error:
            raise UnusableTask(str(error)) from error

    def _turns(self, demonstration: Demonstration) -> Iterator[Sequence]:
        ids: tuple[int, ...] = ()
        learnt: list[bool] = []
        for index, (role, text) in enumerate(demonstration.messages):
            if role != "assistant" or index < demonstration.given:
                continue
            asked = self._asked(demonstration, index)
            if ids and asked[: len(ids)] != ids:
                yield Sequence.of(ids, learnt)
                learnt = []
            said = self._spoken(self._unsaid(asked, text))
            learnt += [False] * (len(asked) - len(learnt)) + [True] * len(said)
            ids = asked + said
        yield Sequence.of(ids, learnt)

    def _asked(self, demonstration: Demonstration, index: int) -> tuple[int, ...]:
        """The prompt of the turn at `index`, as rollouts of it are asked."""
        messages = demonstration.messages
        asked = self._prompts.encode(messages[index - 1][1], messages[: index - 1])
        if not asked:
            raise UnusableTask("the prompt has no tokens")
        return asked

    def _spoken(self, text: str) -> tuple[int, ...]:
        """Words of the assistant, with the end of its turn. Control tokens that they spell are spelt out."""
        return (*self.tokenizer.encode_plain(text), self.tokenizer.eos_token_id)

    def _unsaid(self, asked: tuple[int, ...], text: str) -> str:
        """What is left to say where the prompt has begun the answer already (`<think>`)."""
        tail = self.tokenizer.decode(asked[-TAIL:])
        for begun in (self._thinking, THINKING):
            said = text.lstrip()
            if begun and tail.rstrip().endswith(begun) and said.startswith(begun):
                rest = said.removeprefix(begun)
                return rest.lstrip("\n") if tail.endswith("\n") else rest
        return text
