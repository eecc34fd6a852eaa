"""Checks whether a sequence of tokens follows its seed, after the validator's own prefill.

Logits of two machines differ by rounding, so an honest u may be just outside the interval that the validator computes.
Two properties of single tokens are checked here; whether a node's tokens are outside too often, or too far in sum, is
decided over all its submissions (`shoal.validator.evidence`).

    beyond       some u is farther outside its token's interval than rounding can explain
    implausible  some token passes only by the tolerance, and the policy would hardly ever draw it
                 (an interval of width 1e-12 next to u is near, but no rounding error puts a token there)

The limits come from a profile. The defaults are for float32 on both sides: with 135 M weights and 49,152 tokens,
decoding and prefill differed by 3e-7 on average and by at most 4.5e-6. With a vocabulary of 262,144 an honest token has
a probability below the floor once in 10⁹.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Reason = Literal["beyond", "implausible"]
Floats = npt.NDArray[np.float64]
Logprobs = npt.NDArray[np.floating]


@dataclass(frozen=True)
class SeedTolerance:
    """The differences that rounding may explain for one token. `distance`: of u to its token's interval. `floor`: the
    smallest probability of a token that passes only by the tolerance."""

    distance: float = 5e-5
    floor: float = 1e-16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {value}")


@dataclass(frozen=True)
class SeedCheck:
    """The result. `position` is that of the worst token, None if every u is inside.

    >>> check_seeded(np.array([0.5]), np.array([0.6]), np.array([0.9]), np.array([-1.2])).reason
    'beyond'
    """

    reason: Reason | None
    n_tokens: int
    n_outside: int
    sum_distance: float
    max_distance: float
    position: int | None

    @property
    def passed(self) -> bool:
        return self.reason is None


def check_seeded(
    uniforms_T: Floats, low_T: Floats, high_T: Floats, logprobs_T: Logprobs, tolerance: SeedTolerance | None = None
) -> SeedCheck:
    limits = tolerance or SeedTolerance()
    if uniforms_T.ndim != 1 or any(values_T.shape != uniforms_T.shape for values_T in (low_T, high_T, logprobs_T)):
        raise ValueError("uniforms, interval ends and log-probabilities must be vectors of one length")
    distance_T = distances(uniforms_T, low_T, high_T)
    outside_T = ~((low_T <= uniforms_T) & (uniforms_T < high_T))
    n_outside = int(outside_T.sum())
    probability = float(np.exp(logprobs_T[outside_T].astype(np.float64)).min()) if n_outside else 1.0
    reason: Reason | None = None
    if not bool((distance_T <= limits.distance).all()):
        reason = "beyond"
    elif not probability >= limits.floor:
        reason = "implausible"
    return SeedCheck(
        reason=reason, n_tokens=len(uniforms_T), n_outside=n_outside,
        sum_distance=float(np.minimum(distance_T, 1.0).sum()),  # in probability: at most 1, also where it is NaN
        max_distance=float(distance_T.max(initial=0.0)), position=int(np.argmax(distance_T)) if n_outside else None,
    )  # fmt: skip


def distances(uniforms_T: Floats, low_T: Floats, high_T: Floats) -> Floats:
    """How far each u lies outside [low, high): 0 inside, infinite where a bound is NaN or infinite."""
    outside_T = np.maximum(np.maximum(low_T - uniforms_T, uniforms_T - high_T), 0.0)
    return np.where(np.isfinite(outside_T), outside_T, np.inf)
