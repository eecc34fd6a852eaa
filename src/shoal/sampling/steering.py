"""The attacker that the sequence statistic is for: it stays within the tolerance, and picks what it likes there.

At every position it may say any token whose interval comes within `reach` of u. It never is "beyond", and by `floor`
never "implausible". What it gains are the tokens that it changes; what gives it away is how many lie outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.sampling.inverse import Floats, cumulative, sample


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
