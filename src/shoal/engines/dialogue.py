"""Dialogues as tokens: what a tool says to the turns of a completion, while it is drawn and when it is judged.

    while drawing   Line.take(token) ── end of a turn ──► Dialogue.reply(tokens so far) ──► given tokens, or the end
    when judging    Dialogue.read(tokens) ── the same reply at every end of a turn ──► spans, and how it must end

Both ask `reply`, which depends on the tokens alone; so what a worker drew reads the same everywhere. The rules:

    a turn ends with the end-of-sequence token
    to it the tool's text is given, framed (`DialogueTerms`), and the model goes on
    the dialogue is over, "eos", when the tool says nothing or the model has had `max_turns` turns
    it is cut off, "length", at the length limit, or where what would be given leaves no room for another token
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

from shoal.engines.protocol import Finish, Respond
from shoal.environments.tools import TOOLS, Tool
from shoal.errors import ConfigError
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import DialogueTerms, Lease
from shoal.protocol.given import Spans


class Texts(Protocol):
    """How a policy's tokens become text and back."""

    def encode_plain(self, text: str) -> tuple[int, ...]: ...

    def decode_many(self, completions: Sequence[list[int]]) -> list[str]: ...


class Characters:
    """Tokens that are characters: of a policy without a tokenizer (the scripted engine's)."""

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode_many(self, completions: Sequence[list[int]]) -> list[str]:
        return ["".join(map(chr, ids)) for ids in completions]


@dataclass(frozen=True)
class Reading:
    """A completion taken apart: `given` are the spans where the environment spoke, `turns` those of the model.

    `finish` is how it ended, None if it stops where it must go on. With a `problem` at token `at` (the tool's words are
    not there, or it goes on after its end) it is taken apart up to there only.
    """

    given: Spans
    turns: int
    finish: Finish | None
    problem: Literal["", "other words", "past end"] = ""
    at: int = 0


@dataclass(frozen=True)
class Dialogue:
    """The terms of a lease, with the tool and the policy's tokenizer to carry them out."""

    terms: DialogueTerms
    eos_token_id: int
    max_new_tokens: int
    tool: Tool = field(repr=False)
    texts: Texts = field(repr=False)

    def reply(self, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """What is given after these turns (without their end tokens); None if the dialogue is over.

        Nothing at all to say is an end too: the model cannot go on after it.
        """
        if len(turns) >= self.terms.max_turns:
            return None
        said = self.tool(self.texts.decode_many([list(turn) for turn in turns]))
        if said is None:
            return None
        given = (*self.terms.before, *self.texts.encode_plain(said), *self.terms.after)
        return given[: self.max_new_tokens] or None  # what is longer leaves no room either way

    def respond(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """`GenerationRequest.respond`: the reply to a completion that has just come to the end of a turn."""
        turns, at = list[Sequence[int]](), 0
        while True:
            end = _index(token_ids, self.eos_token_id, at)
            if end is None:
                return None
            turns.append(token_ids[at:end])
            given = self.reply(turns)
            if given is None or end == len(token_ids) - 1:
                return given
            at = end + 1 + len(given)

    def read(self, token_ids: Sequence[int], whole: bool = True) -> Reading:
        """Take a completion apart, checking that exactly what the tool says stands where it must, and nothing else.

        One that is not `whole` may stop anywhere, also in the middle of the tool's words.
        """
        spans, turns, at = list[tuple[int, int]](), list[Sequence[int]](), 0
        while True:
            end = _index(token_ids, self.eos_token_id, at)
            if end is None:
                cut = len(token_ids) == self.max_new_tokens
                return Reading(tuple(spans), len(turns) + 1, "length" if cut else None)
            turns.append(token_ids[at:end])
            given = self.reply(turns)
            at = end + 1
            if given is None or at + len(given) >= self.max_new_tokens:
                finish: Finish = "eos" if given is None else "length"
                return Reading(tuple(spans), len(turns), finish, "" if at == len(token_ids) else "past end", at)
            there = tuple(token_ids[at : at + len(given)])
            if not whole and len(there) < len(given) and there == given[: len(there)]:
                begun = [(at, len(there))] if there else []
                return Reading((*spans, *begun), len(turns), None)
            if there != given:
                return Reading(tuple(spans), len(turns), None, "other words", at)
            spans.append((at, len(given)))
            at += len(given)


def _index(token_ids: Sequence[int], token: int, start: int) -> int | None:
    try:
        return token_ids.index(token, start)
    except ValueError:
        return None


@dataclass
class Line:
    """One completion that is being drawn: its tokens, what is still to be given, and what was.

    >>> line = Line(lambda tokens: (7, 8) if len(tokens) == 2 else None, eos_token_id=1, max_new_tokens=9)
    >>> [line.take(5), line.take(1), line.take(line.forced), line.take(line.forced), line.take(1)]
    [True, True, True, True, False]
    >>> line.given, line.finish
    ([(2, 2)], 'eos')
    """

    respond: Respond
    eos_token_id: int
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    finish: Finish = "length"
    _queue: deque[int] = field(default_factory=deque)

    @property
    def forced(self) -> int | None:
        """The next token, if it is not to be drawn."""
        return self._queue[0] if self._queue else None

    def take(self, token: int) -> bool:
        """Take the next token, drawn or forced; whether the completion goes on after it."""
        self.tokens.append(token)
        if self._queue:
            self._queue.popleft()
        elif token == self.eos_token_id:
            return self._turn_over()
        return len(self.tokens) < self.max_new_tokens

    def _turn_over(self) -> bool:
        given = self.respond(self.tokens)
        if not given:
            self.finish = "eos"
            return False
        if len(self.tokens) + len(given) >= self.max_new_tokens:
            return False
        self.given.append((len(self.tokens), len(given)))
        self._queue.extend(given)
        return True


def unknown_tool(lease: Lease) -> str:
    """The tool that the lease names and this shoal does not have, made printable; empty if there is none such."""
    tool = "" if lease.dialogue is None else lease.dialogue.tool
    return "" if tool in TOOLS else ascii(tool)[1:-1]


def dialogue_for(lease: Lease, files: Mapping[str, bytes]) -> Dialogue | None:
    """The dialogue of a lease, by the tokenizer among its policy's files; None if it has none.

    A tool that this shoal does not have is a `ConfigError`.
    """
    if lease.dialogue is None:
        return None
    if unknown := unknown_tool(lease):
        raise ConfigError(
            f"the run's environment answers with the tool {unknown}, which this shoal does not have (it has "
            f"{', '.join(sorted(TOOLS))}): upgrade it with: pip install -U shoal"
        )
    sampling, tool = lease.sampling, TOOLS[lease.dialogue.tool]
    return Dialogue(lease.dialogue, sampling.eos_token_id, sampling.max_new_tokens, tool, texts_of(files))


class _Files:
    """A policy's files as a key: versions of a policy share them, and a tokenizer takes long to load."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def __hash__(self) -> int:
        return hash(self.files.get("tokenizer.json"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Files) and self.files == other.files


def texts_of(files: Mapping[str, bytes]) -> Texts:
    """A policy's tokenizer, kept from one time to the next."""
    return _texts(_Files(files))


@lru_cache(maxsize=2)
def _texts(key: _Files) -> Texts:
    return TextTokenizer(key.files) if "tokenizer.json" in key.files else Characters()
