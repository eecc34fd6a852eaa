"""Losses that weigh or mask each token by itself. A weight is a number: no gradient flows through it.

    −w·A·log π          has the gradient −w·A, whatever the value of the log-probability

Legend: N tokens, laid out flat, as in `losses`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algorithms.losses import (
    LossOutput,
    LossParameters,
    LossTokens,
    base,
    beyond_clip,
    bounded_exp,
    clipped,
    log_ratio,
    ratio,
    recomputed,
    reported,
)


def plain(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−A·log π`: the policy gradient as if every token had just been drawn.

    For comparison: nothing stops a token that has moved enough, so that it breaks down under staleness.
    """
    ratio_N = ratio(tokens, parameters)
    return reported(-tokens.advantages_N * tokens.logprobs_N, ratio_N, torch.zeros_like(ratio_N))


def cross_entropy(tokens: LossTokens, parameters: LossParameters) -> LossOutput:  # noqa: ARG001 - a `Loss`
    """`−A·log π` of tokens that nobody drew: A is the weight of a demonstration. No ratio is looked at."""
    return LossOutput(loss_N=-tokens.advantages_N * tokens.logprobs_N)


def tis(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """Truncated importance sampling: `−min(r, cap)·A·log π`, the minimum without gradient.

    Exact where r ≤ cap; beyond, a token counts less than it should, which bounds the variance. With cap = 2, A = 1 and
    r = 10 the gradient is −2.
    """
    return _capped(tokens, parameters, parameters.ratio_cap)


def cispo(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(r, 1 + ε_high)·A·log π`, the minimum without gradient: no token loses its gradient by a clip.

    As its authors run it, without a floor. The cap is 1 + `epsilon_high` where that is given, else `ratio_cap`: then
    the same as `tis`, which others came to from importance sampling.
    """
    high = parameters.epsilon_high
    return _capped(tokens, parameters, parameters.ratio_cap if high is None else 1 + high)


def decoupled(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """Decoupled PPO: `−w·min(u·A, clip(u, 1−ε, 1+ε)·A)`, u = π / proximal, w = min(proximal / behaviour, cap).

    The proximal policy is the one that the step began with: the clip bounds what this step changes, w corrects for the
    staleness before it. So `recomputed_N` is always needed, and `recomputed_base` says nothing.
    """
    proximal_N, advantages_N = recomputed(tokens), tokens.advantages_N
    before_N = bounded_exp(proximal_N - tokens.behaviour_N).detach()
    weight_N = before_N.clamp(max=parameters.ratio_cap)
    moved_N = bounded_exp(tokens.logprobs_N - proximal_N)
    objective_N = torch.minimum(moved_N * advantages_N, clipped(moved_N, parameters) * advantages_N)
    stopped_N = beyond_clip(moved_N, advantages_N, parameters) | (before_N > parameters.ratio_cap)
    return reported(-weight_N * objective_N, moved_N, stopped_N, weight_mean=weight_N)


def dppo(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−r·A + λ·(log r)²`, the first term masked where the probability has moved enough in A's direction.

    "Enough" is `move_limit` in probability, not in ratio: a token that went from 0.001 to 0.003 is no danger, one from
    0.9 to 0.6 is, though its ratio moved less. The second term (λ = `log_ratio_penalty`) pulls every token back, also
    those that are masked or have no advantage; its gradient is 2λ·log r, nothing on policy.
    """
    log_ratio_N, advantages_N = log_ratio(tokens, parameters), tokens.advantages_N
    ratio_N = bounded_exp(log_ratio_N)
    moved_N = tokens.logprobs_N.detach().exp() - base(tokens, parameters).exp()
    masked_N = moved_N * advantages_N.sign() > parameters.move_limit
    policy_N = torch.where(masked_N, torch.zeros_like(ratio_N), -ratio_N * advantages_N)
    loss_N = policy_N + parameters.log_ratio_penalty * log_ratio_N.square()
    return reported(loss_N, ratio_N, masked_N, masked_fraction=masked_N)


def _capped(tokens: LossTokens, parameters: LossParameters, cap: float) -> LossOutput:
    ratio_N = ratio(tokens, parameters).detach()
    loss_N = -ratio_N.clamp(max=cap) * tokens.advantages_N * tokens.logprobs_N
    return reported(loss_N, ratio_N, _lowered(ratio_N, tokens.advantages_N, cap))


def _lowered(ratio_N: Tensor, advantages_N: Tensor, cap: float) -> Tensor:
    return (ratio_N > cap) & (advantages_N != 0)
