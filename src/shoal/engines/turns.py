"""Dialogues where no lease says how they go, and no dice are rolled: evaluation.

prompts ─► greedy, to the end of the turn ─► the tool's words behind it ─► greedy again ─► … ─► the last turns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.engines.dialogue import Dialogue, Line, texts_of
from shoal.engines.protocol import Engine
from shoal.environments import Environment, Task, dialogue_of, has_dialogues, prompt_settings_of
from shoal.environments.tools import TOOLS
from shoal.models.prompts import PromptEncoder
from shoal.protocol import DialogueTerms, SamplingParameters


class Talks:
    """The dialogues of an environment's tasks by a model's files: the very terms that the hub puts into leases."""

    def __init__(self, environment: Environment, files: Mapping[str, bytes], sampling: SamplingParameters) -> None:
        self._environment, self._files, self._sampling = environment, files, sampling
        self._frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        if has_dialogues(environment) and "tokenizer.json" in files:
            self._frame = PromptEncoder.of(files, prompt_settings_of(environment)).frame()

    def of(self, task: str | Task) -> Dialogue | None:
        """The dialogue of a task; None if nobody answers in it."""
        if not has_dialogues(self._environment):
            return None
        known = self._environment.task(task) if isinstance(task, str) else task
        rule, (before, after) = dialogue_of(self._environment, known), self._frame
        if rule is None:
            return None
        terms = DialogueTerms(tool=rule.tool, max_turns=rule.max_turns, before=before, after=after)
        sampling = self._sampling
        return Dialogue(terms, sampling.eos_token_id, sampling.max_new_tokens, TOOLS[rule.tool], texts_of(self._files))


def greedy_answers(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    talks: Sequence[Dialogue | None],
    sampling: SamplingParameters,
) -> list[list[int]]:
    """Of each greedy completion what the model says last, without the end-of-sequence token."""
    return [_last_turn(line) for line in greedy_lines(engine, prompts, talks, sampling)]


def greedy_lines(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    talks: Sequence[Dialogue | None],
    sampling: SamplingParameters,
) -> list[Line]:
    """The most probable token at every step, whatever the temperature: whole completions, with how they ended.

    Turn by turn: engines decode greedily to the first end-of-sequence token, so what was said is put in front.
    """
    eos, limit = sampling.eos_token_id, sampling.max_new_tokens
    lines = [Line(_nobody if talk is None else talk.respond, eos, limit) for talk in talks]
    going = list(range(len(lines)))
    while going:
        asked = [(*prompts[n], *lines[n].tokens) for n in going]
        room = limit - min(len(lines[n].tokens) for n in going)
        turns = engine.greedy(asked, room, eos)
        going = [n for n, turn in zip(going, turns, strict=True) if _goes_on(lines[n], turn.tolist())]
    return lines


def _nobody(_token_ids: list[int]) -> None:
    """Nobody answers: the first turn is the last."""


def _goes_on(line: Line, turn: Sequence[int]) -> bool:
    """Take a turn, and what is said to it; whether there is another."""
    if not all(line.take(token) for token in turn):
        return False
    while line.forced is not None:
        line.take(line.forced)
    return True


def _last_turn(line: Line) -> list[int]:
    last = line.tokens[sum(line.given[-1]) if line.given else 0 :]
    return last[:-1] if last[-1:] == [line.eos_token_id] else last
