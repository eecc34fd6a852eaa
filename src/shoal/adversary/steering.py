"""Steering within the tolerance: cheats that know how far off a token may be and still pass.

If the uniform is within the tolerance of the edge of a token's interval, the token on the other side of the edge passes
too. `Steering` always takes that one; `Branching` tries a few such places and keeps the branch with the best reward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from shoal.adversary.base import Cheat, EngineWrapper, RewardOracle, cheating, with_honest_proofs
from shoal.engines import Completion, Engine, Finish, GenerationRequest, Groups, Prefill, PrefillRequest, TokenIds
from shoal.models.ending import EndRule
from shoal.protocol import ProofParameters
from shoal.sampling import SeedTolerance, uniforms, uniforms_at

BRANCHES = 4
SEEDS = 2**20
REACH = 2e-6  # twice what float32 moves an interval by on average: farther ones show in the sum of distances
SPACING = 2.0 / SEEDS  # so near there is a seed to every uniform
MAX_VOCABULARY = 4096  # `Steering` looks at every token of the vocabulary, one by one


@dataclass(frozen=True)
class Fork:
    """A place where another token passes too: the first uniform of `seed` draws it."""

    group: int
    rollout: int
    request: GenerationRequest
    kept: TokenIds
    seed: int


class Branching(EngineWrapper):
    """One token of a rollout is another one, by the tolerance; all others are what the lease's seed gives after it.
    `value_of` says what completions of a prompt are worth, `reach` how far u may be from an edge. A seed of its own,
    whose uniform lies beyond the edge, draws the neighbour, without a look at the vocabulary."""

    def __init__(
        self, engine: Engine, value_of: Callable[[tuple[int, ...]], Callable[[Completion], float]], reach: float,
        tries: int = BRANCHES,
    ) -> None:  # fmt: skip
        super().__init__(engine)
        self._value_of, self._reach, self._tries = value_of, reach, tries

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        best = [list(group) for group in self._engine.generate(requests, None)]
        pairs = enumerate(zip(requests, best, strict=True))
        forks = [fork for group, (request, drawn) in pairs for fork in self._forks(group, request, drawn)]
        for fork, branch in zip(forks, self._branches(forks), strict=True):
            value, group = self._value_of(fork.request.prompt_ids), best[fork.group]
            if value(branch) > value(group[fork.rollout]):
                group[fork.rollout] = branch
        return with_honest_proofs(self._engine, requests, best, proof)

    def _forks(self, group: int, request: GenerationRequest, drawn: Sequence[Completion]) -> Iterator[Fork]:
        """The first places of each rollout where u lies within reach of an edge."""
        prompt, temperature = request.prompt_ids, request.sampling.temperature
        seen = self._engine.prefill([PrefillRequest(prompt, each.token_ids, temperature) for each in drawn])
        for rollout, (seed, prefill) in enumerate(zip(request.seeds, seen, strict=True)):
            u_T = uniforms(seed, 0, len(prefill.cdf_low))
            below_T, above_T = u_T - prefill.cdf_low, prefill.cdf_high - u_T
            beyond_T = np.where(below_T < above_T, prefill.cdf_low - SPACING, prefill.cdf_high + SPACING)
            is_near_T = (np.minimum(below_T, above_T) < self._reach) & (beyond_T > 0) & (beyond_T < 1)
            for place in np.flatnonzero(is_near_T)[: self._tries].tolist():
                kept = drawn[rollout].token_ids[:place]
                yield Fork(group, rollout, request, kept, seed_of(float(beyond_T[place])))

    def _branches(self, forks: Sequence[Fork]) -> list[Completion]:
        """The completion of every fork, up to its end: two calls, however many there are."""
        alone, rest = [], []
        for fork in forks:
            one = fork.request.sampling.model_copy(update={"max_new_tokens": 1})
            ids = (*fork.request.prompt_ids, *fork.kept.tolist())
            alone.append(replace(fork.request, prompt_ids=ids, seeds=(fork.seed,), sampling=one))
        others = [group[0].token_ids for group in self._engine.generate(alone)]
        begun = [np.concatenate([fork.kept, other]) for fork, other in zip(forks, others, strict=True)]
        for fork, begin in zip(forks, begun, strict=True):
            ids, seeds = (*fork.request.prompt_ids, *begin.tolist()), (fork.request.seeds[fork.rollout],)
            rest.append(replace(fork.request, prompt_ids=ids, seeds=seeds, begun=len(begin)))
        found = []
        for request, begin, group in zip(rest, begun, self._engine.generate(rest), strict=True):
            tokens = np.concatenate([begin, group[0].token_ids])[: request.sampling.max_new_tokens]
            end = EndRule.of(request.sampling, request.decode).first(tokens.tolist())
            tokens, finish = tokens[:end], _finish(end)
            found.append(Completion(tokens, np.zeros(len(tokens), dtype=np.float32), finish))
        return found


def _finish(end: int | None) -> Finish:
    return "length" if end is None else "eos"


def seed_of(uniform: float) -> int:
    """A seed whose first uniform is next to this one."""
    values, seeds = _sorted_seeds()
    return int(seeds[min(int(np.searchsorted(values, uniform)), len(seeds) - 1)])


@cache
def _sorted_seeds() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    values = uniforms_at(np.arange(SEEDS, dtype=np.uint64), np.zeros(SEEDS, dtype=np.uint64))
    order = np.argsort(values)
    return values[order], order


class Steering(EngineWrapper):
    """Stays within `distance` of the uniform and avoids tokens below `floor`, so no single token shows it."""

    def __init__(self, engine: Engine, tolerance: SeedTolerance) -> None:
        super().__init__(engine)
        self._reach, self._floor = tolerance.distance, tolerance.floor

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        drawn = self._engine.generate(requests, proof)
        if self.vocabulary_size > MAX_VOCABULARY:
            return drawn
        groups = []
        for request, group in zip(requests, drawn, strict=True):
            temperature = request.sampling.temperature
            asked = [PrefillRequest(request.prompt_ids, one.token_ids, temperature) for one in group]
            seen = self._engine.prefill(asked)
            triples = zip(request.seeds, group, seen, strict=True)
            groups.append([self._steered(request, seed, each, prefill) for seed, each, prefill in triples])
        return with_honest_proofs(self._engine, requests, groups, proof)

    def _steered(self, request: GenerationRequest, seed: int, honest: Completion, seen: Prefill) -> Completion:
        """Honest up to the first place with a choice; from there on token by token."""
        sampling = request.sampling
        stream_T = uniforms(seed, 0, sampling.max_new_tokens)
        u_T = stream_T[: len(honest.token_ids)]
        first = np.flatnonzero(np.minimum(u_T - seen.cdf_low, seen.cdf_high - u_T) < self._reach)[:1].tolist()
        if not first:
            return honest
        tokens = honest.token_ids[: first[0]].tolist()
        ending = EndRule.of(sampling, request.decode)
        while len(tokens) < sampling.max_new_tokens and ending.first(tokens) is None:
            prefix = (*request.prompt_ids, *tokens)
            tokens.append(self._choice(prefix, float(stream_T[len(tokens)]), sampling.temperature))
        finish = _finish(ending.first(tokens))
        return replace(honest, token_ids=np.array(tokens, dtype=np.int32), finish=finish)

    def _choice(self, prefix: tuple[int, ...], u: float, temperature: float) -> int:
        """The likeliest token whose interval is within reach of the uniform but does not contain it."""
        every = (np.array([token], dtype=np.int32) for token in range(self.vocabulary_size))
        answers = self._engine.prefill([PrefillRequest(prefix, token, temperature) for token in every])
        low_V, high_V = np.array([(each.cdf_low[0], each.cdf_high[0]) for each in answers], dtype=np.float64).T
        outside_V = np.maximum(np.maximum(low_V - u, u - high_V), 0.0)
        drawn = int(np.argmin(outside_V))
        others_V = (outside_V < self._reach) & (high_V - low_V > self._floor) & (np.arange(len(low_V)) != drawn)
        return int(np.argmax(np.where(others_V, high_V - low_V, -1.0))) if others_V.any() else drawn


def steer(tolerance: SeedTolerance = SeedTolerance()) -> type[Cheat]:
    return cheating(
        "steer", "takes the next token wherever the uniform is so near an edge that both pass",
        {"sampling.seed", "sampling.drift"}, engine=lambda engine, _context: Steering(engine, tolerance),
    )  # fmt: skip


CHEATS = (
    steer(),
    cheating("branch", "decodes neighbours of such tokens, and submits the branch that pays best",
        {"sampling.seed", "sampling.drift", "sampling.steered"},
        engine=lambda engine, context: Branching(engine, RewardOracle(context).of, REACH)),
)  # fmt: skip
