"""The sleeper: earns trust with honest work, and spends it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.adversary.base import OTHER_TOKENS, Cheat, Disguise, Groups, Loot
from shoal.adversary.dice import ChoosingEngine
from shoal.engines import Engine, GenerationRequest
from shoal.protocol import ProofParameters

HONEST_UNITS = 12


class Sleeper(Cheat):
    name = "sleeper"
    what = f"is honest for {HONEST_UNITS} groups, and from then on does what best-of does"
    reasons = OTHER_TOKENS

    def __init__(self, honest_units: int = HONEST_UNITS) -> None:
        self._honest_units = honest_units

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        return Sleeping(engine, ChoosingEngine(engine, loot), self._honest_units)


class Sleeping(Disguise):
    """One engine until it has answered `honest_units` requests, another from then on."""

    def __init__(self, engine: Engine, awake: Engine, honest_units: int) -> None:
        super().__init__(engine)
        self._awake = awake
        self._honest_left = honest_units

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        honest, rest = requests[: self._honest_left], requests[self._honest_left :]
        self._honest_left -= len(honest)
        return [
            *(self._engine.generate(honest, proof) if honest else ()),
            *(self._awake.generate(rest, proof) if rest else ()),
        ]
