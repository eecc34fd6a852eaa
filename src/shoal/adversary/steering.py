"""Steering inside the tolerance: a cheat for whoever knows how far off a token may be and still pass.

Where the uniform falls next to the edge of a token's interval, within the tolerance, the token on the other side of the
edge passes too. The steerer always takes that one: the completion goes another way, and no single token betrays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from shoal.adversary.base import Cheat, Disguise, Loot, Worth, vouched
from shoal.engines import Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.protocol import Finish, Groups
from shoal.protocol import ProofParameters
from shoal.sampling import SeedTolerance, uniforms, uniforms_at

BRANCHES = 4
SEEDS = 2**20
REACH = 2e-6  # twice what float32 moves an interval by on average: farther ones show in the sum of distances
SPACING = 2.0 / SEEDS  # so near there is a seed to every uniform

Value = Callable[[Completion], float]


class Branch(Cheat):
    name = "branch"
    what = (
        f"decodes up to {BRANCHES} neighbours of tokens whose uniform lies next to an edge, with honest draws after "
        "them, and submits the branch that pays best"
    )
    reasons = frozenset({"sampling.seed", "sampling.drift", "sampling.steered"})

    def __init__(self, reach: float = REACH, tries: int = BRANCHES) -> None:
        self._reach = reach
        self._tries = tries

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        return Branching(engine, Worth(loot).of, self._reach, self._tries)


@dataclass(frozen=True)
class Fork:
    """A place where another token passes too: the first uniform of `seed` draws it."""

    group: int
    rollout: int
    token: int
    seed: int


class Branching(Disguise):
    """One token of a rollout is another one, by the tolerance; all others are what the lease's seed gives after it.

    `value_of` says what completions of a prompt are worth, `reach` how far u may be from an edge. It needs no look at
    the vocabulary: a seed of its own choice, whose uniform lies beyond the edge, draws the neighbour.
    """

    def __init__(
        self, engine: Engine, value_of: Callable[[tuple[int, ...]], Value], reach: float, tries: int = BRANCHES
    ) -> None:
        super().__init__(engine)
        self._value_of, self._reach, self._tries = value_of, reach, tries

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        honest = self._engine.generate(requests, None)
        forks = [
            fork
            for group, (request, drawn) in enumerate(zip(requests, honest, strict=True))
            for fork in self._forks(group, request, drawn)
        ]
        best = [list(group) for group in honest]
        for fork, branch in zip(forks, self._branches(requests, honest, forks), strict=True):
            value = self._value_of(requests[fork.group].prompt_ids)
            if value(branch) > value(best[fork.group][fork.rollout]):
                best[fork.group][fork.rollout] = branch
        return vouched(self._engine, requests, best, proof)

    def _forks(self, group: int, request: GenerationRequest, drawn: Sequence[Completion]) -> Iterator[Fork]:
        """The first places of each rollout where u lies within reach of an edge."""
        prompt, temperature = request.prompt_ids, request.sampling.temperature
        seen = self._engine.prefill([PrefillRequest(prompt, each.token_ids, temperature) for each in drawn])
        for rollout, (seed, prefill) in enumerate(zip(request.seeds, seen, strict=True)):
            u_T = uniforms(seed, 0, len(prefill.cdf_low))
            below_T, above_T = u_T - prefill.cdf_low, prefill.cdf_high - u_T
            beyond_T = np.where(below_T < above_T, prefill.cdf_low - SPACING, prefill.cdf_high + SPACING)
            is_near_T = (np.minimum(below_T, above_T) < self._reach) & (beyond_T > 0) & (beyond_T < 1)
            for token in np.flatnonzero(is_near_T)[: self._tries].tolist():
                yield Fork(group, rollout, token, seed_of(float(beyond_T[token])))

    def _branches(
        self, requests: Sequence[GenerationRequest], honest: Groups, forks: Sequence[Fork]
    ) -> list[Completion]:
        """The completion of every fork: two calls, however many there are."""
        kept = [honest[fork.group][fork.rollout].token_ids[: fork.token] for fork in forks]
        asked = [requests[fork.group] for fork in forks]
        ids = [request.prompt_ids for request in asked]
        alone = [request.sampling.model_copy(update={"max_new_tokens": 1}) for request in asked]
        one = [
            replace(request, prompt_ids=(*prompt, *begin.tolist()), seeds=(fork.seed,), sampling=sampling)
            for request, prompt, begin, fork, sampling in zip(asked, ids, kept, forks, alone, strict=True)
        ]
        others = [group[0].token_ids for group in self._engine.generate(one)]
        begun = [np.concatenate(pair) for pair in zip(kept, others, strict=True)]
        seeds = [(requests[fork.group].seeds[fork.rollout],) for fork in forks]
        rest = [
            replace(request, prompt_ids=(*prompt, *begin.tolist()), seeds=seed, begun=len(begin))
            for request, prompt, begin, seed in zip(asked, ids, begun, seeds, strict=True)
        ]
        drawn = [group[0].token_ids for group in self._engine.generate(rest)]
        return [_whole(*branch) for branch in zip(asked, begun, drawn, strict=True)]


def _whole(request: GenerationRequest, begun: npt.NDArray[np.int32], drawn: npt.NDArray[np.int32]) -> Completion:
    """What begins and what was drawn after it, up to its end."""
    sampling, tokens = request.sampling, np.concatenate([begun, drawn])[: request.sampling.max_new_tokens]
    ends = np.flatnonzero(tokens == sampling.eos_token_id)
    tokens = tokens[: ends[0] + 1] if len(ends) else tokens
    return Completion(tokens, np.zeros(len(tokens), dtype=np.float32), "eos" if len(ends) else "length")


def seed_of(uniform: float) -> int:
    """A seed whose first uniform is next to this one."""
    values, seeds = _sorted_seeds()
    return int(seeds[min(int(np.searchsorted(values, uniform)), len(seeds) - 1)])


@cache
def _sorted_seeds() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    values = uniforms_at(np.arange(SEEDS, dtype=np.uint64), np.zeros(SEEDS, dtype=np.uint64))
    order = np.argsort(values)
    return values[order], order


MAX_VOCABULARY = 4096  # it looks at every token of the vocabulary, one by one


class Steer(Cheat):
    name = "steer"
    what = "takes the next token in line wherever the uniform falls so near an edge that both would pass"
    reasons = frozenset({"sampling.seed", "sampling.drift"})

    def __init__(self, tolerance: SeedTolerance | None = None) -> None:
        self._tolerance = tolerance or SeedTolerance()

    def engine(self, engine: Engine, _loot: Loot, /) -> Engine:
        return SteeringEngine(engine, self._tolerance)


class SteeringEngine(Disguise):
    """Stays within `distance` of the uniform, and away from tokens below `floor`: no single token gives it away."""

    def __init__(self, engine: Engine, tolerance: SeedTolerance) -> None:
        super().__init__(engine)
        self._reach, self._floor = tolerance.distance, tolerance.floor

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        drawn = self._engine.generate(requests, proof)
        if self.vocabulary_size > MAX_VOCABULARY:
            return drawn
        flat = [
            PrefillRequest(request.prompt_ids, each.token_ids, request.sampling.temperature)
            for request, group in zip(requests, drawn, strict=True)
            for each in group
        ]
        seen = iter(self._engine.prefill(flat))
        groups = [
            [self._steered(request, seed, each, next(seen)) for seed, each in zip(request.seeds, group, strict=True)]
            for request, group in zip(requests, drawn, strict=True)
        ]
        return vouched(self._engine, requests, groups, proof)

    def _steered(self, request: GenerationRequest, seed: int, honest: Completion, seen: Prefill) -> Completion:
        """Honest up to the first place where there is a choice; from there on token by token."""
        sampling = request.sampling
        stream_T = uniforms(seed, 0, sampling.max_new_tokens)
        u_T = stream_T[: len(honest.token_ids)]
        near_T = np.minimum(u_T - seen.cdf_low, seen.cdf_high - u_T)
        first = np.flatnonzero(near_T < self._reach)[:1].tolist()
        if not first:
            return honest
        tokens = honest.token_ids[: first[0]].tolist()
        while len(tokens) < sampling.max_new_tokens and sampling.eos_token_id not in tokens[-1:]:
            prefix = (*request.prompt_ids, *tokens)
            tokens.append(self._choice(prefix, float(stream_T[len(tokens)]), sampling.temperature))
        finish: Finish = "eos" if tokens[-1] == sampling.eos_token_id else "length"
        return replace(honest, token_ids=np.array(tokens, dtype=np.int32), finish=finish)

    def _choice(self, prefix: tuple[int, ...], u: float, temperature: float) -> int:
        """Of all tokens whose interval is within reach of the uniform, the likeliest that it does not fall into."""
        asked = [
            PrefillRequest(prefix, np.array([token], dtype=np.int32), temperature)
            for token in range(self.vocabulary_size)
        ]
        answers = self._engine.prefill(asked)
        low_V, high_V = np.array([(each.cdf_low[0], each.cdf_high[0]) for each in answers], dtype=np.float64).T
        outside_V = np.maximum(np.maximum(low_V - u, u - high_V), 0.0)
        drawn = int(np.argmin(outside_V))
        others_V = (outside_V < self._reach) & (high_V - low_V > self._floor) & (np.arange(len(low_V)) != drawn)
        return int(np.argmax(np.where(others_V, high_V - low_V, -1.0))) if others_V.any() else drawn
