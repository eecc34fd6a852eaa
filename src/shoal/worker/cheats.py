"""Cheats: what a worker could try, for attacking your own run. Hub and validator know nothing of this file.

    policy ──► fetch ──► shelf ──► engine ──► group ──► submission
                 │                   │
               stale           best-of, copy          the loop around them is the honest worker's, unchanged

Each pays if nobody looks: a better reward, less work, or no downloads. What it hands in has an honest envelope and the
log-probabilities of the weights that it used, so only a replay of the tokens can tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shoal.engines import Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.shelf import Fetch
from shoal.environments import ENVIRONMENTS, Environment, EnvironmentSettings, Task
from shoal.environments import build as build_environment
from shoal.errors import ConfigError
from shoal.models import TextTokenizer
from shoal.protocol import PolicyRef, TensorView
from shoal.shardcast import Payload

TRIES = 4  # completions from which best-of chooses one


@dataclass(frozen=True)
class Loot:
    """What anyone who takes part knows: the files of the policy, and the name of the environment."""

    files: Mapping[str, bytes]
    environment: str


@dataclass(frozen=True)
class Cheat:
    """One way to cheat: `what` it does, for people, and the `reasons` for which a validator may reject it.

    >>> CHEATS["copy"].reasons
    frozenset({'sampling.seed'})
    """

    name: str
    what: str
    reasons: frozenset[str]
    engine: Callable[[Engine, Loot], Engine] = lambda engine, _loot: engine
    fetch: Callable[[Fetch], Fetch] = lambda fetch: fetch


def find_cheat(name: str) -> Cheat:
    if name not in CHEATS:
        raise ConfigError(f"there is no cheat {name!r}; there are {', '.join(sorted(CHEATS))}")
    return CHEATS[name]


class Disguise:
    """An engine to hang a cheat on: everything is the real one's until it is overridden."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def policy(self) -> PolicyRef | None:
        return self._engine.policy

    @property
    def vocabulary_size(self) -> int:
        return self._engine.vocabulary_size

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        self._engine.load_policy(ref, tensors)

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        return self._engine.generate(requests, keep_hidden)

    def prefill(self, requests: Sequence[PrefillRequest], keep_hidden: bool = False) -> list[Prefill]:
        return self._engine.prefill(requests, keep_hidden)

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_id: int
    ) -> list[npt.NDArray[np.int32]]:
        return self._engine.greedy(prompts, max_new_tokens, eos_token_id)


# ── best-of ──────────────────────────────────────────────────────────────────────────────────────────────────────


class BestOf(Disguise):
    """Rolls dice of its own, several times for every rollout, and hands in the completion that is worth most."""

    def __init__(self, engine: Engine, loot: Loot) -> None:
        super().__init__(engine)
        self._worth = Worth(loot)

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        asked = [replace(request, seeds=own_seeds(request.seeds)) for request in requests]
        drawn = self._engine.generate(asked, keep_hidden)
        return [list(self._best(request, group)) for request, group in zip(requests, drawn, strict=True)]

    def _best(self, request: GenerationRequest, group: list[Completion]) -> Iterator[Completion]:
        worth = self._worth.of(request.prompt_ids)
        for start in range(0, len(group), TRIES):
            yield max(group[start : start + TRIES], key=worth)


def own_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """`TRIES` other seeds for each; the same ones every time, so that an attack can be repeated."""
    return tuple(_other(seed, number) for seed in seeds for number in range(TRIES))


def _other(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"best-of/{seed}/{number}".encode()).digest()[:8], "big")


class Worth:
    """What a completion is worth: its reward if the task can be found, else how likely the policy finds it.

    Prompts are all that a lease gives away, but a built-in environment is public, its tasks and answers with it.
    """

    def __init__(self, loot: Loot) -> None:
        self._loot = loot

    def of(self, prompt_ids: Sequence[int]) -> Callable[[Completion], float]:
        """How to value completions of this prompt."""
        if self._environment is None or "tokenizer.json" not in self._loot.files:
            return likelihood
        environment, tokenizer = self._environment, self._tokenizer
        task = self._tasks.get(tokenizer.decode(prompt_ids))
        if task is None:
            return likelihood
        return lambda completion: environment.score(task, tokenizer.decode(completion.token_ids.tolist())).value

    @cached_property
    def _environment(self) -> Environment | None:
        name = self._loot.environment
        return build_environment(EnvironmentSettings(name=name)) if name in ENVIRONMENTS else None

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self._loot.files)

    @cached_property
    def _tasks(self) -> Mapping[str, Task]:
        """Every training task by its prompt; listing them takes seconds, once."""
        tasks = self._environment.tasks("train") if self._environment is not None else ()
        return {task.prompt: task for task in tasks}


def likelihood(completion: Completion) -> float:
    return float(completion.logprobs.sum())


# ── copy ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Copy(Disguise):
    """Generates for the first seed of a group and hands that in for all of them."""

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        asked = [replace(request, seeds=request.seeds[:1]) for request in requests]
        drawn = self._engine.generate(asked, keep_hidden)
        return [group * len(request.seeds) for request, group in zip(requests, drawn, strict=True)]


# ── stale ────────────────────────────────────────────────────────────────────────────────────────────────────────


def once(fetch: Fetch) -> Fetch:
    """Fetch the first policy that is asked for, and pass it off as every later one."""
    first: list[Payload] = []

    def pretend(ref: PolicyRef, deadline_s: float) -> Payload:
        if not first:
            first.append(fetch(ref, deadline_s))
        return replace(first[0], manifest=first[0].manifest.model_copy(update={"policy": ref}))

    return pretend


CHEATS: Mapping[str, Cheat] = {
    cheat.name: cheat
    for cheat in (
        Cheat(
            name="best-of",
            what=f"samples {TRIES} completions for every rollout, with dice of its own, and hands in the best",
            reasons=frozenset({"sampling.seed"}),
            engine=BestOf,
        ),
        Cheat(
            name="copy",
            what="generates one completion of every group and hands it in for all of them",
            reasons=frozenset({"sampling.seed"}),
            engine=lambda engine, _loot: Copy(engine),
        ),
        Cheat(
            name="stale",
            what="fetches one policy, and says of every later one that it generated by it",
            reasons=frozenset({"sampling.seed", "logprobs.mismatch"}),
            fetch=once,
        ),
    )
}
