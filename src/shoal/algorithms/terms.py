"""Terms beside the loss, what a token weighs in its step, and how far two policies are apart.

    loss = policy loss + kl · KL(π ‖ reference) − entropy · H(π)          each per token, then normalised with it

The value of an estimate and the gradient of an estimate are two things. With d = log π − log reference of a token drawn
by π, three estimates of KL(π ‖ reference) are in use:

    k1 = d                 value right on average; gradient 0 on average: as a loss it does nothing
    k3 = e^−d − 1 + d      value right on average, never negative, varies little; its gradient is on average that of
                           KL(reference ‖ π), another divergence, and explodes where π is far below the reference
    k2 = d² / 2            value biased; its gradient d·∇log π is on average exactly that of KL(π ‖ reference)

So k2 is differentiated and k3 reported. A token was drawn by the behaviour policy, not by π: in both it is weighed by
its ratio, without gradient, cut off at `ratio_cap` like any other importance weight, so that no single token rules;
where ratios are above it, both are too small.

Normalisation: the counts are the whole step's, so that how it is cut up never changes what a token weighs:

    tokens      1 / tokens of the step                       every token weighs the same
    samples     1 / (completions × tokens of its own)        every completion weighs the same
    constant    1 / (completions × max_new_tokens)           a token's weight depends on no length at all (Dr. GRPO)

Mismatch is of the trainer's log-probabilities and the recorded ones, per token and without gradient.

Legend: N tokens, laid out flat, as in `losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from shoal.algorithms.losses import LossOutput, LossParameters, LossTokens, bounded_exp
from shoal.errors import ConfigError


@dataclass(frozen=True)
class TermWeights:
    """How much each term counts; 0: it is not computed. A weight of `kl` needs `reference_N`."""

    kl: float = 0.0
    entropy: float = 0.0


def with_terms(output: LossOutput, tokens: LossTokens, parameters: LossParameters, weights: TermWeights) -> LossOutput:
    """The loss with its terms added; `reference_kl` is reported where there is a reference."""
    loss_N, mean = output.loss_N, dict(output.mean)
    if weights.kl:
        loss_N = loss_N + weights.kl * kl_term(tokens, parameters)
        mean["reference_kl"] = kl_estimate(tokens, parameters)
    if weights.entropy:
        loss_N = loss_N - weights.entropy * entropy_of(tokens)
    return replace(output, loss_N=loss_N, mean=mean)


def kl_term(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    """What is differentiated: `min(r, cap) · d² / 2`. Its gradient at a token is min(r, cap) · d. For example on policy
    with π = 0.5 and reference 0.25: d = 0.693, so that the gradient lowers what has grown."""
    return _weight(tokens, parameters) * (tokens.logprobs_N - _reference(tokens)).square() / 2


def kl_estimate(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    """What is reported: `min(r, cap) · (e^−d − 1 + d)`, never negative, without gradient. On average exactly KL(π ‖
    reference) where no ratio is above the cap, and less than that where one is."""
    difference_N = (tokens.logprobs_N - _reference(tokens)).detach()
    return _weight(tokens, parameters) * (bounded_exp(-difference_N) - 1 + difference_N)


def entropy_of(tokens: LossTokens) -> Tensor:
    """The entropy of the distribution that each token was drawn from. It is exact, so that its gradient is, too."""
    if tokens.entropy_N is None:
        raise ValueError("an entropy term takes entropy_N, and none was given")
    return tokens.entropy_N


def _weight(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    """How much more π would draw the token than the behaviour policy did: `min(r, cap)`, without gradient."""
    return bounded_exp((tokens.logprobs_N - tokens.behaviour_N).detach()).clamp(max=parameters.ratio_cap)


def _reference(tokens: LossTokens) -> Tensor:
    if tokens.reference_N is None:
        raise ValueError("a KL term takes the reference's log-probabilities (reference_N), and none were given")
    return tokens.reference_N


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


def absolute_difference(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """|d|; its mean is what engines and trainers are compared by."""
    return (logprobs_N - behaviour_N).detach().abs()


def divergence(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """`e^d − 1 − d`, never negative; its mean estimates KL(recorded ‖ trainer) without bias. The estimate −d is
    unbiased, too, but half of its values are negative and it varies far more. With probabilities 0.5 (recorded) and
    0.25 (trainer): 0.5 − 1 + 0.693 = 0.193."""
    difference_N = (logprobs_N - behaviour_N).detach()
    return bounded_exp(difference_N) - 1 - difference_N


def ratio_sums(logprobs_N: Tensor, behaviour_N: Tensor) -> tuple[Tensor, Tensor]:
    """Σr and Σr² in double precision: what `effective_share` is made of, to be summed over a whole step."""
    ratio_N = bounded_exp((logprobs_N - behaviour_N).detach().double())
    return ratio_N.sum(), ratio_N.square().sum()


def effective_share(total: float, squares: float, count: int) -> float:
    """(Σr)² / (N·Σr²): which share of N weighted samples is as good as unweighted ones; between 1/N and 1.

    Ratios 1, 1, 1, 1 give 1; ratios 4, 0, 0, 0 give 1/4: one token decides for all. Without any token it is 1.

    >>> effective_share(total=1 + 3, squares=1 + 9, count=2)
    0.8
    """
    return total**2 / (count * squares) if count and squares else 1.0
