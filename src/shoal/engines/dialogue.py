"""Dialogues as tokens: what a tool says to the turns of a completion, while it is drawn and when it is judged.

    while drawing   Line.take(token) ── end of a turn ──► Dialogue.reply(tokens so far) ──► tool tokens, or the end
    when judging    Dialogue.read(tokens) ── the same reply at every end of a turn ──► spans, and how it must end

Both ask `reply`, which depends on the tokens alone; so what a worker drew reads the same everywhere. The rules:

    a turn ends with an end-of-sequence token or a stop string (`models.ending`)
    the tool's text follows it, framed (`DialogueTerms`), and the model continues
    the dialogue is over, "eos", when the tool says nothing or the model has had `max_turns` turns
    it is cut off, "length", at the length limit, or where tool tokens leave no room for another token
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.engines.protocol import Engine, Finish, GenerationRequest, Respond
from shoal.environments import Environment, Task, dialogue_of, has_dialogues, prompt_settings_of
from shoal.environments.tools import TOOLS, Tool
from shoal.errors import ConfigError
from shoal.models import PromptEncoder
from shoal.models.ending import Decode, EndReader, EndRule, Texts, decoding, texts_of
from shoal.protocol import UPGRADE, DialogueTerms, Lease, SamplingParameters, Spans

STOP_TOKENS = 64  # of a greedy completion, between two looks for stop strings


@dataclass(frozen=True)
class Reading:
    """A completion taken apart: `given` are the spans where the environment spoke, `turns` those of the model. `finish`
    is how it ended, None if it stops where it must continue. With a `problem` it ends at token `at`."""

    given: Spans
    turns: int
    finish: Finish | None
    problem: Literal["", "other words", "past end"] = ""
    at: int = 0


@dataclass(frozen=True)
class Dialogue:
    """The terms of a lease, with the tool and the policy's tokenizer to carry them out."""

    terms: DialogueTerms
    ending: EndRule
    max_new_tokens: int
    tool: Tool = field(repr=False)
    texts: Texts = field(repr=False)

    def reply(self, turns: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """The tool tokens after these turns (without their end tokens); None without any: the dialogue is over."""
        if len(turns) >= self.terms.max_turns:
            return None
        said = self.tool(self.texts.decode_many([list(turn) for turn in turns]))
        if said is None:
            return None
        given = (*self.terms.before, *self.texts.encode_plain(said), *self.terms.after)
        return given[: self.max_new_tokens] or None  # what is longer leaves no room either way

    def _walk(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...] | None]]:
        """At each end of a turn: how many turns there are, the place after it, and the reply, which is passed over."""
        turns, at = list[Sequence[int]](), 0
        while (count := self.ending.first(token_ids[at:])) is not None:
            turns.append(self.ending.said(token_ids[at : at + count]))
            given = self.reply(turns)
            yield len(turns), at + count, given
            if given is None:
                return
            at += count + len(given)

    def respond(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """`GenerationRequest.respond`: the reply to a completion that has just come to the end of a turn."""
        return next((given for _turns, at, given in self._walk(token_ids) if at == len(token_ids)), None)

    def read(self, token_ids: Sequence[int], whole: bool = True) -> Reading:
        """Take a completion apart, checking that exactly what the tool says stands where it must, and nothing else. One
        that is not `whole` may stop anywhere, also in the middle of the tool's words."""
        spans, count = list[tuple[int, int]](), 0
        for count, at, given in self._walk(token_ids):
            if given is None or at + len(given) >= self.max_new_tokens:
                finish: Finish = "eos" if given is None else "length"
                return Reading(tuple(spans), count, finish, "" if at == len(token_ids) else "past end", at)
            there = tuple(token_ids[at : at + len(given)])
            if not whole and len(there) < len(given) and there == given[: len(there)]:
                return Reading((*spans, *([(at, len(there))] if there else [])), count, None)
            if there != given:
                return Reading(tuple(spans), count, None, "other words", at)
            spans.append((at, len(given)))
        cut = len(token_ids) == self.max_new_tokens
        return Reading(tuple(spans), count + 1, "length" if cut else None)


@dataclass
class Line:
    """One completion that is being drawn: its tokens, what is still to be given, and what was.

    >>> line = Line(lambda tokens: (7, 8) if len(tokens) == 2 else None, EndRule((1,)), max_new_tokens=9)
    >>> [line.take(5), line.take(1), line.take(line.forced), line.take(line.forced), line.take(1)]
    [True, True, True, True, False]
    >>> line.given, line.finish
    ([(2, 2)], 'eos')
    """

    respond: Respond
    ending: EndRule
    max_new_tokens: int
    vocabulary: int = sys.maxsize
    tokens: list[int] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    finish: Finish = "length"
    _queue: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._reader = EndReader(self.ending)

    @classmethod
    def of(cls, request: GenerationRequest, vocabulary: int) -> Line:
        sampling, prompt = request.sampling, request.prompt_ids
        ending = EndRule.of(sampling, request.decode)
        line = cls(request.respond or (lambda _: None), ending, sampling.max_new_tokens, vocabulary)
        for token in prompt[len(prompt) - request.begun :]:
            line._reader.take(token)
        return line

    @property
    def forced(self) -> int | None:
        """The next token, if it is not to be drawn."""
        return self._queue[0] if self._queue else None

    def take(self, token: int) -> bool:
        """Take the next token, drawn or forced; whether the completion continues after it."""
        self.tokens.append(token)
        if self._queue:
            self._queue.popleft()
        elif self._reader.take(token):
            given, self._reader = self.respond(self.tokens), EndReader(self.ending)
            if given and (min(given) < 0 or max(given) >= self.vocabulary):
                raise ValueError(f"a token is outside the vocabulary of {self.vocabulary}")
            self.finish = self.finish if given else "eos"
            if not given or len(self.tokens) + len(given) >= self.max_new_tokens:
                return False
            self.given.append((len(self.tokens), len(given)))
            self._queue.extend(given)
        return len(self.tokens) < self.max_new_tokens

    def extend(self, token_ids: list[int], is_over: bool) -> bool:
        """Take tokens that were drawn up to an end-of-sequence token or the limit (`is_over`), of no dialogue. What
        follows a stop string is left out. Whether the completion ends."""
        if self.ending.stop:
            return not all(self.take(token) for token in token_ids)
        self.tokens += token_ids
        if is_over and self.tokens[-1] in self.ending.eos_token_ids:
            self.finish = "eos"
        return is_over


def dialogue_for(lease: Lease, files: Mapping[str, bytes]) -> Dialogue | None:
    """The dialogue of a lease, by the tokenizer among its policy's files, if it has one. An unknown tool:
    `ConfigError`."""
    if lease.dialogue is None:
        return None
    sampling, tool = lease.sampling, TOOLS.get(lease.dialogue.tool)
    if tool is None:
        raise ConfigError(
            f"the run's environment answers with the tool {lease.dialogue.tool!a}, which this shoal does not have "
            f"(it has {', '.join(sorted(TOOLS))}): upgrade it with: {UPGRADE}"
        )
    ending = EndRule.of(sampling, decoding(sampling, files))
    return Dialogue(lease.dialogue, ending, sampling.max_new_tokens, tool, texts_of(files))


class Talks:
    """The dialogues of an environment's tasks in evaluation, with the very terms that the hub puts into leases."""

    def __init__(self, environment: Environment, files: Mapping[str, bytes], sampling: SamplingParameters) -> None:
        self._environment, self._files, self._sampling = environment, files, sampling
        self.decode = decoding(sampling, files)
        self._frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        if has_dialogues(environment) and "tokenizer.json" in files:
            self._frame = PromptEncoder(files, **prompt_settings_of(environment).model_dump()).frame()

    def of(self, task: str | Task) -> Dialogue | None:
        """The dialogue of a task; None if nobody answers in it."""
        if not has_dialogues(self._environment):
            return None
        known = self._environment.task(task) if isinstance(task, str) else task
        rule, (before, after) = dialogue_of(self._environment, known), self._frame
        if rule is None:
            return None
        terms = DialogueTerms(tool=rule.tool, max_turns=rule.max_turns, before=before, after=after)
        ending, longest = EndRule.of(self._sampling, self.decode), self._sampling.max_new_tokens
        return Dialogue(terms, ending, longest, TOOLS[rule.tool], texts_of(self._files))


def greedy_answers(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    talks: Sequence[Dialogue | None],
    sampling: SamplingParameters,
    decode: Decode | None = None,
) -> list[list[int]]:
    """Of each greedy completion what the model says last, without an end-of-sequence token."""
    lines = greedy_lines(engine, prompts, talks, sampling, decode)
    last = [line.tokens[sum(line.given[-1]) if line.given else 0 :] for line in lines]
    return [list(EndRule.of(sampling, decode).said(turn)) for turn in last]


def greedy_lines(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    talks: Sequence[Dialogue | None],
    sampling: SamplingParameters,
    decode: Decode | None = None,
) -> list[Line]:
    """The most probable token at every step, whatever the temperature: whole completions, with how they ended. Turn by
    turn: engines decode greedily to the first end-of-sequence token, so what was said is put in front. Where
    stop strings may end it before, some tokens at a time."""
    ending, limit = EndRule.of(sampling, decode), sampling.max_new_tokens
    lines = [Line(talk.respond if talk else lambda _tokens: None, ending, limit) for talk in talks]
    unfinished = list(range(len(lines)))
    while unfinished:
        asked = [(*prompts[n], *lines[n].tokens) for n in unfinished]
        room = min(limit - min(len(lines[n].tokens) for n in unfinished), STOP_TOKENS if ending.stop else limit)
        pairs = zip(unfinished, engine.greedy(asked, room, ending.eos_token_ids), strict=True)
        unfinished = [n for n, turn in pairs if all(lines[n].take(token) for token in turn.tolist())]
        for line in (lines[n] for n in unfinished):  # what is said to the turn
            while line.forced is not None:
                line.take(line.forced)
    return lines
