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

Mismatch is of the trainer's log-probabilities and the recorded ones, per token and without gradient.

Legend: N tokens, laid out flat, as in `losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from shoal.algorithms.losses import LossOutput, LossParameters, LossTokens, bounded_exp
from shoal.errors import ConfigError


def with_terms(
    output: LossOutput, tokens: LossTokens, parameters: LossParameters, *, kl: float = 0.0, entropy: float = 0.0
) -> LossOutput:
    """The loss with its terms added, each by its weight; a weight of 0: it is not computed. `reference_kl` is reported
    where there is a reference. On policy with π = 0.5 and reference 0.25, d = 0.693 is the gradient of the KL term."""
    loss_N, mean = output.loss_N, dict(output.mean)
    if kl:
        if tokens.reference_N is None:
            raise ValueError("a KL term takes the reference's log-probabilities (reference_N), and none were given")
        weight_N = bounded_exp((tokens.logprobs_N - tokens.behaviour_N).detach()).clamp(max=parameters.ratio_cap)
        difference_N = tokens.logprobs_N - tokens.reference_N
        loss_N = loss_N + kl * (weight_N * difference_N.square() / 2)
        mean["reference_kl"] = weight_N * divergence(-difference_N)
    if entropy:
        if tokens.entropy_N is None:
            raise ValueError("an entropy term takes entropy_N, and none was given")
        loss_N = loss_N - entropy * tokens.entropy_N
    return replace(output, loss_N=loss_N, mean=mean)


def divergence(difference_N: Tensor) -> Tensor:
    """`e^d − 1 − d`, never negative. Of d = log π − log recorded the mean estimates KL(recorded ‖ π) without bias; the
    estimate −d is unbiased, too, but half of its values are negative and it varies far more. With probabilities 0.5
    (recorded) and 0.25 (π): 0.5 − 1 + 0.693 = 0.193."""
    difference_N = difference_N.detach()
    return bounded_exp(difference_N) - 1 - difference_N


def normalised(word: str, lengths: Sequence[int], longest: int | None) -> Callable[[int], float]:
    """What each token of a completion weighs, by how many of its own carry loss. `lengths` are these counts of the
    whole step, so that how it is cut up never changes what a token weighs; `longest` is the limit to a completion.

    tokens      1 / tokens of the step                       every token weighs the same
    samples     1 / (completions × tokens of its own)        every completion weighs the same
    constant    1 / (completions × longest)                  a token's weight depends on no length at all (Dr. GRPO)

    >>> [normalised(word, [2, 6], 10)(2) for word in ("tokens", "samples", "constant")]
    [0.125, 0.25, 0.05]
    """
    tokens, completions = sum(lengths), len(lengths)
    if word == "constant" and longest is None:
        raise ConfigError('objective.normalisation is "constant" and there is no limit to completions: use "tokens"')
    weights: dict[str, Callable[[int], float]] = {
        "tokens": lambda _own: 1 / tokens,
        "samples": lambda own: 1 / (completions * own),
        "constant": lambda _own: 1 / (completions * (longest or 0)),
    }
    return weights[word]


def ratio_sums(difference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Σr and Σr² in double precision: what `effective_share` is made of, to be summed over a whole step."""
    ratio_N = bounded_exp(difference_N.detach().double())
    return ratio_N.sum(), ratio_N.square().sum()


def effective_share(total: float, squares: float, count: int) -> float:
    """(Σr)² / (N·Σr²): which share of N weighted samples is as good as unweighted ones; between 1/N and 1. Ratios 1, 1,
    1, 1 give 1; ratios 4, 0, 0, 0 give 1/4: one token decides for all. Without any token it is 1."""
    return total**2 / (count * squares) if count and squares else 1.0
