"""Terms beside the loss, and they carry gradient: divergence from a reference, and entropy.

    loss = policy loss + kl · KL(π ‖ reference) − entropy · H(π)          each per token, then normalised with it

The value of an estimate and the gradient of an estimate are two things. With d = log π − log reference of a token drawn
by π, three estimates of KL(π ‖ reference) are in use:

    k1 = d                 value right on average; gradient 0 on average: as a loss it does nothing
    k3 = e^−d − 1 + d      value right on average, never negative, varies little; its gradient is on average that of
                           KL(reference ‖ π), another divergence, and explodes where π is far below the reference
    k2 = d² / 2            value biased; its gradient d·∇log π is on average exactly that of KL(π ‖ reference)

So k2 is differentiated and k3 reported. A token was drawn by the behaviour policy, not by π: in both it is weighed by
its ratio, without gradient. Unweighed, k3 would be no divergence of π: tokens that π has left, and no longer draws,
would rule it. The weight is cut off at `ratio_cap` like any other importance weight, so that no single token rules;
where ratios are above it, both are too small.

Legend: N tokens, laid out flat, as in `losses`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shoal.algorithms.losses import LossOutput, LossParameters, LossTokens, bounded_exp


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
    """What is differentiated: `min(r, cap) · d² / 2`. Its gradient at a token is min(r, cap) · d.

    For example on policy with π = 0.5 and reference 0.25: d = 0.693, so that the gradient lowers what has grown.
    """
    return _weight(tokens, parameters) * (tokens.logprobs_N - _reference(tokens)).square() / 2


def kl_estimate(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    """What is reported: `min(r, cap) · (e^−d − 1 + d)`, never negative, without gradient.

    On average exactly KL(π ‖ reference) where no ratio is above the cap, and less than that where one is.
    """
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
