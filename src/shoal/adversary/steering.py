"""Steering inside the tolerance: a cheat for whoever knows how far off a token may be and still pass.

Where the dice fall next to the edge of a token's interval, within the tolerance, the token on the other side of the
edge passes too. The steerer always takes that one: the completion goes another way, and no single token betrays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shoal.adversary.base import Cheat, Disguise, Groups, Loot, vouched
from shoal.engines import Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.protocol import Finish
from shoal.protocol import ProofParameters
from shoal.sampling import SeedTolerance, uniforms

MAX_VOCABULARY = 4096  # it looks at every token of the vocabulary, one by one


class Steer(Cheat):
    name = "steer"
    what = "takes the next token in line wherever the dice fall so near an edge that both would pass"
    reasons = frozenset({"sampling.seed", "sampling.drift"})

    def __init__(self, tolerance: SeedTolerance | None = None) -> None:
        self._tolerance = tolerance or SeedTolerance()

    def engine(self, engine: Engine, _loot: Loot, /) -> Engine:
        return SteeringEngine(engine, self._tolerance)


class SteeringEngine(Disguise):
    """Stays within `distance` of the dice, and away from tokens below `floor`: no single token gives it away."""

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
        """Of all tokens whose interval is within reach of the dice, the likeliest that is not the dice's own."""
        asked = [
            PrefillRequest(prefix, np.array([token], dtype=np.int32), temperature)
            for token in range(self.vocabulary_size)
        ]
        answers = self._engine.prefill(asked)
        low_V, high_V = _column(answers, "cdf_low"), _column(answers, "cdf_high")
        outside_V = np.maximum(np.maximum(low_V - u, u - high_V), 0.0)
        drawn = int(np.argmin(outside_V))
        others_V = (outside_V < self._reach) & (high_V - low_V > self._floor) & (np.arange(len(low_V)) != drawn)
        return int(np.argmax(np.where(others_V, high_V - low_V, -1.0))) if others_V.any() else drawn


def _column(answers: Sequence[Prefill], name: str) -> npt.NDArray[np.float64]:
    return np.array([float(getattr(answer, name)[0]) for answer in answers])
