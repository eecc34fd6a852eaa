"""Losses: what is minimised, per token. The trainer sums, normalises and differentiates; it knows no formula.

    r = exp(logprob − behaviour logprob)          A = advantage of the token's rollout

Legend: N tokens, laid out flat: only tokens that are trained on are here, so no loss needs a mask.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# exp(20) is far beyond any clip; without the bound an exploding ratio is inf and its masked gradient 0 · inf = NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossTokens:
    """What a loss may look at. `logprobs_N` carries the gradient; the others are data.

    `behaviour_N` are the log-probabilities recorded when the tokens were drawn, and verified since.
    """

    logprobs_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor


@dataclass(frozen=True)
class LossParameters:
    """The clip: `epsilon` around 1, and `delta` (> 1 + epsilon) as the ceiling of a ratio with negative advantage."""

    epsilon: float = 0.2
    delta: float = 4.0


@dataclass(frozen=True)
class LossOutput:
    """The loss of each token, and what to report: `mean` values are averaged over the step's tokens, of `peak` values
    the largest is kept. Neither carries a gradient."""

    loss_N: Tensor
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    peak: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LossTokens, LossParameters], LossOutput]


def ratio(tokens: LossTokens) -> Tensor:
    """How much more probable each token has become since it was drawn."""
    log_ratio_N = tokens.logprobs_N - tokens.behaviour_N
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def two_sided_clip(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(min(r, δ)·A, clip(r, 1−ε, 1+ε)·A)`.

    PPO's clip leaves a token with negative advantage and exploding ratio unbounded; δ bounds it. For example with
    A = −1, ε = 0.2, δ = 4 and r = 10 the loss is 4 (PPO: 10), and no gradient flows.
    """
    ratio_N, advantages_N = ratio(tokens), tokens.advantages_N
    unclipped_N = ratio_N.clamp(max=parameters.delta) * advantages_N
    objective_N = torch.minimum(unclipped_N, _clipped(ratio_N, parameters) * advantages_N)
    too_high_N = (advantages_N < 0) & (ratio_N > parameters.delta)
    return _output(-objective_N, ratio_N, _beyond_clip(ratio_N, advantages_N, parameters) | too_high_N)


def ppo_clip(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(r·A, clip(r, 1−ε, 1+ε)·A)`; δ is not used."""
    ratio_N, advantages_N = ratio(tokens), tokens.advantages_N
    objective_N = torch.minimum(ratio_N * advantages_N, _clipped(ratio_N, parameters) * advantages_N)
    return _output(-objective_N, ratio_N, _beyond_clip(ratio_N, advantages_N, parameters))


def _clipped(ratio_N: Tensor, parameters: LossParameters) -> Tensor:
    return ratio_N.clamp(1 - parameters.epsilon, 1 + parameters.epsilon)


def _beyond_clip(ratio_N: Tensor, advantages_N: Tensor, parameters: LossParameters) -> Tensor:
    """Where the clip is active: the token has already moved by more than ε in its advantage's direction."""
    up_N = (advantages_N > 0) & (ratio_N > 1 + parameters.epsilon)
    down_N = (advantages_N < 0) & (ratio_N < 1 - parameters.epsilon)
    return up_N | down_N


def _output(loss_N: Tensor, ratio_N: Tensor, clipped_N: Tensor) -> LossOutput:
    ratio_N = ratio_N.detach()
    return LossOutput(
        loss_N=loss_N,
        mean={"ratio_mean": ratio_N, "clip_fraction": clipped_N.to(ratio_N.dtype)},
        peak={"ratio_max": ratio_N},
    )
