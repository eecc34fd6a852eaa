"""Terms that are added to the loss, the weight of a token in its step, and the distance of two policies.

    loss = policy loss + kl · KL(π ‖ reference) − entropy · H(π)          each per token, then normalised with it

An estimate with a good value may have a bad gradient. With d = log π − log reference of a token drawn by π, three
estimates of KL(π ‖ reference) are in use:

    k1 = d                 unbiased; its mean gradient is 0, so as a loss it has no effect
    k3 = e^−d − 1 + d      unbiased, never negative, low variance; its mean gradient is that of KL(reference ‖ π),
                           another divergence, and explodes where π is far below the reference
    k2 = d² / 2            biased; its mean gradient d·∇log π is exactly that of KL(π ‖ reference)

So k2 is differentiated and k3 is reported. Tokens were drawn by the behaviour policy, not by π, so both are weighted by
the ratio, without gradient and at most `ratio_cap`; where ratios are larger, both are too small.

Legend: N tokens, laid out flat, as in `losses`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from shoal.algorithms.losses import LossOutput, LossParameters, LossTokens, bounded_exp
from shoal.errors import ConfigError


def with_terms(
    output: LossOutput, tokens: LossTokens, parameters: LossParameters, *, kl: float = 0.0, entropy: float = 0.0
) -> LossOutput:
    """The loss with its terms added by weight; terms of weight 0 are not computed. With a KL term `reference_kl` is
    reported. On policy with π = 0.5 and reference 0.25, d = 0.693 is the gradient of the KL term."""
    loss_N, mean = output.loss_N, dict(output.mean)
    if kl:
        if tokens.reference_N is None:
            raise ValueError("a KL term needs the reference's log-probabilities (reference_N)")
        weight_N = bounded_exp((tokens.logprobs_N - tokens.behaviour_N).detach()).clamp(max=parameters.ratio_cap)
        difference_N = tokens.logprobs_N - tokens.reference_N
        loss_N = loss_N + kl * (weight_N * difference_N.square() / 2)
        mean["reference_kl"] = weight_N * divergence(-difference_N)
    if entropy:
        if tokens.entropy_N is None:
            raise ValueError("an entropy term needs entropy_N")
        loss_N = loss_N - entropy * tokens.entropy_N
    return replace(output, loss_N=loss_N, mean=mean)


def divergence(difference_N: Tensor) -> Tensor:
    """`e^d − 1 − d`, never negative. Of d = log π − log recorded the mean estimates KL(recorded ‖ π) without bias, and
    varies far less than −d. With probabilities 0.5 (recorded) and 0.25 (π): 0.5 − 1 + 0.693 = 0.193."""
    difference_N = difference_N.detach()
    return bounded_exp(difference_N) - 1 - difference_N


def normalised(word: str, lengths: Sequence[int], longest: int | None) -> Callable[[int], float]:
    """The weight of each token, as a function of the number of trained tokens in its completion. `lengths` are these
    numbers for the whole step, so micro-batches do not change weights; `longest` is the limit of a completion.

    tokens      1 / tokens of the step                       all tokens have the same weight
    samples     1 / (completions × tokens of its own)        all completions have the same weight
    constant    1 / (completions × longest)                  the weight does not depend on lengths (Dr. GRPO)

    >>> [normalised(word, [2, 6], 10)(2) for word in ("tokens", "samples", "constant")]
    [0.125, 0.25, 0.05]
    """
    tokens, completions = sum(lengths), len(lengths)
    if word == "constant" and longest is None:
        raise ConfigError('objective.normalisation is "constant", but completions have no limit: use "tokens"')
    weights: dict[str, Callable[[int], float]] = {
        "tokens": lambda _own: 1 / tokens,
        "samples": lambda own: 1 / (completions * own),
        "constant": lambda _own: 1 / (completions * (longest or 0)),
    }
    return weights[word]


def ratio_sums(difference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Σr and Σr² in double precision, for `effective_share`; to be summed over a whole step."""
    ratio_N = bounded_exp(difference_N.detach().double())
    return ratio_N.sum(), ratio_N.square().sum()


def effective_share(total: float, squares: float, count: int) -> float:
    """(Σr)² / (N·Σr²): the effective sample size of N weighted samples, as a share; between 1/N and 1. Ratios 1, 1, 1,
    1 give 1; ratios 4, 0, 0, 0 give 1/4. Without tokens it is 1."""
    return total**2 / (count * squares) if count and squares else 1.0
