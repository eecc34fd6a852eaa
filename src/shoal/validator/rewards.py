"""The reward, computed here and nowhere else: tokens to text by the policy's own tokenizer, text to score.

A failure of the scoring machinery is `ScoringFailure`: the group then yields no sample, never a reward of 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.environments import Environment, ObjectingEnvironment, Score, Task
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.models import TextTokenizer
from shoal.protocol import Lease, Rollout, RolloutReward
from shoal.protocol.verdict import MAX_REWARD
from shoal.validator.case import Finding, failed

Decode = Callable[[Sequence[list[int]]], list[str]]

MAX_PARTS = 64


class Decoders:
    """How a policy's tokens become texts, by its own tokenizer; the last tokenizer is kept, for versions share it.

    A policy without a tokenizer (the scripted engine's) has tokens that are characters.
    """

    def __init__(self) -> None:
        self._files: Mapping[str, bytes] = {}
        self._decode: Decode = _characters

    def of(self, files: Mapping[str, bytes]) -> Decode:
        if files != self._files:
            self._decode = TextTokenizer(files).decode_many if "tokenizer.json" in files else _characters
            self._files = dict(files)
        return self._decode


def _characters(completions: Sequence[list[int]]) -> list[str]:
    return ["".join(chr(token) for token in token_ids) for token_ids in completions]


def completion_ids(rollout: Rollout, eos_token_id: int) -> list[int]:
    """The tokens to be scored: one end-of-sequence token at the end is no part of the completion."""
    ids: list[int] = rollout.token_ids.tolist()
    return ids[:-1] if ids and ids[-1] == eos_token_id else ids


@dataclass(frozen=True)
class Scored:
    """What the environment says of a group: its rewards, or what it objects to."""

    rewards: tuple[RolloutReward, ...] = ()
    objection: Finding | None = None


def score_group(environment: Environment, lease: Lease, rollouts: Sequence[Rollout], decode: Decode) -> Scored:
    """The reward of every rollout, or `ScoringFailure`; a group is scored whole or not at all.

    Equal completions are scored once: an environment is deterministic, and easy tasks have few answers.
    """
    try:
        task = environment.task(lease.task)
    except EnvironmentSetupError as error:
        raise ScoringFailure(f"the environment does not know the lease's task: {error}") from error
    eos = lease.sampling.eos_token_id
    distinct = list({rollout.tokens: rollout for rollout in rollouts}.values())
    decoded = decode([completion_ids(rollout, eos) for rollout in distinct])
    texts = {rollout.tokens: text for rollout, text in zip(distinct, decoded, strict=True)}
    if isinstance(environment, ObjectingEnvironment):
        for index, rollout in enumerate(rollouts):
            objection = environment.objection(task, texts[rollout.tokens])
            if objection:
                return Scored(objection=_objected(index, objection))
    rewards = {tokens: _reward(environment, task, text) for tokens, text in texts.items()}
    return Scored(tuple(rewards[rollout.tokens] for rollout in rollouts))


def _objected(rollout: int, objection: str) -> Finding:
    return failed(
        "environment.objection", f"rollout {rollout}: the environment objects: {objection}", None, rollout=rollout
    )


def _reward(environment: Environment, task: Task, completion: str) -> RolloutReward:
    score: Score = environment.score(task, completion)
    numbers = [score.value, *score.parts.values()]
    if not all(abs(number) <= MAX_REWARD for number in numbers) or len(score.parts) > MAX_PARTS:
        raise ScoringFailure(
            f"environment {environment.name} gave the score {score.value!r} with {len(score.parts)} parts for task "
            f"{task.id}; scores and at most {MAX_PARTS} parts must be numbers within ±{MAX_REWARD:g}"
        )
    return RolloutReward(value=float(score.value), parts={key: float(part) for key, part in score.parts.items()})


def shuffled(rewards: Sequence[RolloutReward], run: str, unit: int) -> tuple[RolloutReward, ...]:
    """The control experiment: the same rewards on other rollouts of the group, the same way at every try.

    A group keeps its mean and its spread, so everything is as before but the connection to what was generated. The
    part `shuffled_from` says whose reward it is.
    """
    digest = hashlib.sha256(f"shoal/shuffle/v1\n{run}\n{unit}".encode()).digest()
    order = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big"))).permutation(len(rewards))
    return tuple(
        RolloutReward(value=rewards[i].value, parts={**rewards[i].parts, "shuffled_from": float(i)})
        for i in order.tolist()
    )
