"""The attacker who stays within the tolerance: what it can change, and how soon it is caught."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from shoal.hub.state.reputation import recent
from shoal.protocol import Tally
from shoal.sampling import SeedTolerance, check_seeded
from shoal.sampling.check import distances
from shoal.sampling.inverse import Floats, cumulative, intervals, sample
from shoal.validator.evidence import STRIKE, in_units, log_evidence
from shoal.validator.profiles import ChannelLimits, NoiseLimits

FLOAT32 = SeedTolerance()
COARSE = SeedTolerance(distance=0.15, floor=1e-12)  # as bfloat16
COARSE_NOISE = NoiseLimits(
    outside=ChannelLimits(rate=0.04, unit=1.0), distance=ChannelLimits(rate=0.04 * 0.008, unit=0.008)
)
VOCABULARY = 400


@dataclass(frozen=True)
class Steering:
    """`preference`: one number per token, most wanted highest. Only a share `chance` of positions is steered."""

    preference: Floats
    reach: float
    floor: float
    chance: float = 1.0

    def choose(
        self, logits_BV: npt.NDArray[np.float32], uniforms_B: Floats, temperature: float, rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """The most preferred token within reach, for each row; the honest one where no other is preferred."""
        probabilities_BV, high_BV = cumulative(logits_BV, temperature)
        low_BV = high_BV - probabilities_BV
        honest_B, _ = sample(logits_BV, uniforms_B, temperature)
        u_B1 = uniforms_B[:, None]
        within_BV = (low_BV - self.reach < u_B1) & (u_B1 < high_BV + self.reach) & (probabilities_BV >= self.floor)
        np.put_along_axis(within_BV, honest_B[:, None], True, axis=1)
        wanted_B = np.where(within_BV, self.preference, -np.inf).argmax(axis=1)
        chosen_B: npt.NDArray[np.int64] = np.where(rng.random(len(honest_B)) < self.chance, wanted_B, honest_B)
        return chosen_B


def distributions(tokens: int, seed: int) -> np.ndarray:
    """Logits of ordinary entropy (about 2.5), with a long tail."""
    return np.random.default_rng(seed).normal(0, 3.0, (tokens, VOCABULARY)).astype(np.float32)


def steered(tokens: int, limits: SeedTolerance, chance: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    logits, u = distributions(tokens, seed), rng.random(tokens)
    said = Steering(rng.random(VOCABULARY), limits.distance, limits.floor, chance).choose(logits, u, 1.0, rng)
    changed = int((said != sample(logits, u, 1.0)[0]).sum())
    return (u, *intervals(logits, said, 1.0)), changed


def test_it_never_goes_beyond_and_never_says_what_is_implausible():
    for limits in (FLOAT32, COARSE):
        arguments, _ = steered(400, limits, 1.0)
        assert check_seeded(*arguments, limits).passed


def test_a_higher_floor_leaves_only_probable_tokens_to_it():
    limits = SeedTolerance(distance=0.15, floor=1e-2)
    arguments, changed = steered(400, limits, 1.0)
    assert changed > 100
    assert check_seeded(*arguments, limits).min_probability_outside >= limits.floor


def test_without_reach_it_is_honest():
    arguments, changed = steered(400, SeedTolerance(distance=0.0), 1.0)
    assert changed == 0
    assert check_seeded(*arguments).n_outside == 0


@pytest.mark.parametrize("seed", range(5))
def test_at_float32_almost_nothing_can_be_changed_and_it_shows_at_once(seed):
    arguments, changed = steered(2048, FLOAT32, 1.0, seed)
    assert changed < 2048 * 0.02
    assert evidence(tally(arguments, NoiseLimits())) >= STRIKE


@pytest.mark.parametrize("seed", range(5))
def test_at_a_coarse_tolerance_it_changes_much_and_is_caught_within_16_tokens(seed):
    arguments, changed = steered(16, COARSE, 1.0, seed)
    assert changed > 10
    assert evidence(tally(arguments, COARSE_NOISE)) >= STRIKE


def tally(arguments, noise: NoiseLimits) -> Tally:
    """What a submission of these tokens adds to its node's record, if each distribution has 2.5 nats."""
    u, low, high, _ = arguments
    outside = ~((low <= u) & (u < high))
    seen = {"outside": float(outside.sum()), "distance": float(distances(u, low, high).sum())}
    limits = {name: getattr(noise, name) for name in seen}
    nats = 2.5 * len(u)
    return Tally(
        tokens=len(u), channels={name: in_units(seen[name], limits[name].rate * nats, limits[name]) for name in seen}
    )


def evidence(record: Tally) -> float:
    return max(log_evidence(name, record.of(name)) for name in ("outside", "distance"))


def recorded(chance: float, submissions: int):
    """The node's record over submissions of 64 tokens; how many pass alone, and when the record gave it away."""
    record, alone, changed = Tally(), 0, 0
    for n in range(1, submissions + 1):
        arguments, count = steered(64, COARSE, chance, seed=n)
        this = tally(arguments, COARSE_NOISE)
        alone, changed, record = alone + (evidence(this) < STRIKE), changed + count, record.plus(this)
        if evidence(record) >= STRIKE:
            return n, alone, changed / record.tokens
        record = recent(record)
    return None, alone, changed / record.tokens


def test_a_patient_one_passes_nearly_each_time_and_is_caught_by_the_record():
    caught_at, alone, _ = recorded(0.02, 60)
    assert caught_at is not None
    assert alone >= 0.75 * caught_at


def test_what_is_left_below_detection_is_less_than_rounding_itself_changes():
    """One that steers so rarely that a long record stays silent; it needs to have no rounding noise of its own."""
    caught_at, _, changed = recorded(0.005, 160)
    assert caught_at is None
    assert changed < 0.04 / 4
