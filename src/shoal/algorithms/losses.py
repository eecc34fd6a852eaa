"""Losses: what is minimised, per token. The trainer sums, normalises and differentiates; it knows no formula.

    r = exp(logprob − base logprob)          A = advantage of the token's rollout
    base: what was recorded when the token was drawn (behaviour), or what the trainer itself says when the step begins
          (recomputed), if `recomputed_base` says so

Here: what a loss is given and gives, and those that clip. Weights and masks: `losses_weighted`; losses that look at
whole completions: `losses_sequence`. On policy (r = 1) every one of them has the gradient −A.

Legend: N tokens, laid out flat: only tokens that are trained on are here, so no loss needs a padding mask.
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
    # Of the policy that the step began with, by the trainer itself. None unless the loss or `ratio_base` asks for it.
    recomputed_N: Tensor | None = None
    # Of the policy that training began with. None unless the objective has a KL term.
    reference_N: Tensor | None = None
    # Of the distribution that each token was drawn from; carries the gradient.
    entropy_N: Tensor | None = None
    # Which completion each token belongs to: 0 … S − 1, never decreasing. None: all of one completion.
    sequence_N: Tensor | None = None


@dataclass(frozen=True)
class LossParameters:
    """What a loss may be given; each takes what it needs.

    `epsilon` (and `epsilon_high` above 1, if it differs) is the clip, `delta` (> 1 + epsilon) the ceiling of a ratio
    with negative advantage, `ratio_cap` where an importance weight is cut off, `mask_low`/`mask_high` the band of a
    sequence's geometric mean, `move_limit` and `log_ratio_penalty` are of `dppo`.
    """

    epsilon: float = 0.2
    delta: float = 4.0
    epsilon_high: float | None = None
    ratio_cap: float = 2.0
    mask_low: float = 0.99
    mask_high: float = 1.01
    move_limit: float = 0.2
    log_ratio_penalty: float = 1e-3
    recomputed_base: bool = False

    @property
    def upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True)
class LossOutput:
    """The loss of each token, and what to report: `mean` values are averaged over the step's tokens, of `peak` values
    the largest is kept. Neither carries a gradient.

    Losses with a ratio report `ratio_mean`, `ratio_max` and `clip_fraction`: how many tokens a clip, cap or mask has
    taken gradient from. Those that mask say `masked_fraction`, too; those with a separate weight `weight_mean`.
    """

    loss_N: Tensor
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    peak: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LossTokens, LossParameters], LossOutput]


def base(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    """The log-probabilities that ratios are taken against: data, without gradient."""
    return recomputed(tokens) if parameters.recomputed_base else tokens.behaviour_N


def log_ratio(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    """log r, without any bound. Carries the gradient."""
    return tokens.logprobs_N - base(tokens, parameters)


def ratio(tokens: LossTokens, parameters: LossParameters | None = None) -> Tensor:
    """r: how much more probable each token has become. Beyond e^±20 it is held, and carries no gradient."""
    return bounded_exp(log_ratio(tokens, parameters or LossParameters()))


def bounded_exp(log_N: Tensor) -> Tensor:
    return log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def recomputed(tokens: LossTokens) -> Tensor:
    if tokens.recomputed_N is None:
        raise ValueError("this loss takes the trainer's own log-probabilities (recomputed_N), and none were given")
    return tokens.recomputed_N


def two_sided_clip(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(min(r, δ)·A, clip(r, 1−ε, 1+ε)·A)`.

    PPO's clip leaves a token with negative advantage and exploding ratio unbounded; δ bounds it. For example with
    A = −1, ε = 0.2, δ = 4 and r = 10 the loss is 4 (PPO: 10), and no gradient flows.
    """
    ratio_N, advantages_N = ratio(tokens, parameters), tokens.advantages_N
    unclipped_N = ratio_N.clamp(max=parameters.delta) * advantages_N
    objective_N = torch.minimum(unclipped_N, clipped(ratio_N, parameters) * advantages_N)
    too_high_N = (advantages_N < 0) & (ratio_N > parameters.delta)
    return reported(-objective_N, ratio_N, beyond_clip(ratio_N, advantages_N, parameters) | too_high_N)


def ppo_clip(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(r·A, clip(r, 1−ε, 1+ε)·A)`; δ is not used. With `epsilon_high` above ε it is clip-higher.

    With A = 1, ε = 0.2 and r = 1.25 the loss is −1.2 and no gradient flows; with `epsilon_high` = 0.28 both are −1.25.
    """
    ratio_N, advantages_N = ratio(tokens, parameters), tokens.advantages_N
    objective_N = torch.minimum(ratio_N * advantages_N, clipped(ratio_N, parameters) * advantages_N)
    return reported(-objective_N, ratio_N, beyond_clip(ratio_N, advantages_N, parameters))


def clipped(ratio_N: Tensor, parameters: LossParameters) -> Tensor:
    return ratio_N.clamp(1 - parameters.epsilon, 1 + parameters.upper_epsilon)


def beyond_clip(ratio_N: Tensor, advantages_N: Tensor, parameters: LossParameters) -> Tensor:
    """Where the clip is active: the ratio has already moved by more than ε in the advantage's direction."""
    up_N = (advantages_N > 0) & (ratio_N > 1 + parameters.upper_epsilon)
    down_N = (advantages_N < 0) & (ratio_N < 1 - parameters.epsilon)
    return up_N | down_N


def reported(loss_N: Tensor, ratio_N: Tensor, stopped_N: Tensor, **means: Tensor) -> LossOutput:
    """A loss with what every loss with a ratio reports; `stopped_N` are the tokens that it took gradient from."""
    ratio_N = ratio_N.detach()
    mean = {"ratio_mean": ratio_N, "clip_fraction": stopped_N, **means}
    return LossOutput(
        loss_N=loss_N,
        mean={name: values_N.detach().to(ratio_N.dtype) for name, values_N in mean.items()},
        peak={"ratio_max": ratio_N},
    )
