"""Cheats that do not let the lease's dice fall where they fall: each has honest proofs and log-probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.adversary.base import OTHER_TOKENS, Cheat, Disguise, Groups, Loot, Worth, vouched
from shoal.engines import Completion, Engine, GenerationRequest
from shoal.protocol import ProofParameters, SamplingParameters

TRIES = 4  # completions from which best-of and grind choose one
COLD = 0.7


class OwnDice(Cheat):
    name = "own-dice"
    what = "ignores the seeds of its leases and rolls dice of its own"
    reasons = OTHER_TOKENS

    def engine(self, engine: Engine, _loot: Loot, /) -> Engine:
        return OwnSeeds(engine)


class OwnSeeds(Disguise):
    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        asked = [replace(request, seeds=own_seeds(request.seeds, 1)) for request in requests]
        return self._engine.generate(asked, proof)


class BestOf(Cheat):
    name = "best-of"
    what = f"samples {TRIES} completions for every rollout, with dice of its own, and hands in the best"
    reasons = OTHER_TOKENS

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        return ChoosingEngine(engine, loot)


class ChoosingEngine(Disguise):
    """Rolls dice of its own, several times for every rollout, and hands in the completion that is worth most."""

    def __init__(self, engine: Engine, loot: Loot) -> None:
        super().__init__(engine)
        self._worth = Worth(loot)

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        asked = [replace(request, seeds=own_seeds(request.seeds)) for request in requests]
        drawn = self._engine.generate(asked, proof)
        return [list(self._best(request, group)) for request, group in zip(requests, drawn, strict=True)]

    def _best(self, request: GenerationRequest, group: list[Completion]) -> Iterator[Completion]:
        worth = self._worth.of(request.prompt_ids)
        for start in range(0, len(group), TRIES):
            yield max(group[start : start + TRIES], key=worth)


def own_seeds(seeds: Sequence[int], tries: int = TRIES) -> tuple[int, ...]:
    """`tries` other seeds for each; the same ones every time, so that an attack can be repeated."""
    return tuple(_other(seed, number) for seed in seeds for number in range(tries))


def _other(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"best-of/{seed}/{number}".encode()).digest()[:8], "big")


class Grind(Cheat):
    name = "grind"
    what = f"draws by the seeds it was given, and hands in the best of every {TRIES} for all {TRIES} of them"
    reasons = OTHER_TOKENS | {"duplicate.rollout", "duplicate.proof"}

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        return Grinding(engine, loot)


class Grinding(ChoosingEngine):
    """Every completion is one that some seed of the very lease gives, under the right policy: but not this seed."""

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        drawn = self._engine.generate(requests, proof)
        return [
            [best for best in self._best(request, group) for _ in range(TRIES)][: len(group)]
            for request, group in zip(requests, drawn, strict=True)
        ]


class Greedy(Cheat):
    name = "greedy"
    what = "takes the likeliest token at every step instead of drawing one"
    reasons = OTHER_TOKENS | {"duplicate.rollout", "duplicate.proof"}

    def engine(self, engine: Engine, _loot: Loot, /) -> Engine:
        return TakingTheLikeliest(engine)


class TakingTheLikeliest(Disguise):
    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        groups = [self._likeliest(request) for request in requests]
        return vouched(self._engine, requests, groups, proof)

    def _likeliest(self, request: GenerationRequest) -> list[Completion]:
        [drawn] = self._engine.generate([replace(request, seeds=request.seeds[:1])], None)
        sampling = request.sampling
        [tokens] = self._engine.greedy([request.prompt_ids], sampling.max_new_tokens, sampling.eos_token_id)
        ended = int(tokens[-1]) == sampling.eos_token_id
        return [replace(drawn[0], token_ids=tokens, finish="eos" if ended else "length")] * len(request.seeds)


class Cold(Cheat):
    name = "cold"
    what = f"samples at {COLD} times the temperature of the lease"
    reasons = OTHER_TOKENS

    def engine(self, engine: Engine, _loot: Loot, /) -> Engine:
        return Cooled(engine)


class Loose(Cold):
    name = "loose"
    what = (
        f"says that it computes in bfloat16, so that more is forgiven it, and samples at {COLD} times the temperature"
    )

    def profile(self, profile: str, known: Sequence[str], /) -> str:
        engine, device, _ = profile.split("/")
        claimed = f"{engine}/{device}/bfloat16"
        return claimed if claimed in known else profile


class Cooled(Disguise):
    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        asked = [replace(request, sampling=_cooled(request)) for request in requests]
        return vouched(self._engine, requests, self._engine.generate(asked, None), proof)


def _cooled(request: GenerationRequest) -> SamplingParameters:
    return request.sampling.model_copy(update={"temperature": COLD * request.sampling.temperature})
