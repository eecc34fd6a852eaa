"""Branches: does tolerance buy reward? What one audit saw of it, and the evidence over many audits.

Where a token passes only by the tolerance, the validator decodes what the seed gives instead, and scores both. Honest
rounding does not know the reward: the difference is as often negative as positive. Whoever chose the branch that pays
has more positive ones.

The evidence is the wealth of a gambler who bets on positive differences and begins with 1. If they are no likelier than
negative ones (but for `MARGIN`), the wealth exceeds 10⁶ once in 10⁶ gamblers at most, however long one plays and
whenever one looks (Ville's inequality). One part of the wealth is staked at each difference, so that a node that was
honest for long is found out as well: 1/2 at the first, 1/6 at the second, 1/(n(n+1)) at the nth; each part is spread
evenly over five sizes of bets. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import Field

from shoal.protocol.lease import MAX_GROUP
from shoal.protocol.signing import Message

BETS = (0.1, 0.2, 0.4, 0.6, 0.8)
MARGIN = 0.04  # among unequal pairs, 52 % in the submission's favour are nobody's fault
ENOUGH = 1e6  # the evidence that a strike needs
FORGOTTEN = 1e3  # what the evidence must fall to until owners or newcomers are trusted again
LEAST_LOG = -700.0
LOOK_SHARE, FIRST_SHARE, FIRST_AUDITS = 0.02, 0.08, 50  # of the tokens of a node; of its first groups


def look_share(audits: int, evidence: float) -> float:
    """Of which share of a node's tokens branches are decoded, after so many audits and with this evidence: in the long
    run a fiftieth of honest nodes' tokens, more while nothing is known of a node, all of one that is nearly found out.
    It depends on what was seen before alone, so that the evidence keeps its meaning.

    >>> look_share(0, 1.0), look_share(1000, 0.3), look_share(1000, 2.0), look_share(1000, 50.0)
    (0.08, 0.02, 0.16, 1.0)
    """
    base = FIRST_SHARE if audits < FIRST_AUDITS else LOOK_SHARE
    return float(min(1.0, base * min(100.0, max(1.0, evidence)) ** 3))


class Branches(Message):
    """What the branches of one submission showed: of `looked` branches, with `tokens` decoded tokens, those whose
    reward was another one. A difference is reward(submitted) - reward(seed's branch), as a share of the range that the
    rewards of its group have, from -1 to 1.
    """

    looked: int = Field(default=0, ge=0, le=MAX_GROUP)
    tokens: int = Field(default=0, ge=0)
    differences: tuple[float, ...] = Field(default=(), max_length=MAX_GROUP)


class GainEvidence(Message):
    """The evidence that tolerance was used to gain reward: of a node, an owner, or all newcomers.

    `stakes` are the logarithms of what the stakes on each size of bet have become; what was not staked yet is
    1/(differing + 1).

    >>> round(GainEvidence().after([1.0]).value, 4)  # 1/2 is not staked, 1/2 has grown by 0.96 × 0.42 on average
    1.2016
    """

    differing: int = Field(default=0, ge=0)
    gained: float = Field(default=0.0, allow_inf_nan=False)
    stakes: tuple[float, ...] = Field(default=(LEAST_LOG,) * len(BETS), min_length=len(BETS), max_length=len(BETS))

    def after(self, differences: Iterable[float]) -> GainEvidence:
        """With further differences; those of equal rewards say nothing."""
        count, gained, stakes = self.differing, self.gained, list(self.stakes)
        for difference in differences:
            bounded = max(-1.0, min(1.0, difference))
            if bounded == 0.0:
                continue
            count, gained = count + 1, gained + bounded
            staked, outcome = -math.log(count * (count + 1)), bounded - MARGIN * abs(bounded)
            stakes = [
                max(LEAST_LOG, _log_sum(log, staked) + math.log1p(bet * outcome))
                for log, bet in zip(stakes, BETS, strict=True)
            ]
        return GainEvidence(differing=count, gained=gained, stakes=tuple(stakes))

    def without(self, part: float) -> GainEvidence:
        """Less by a factor: what a node was struck for is not held against others."""
        lower = tuple(max(LEAST_LOG, log - math.log(part)) for log in self.stakes)
        return self.model_copy(update={"stakes": lower})

    @property
    def value(self) -> float:
        """What the wealth is now."""
        staked = sum(math.exp(min(-LEAST_LOG, log)) for log in self.stakes) / len(BETS)
        return staked + 1 / (self.differing + 1)

    @property
    def suffices(self) -> bool:
        return self.value >= ENOUGH


def _log_sum(first: float, second: float) -> float:
    """log(exp(first) + exp(second))."""
    return max(first, second) + math.log1p(math.exp(-abs(first - second)))
