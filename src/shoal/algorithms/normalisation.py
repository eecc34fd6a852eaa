"""Normalisation: what a token's loss weighs in its step. The trainer multiplies, sums, and knows no word.

    tokens      1 / tokens of the step                       every token weighs the same
    samples     1 / (completions × tokens of its own)        every completion weighs the same
    constant    1 / (completions × max_new_tokens)           a token's weight depends on no length at all (Dr. GRPO)

The counts are the whole step's, over all minibatches and processes, so that how a step is cut up never changes what a
token weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import ConfigError


@dataclass(frozen=True)
class StepCount:
    """What a step trains on, wholly: tokens that carry loss, completions that have any, and how long one may be."""

    tokens: int
    completions: int
    max_new_tokens: int


Weight = Callable[[int, StepCount], float]

NORMALISATIONS: dict[str, Weight] = {
    "tokens": lambda _own, step: 1 / step.tokens,
    "samples": lambda own, step: 1 / (step.completions * own),
    "constant": lambda _own, step: 1 / (step.completions * step.max_new_tokens),
}


def token_weight(normalisation: str, own_tokens: int, step: StepCount) -> float:
    """The weight of each token of a completion of which `own_tokens` carry loss; over a step, those of "tokens" and
    "samples" sum to 1.

    >>> step = StepCount(tokens=8, completions=2, max_new_tokens=10)
    >>> [token_weight(word, 2, step) for word in ("tokens", "samples", "constant")]
    [0.125, 0.25, 0.05]
    """
    if normalisation not in NORMALISATIONS:
        raise ConfigError(f"there is no normalisation called {normalisation!r}; choose: {', '.join(NORMALISATIONS)}")
    return NORMALISATIONS[normalisation](own_tokens, step)
