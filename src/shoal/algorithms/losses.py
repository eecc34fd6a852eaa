"""Losses per token. The trainer sums, normalises and differentiates them without knowing the formula.

    r = exp(logprob − base logprob)          A = advantage of the token's rollout
    base: recorded when the token was drawn (behaviour), or with `recomputed_base` computed by the trainer at the
          beginning of the step (recomputed)

On policy (r = 1) every loss has the gradient −A.

Legend: N tokens, laid out flat: only tokens that are trained on, so no loss needs a padding mask; S completions, each
whole in one call.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Far beyond any clip. Without it an exploding ratio is infinite, and its masked gradient 0 · inf = NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossTokens:
    """The inputs of a loss. `logprobs_N` and `entropy_N` carry gradients; the others are data. `behaviour_N` was
    recorded when the tokens were drawn, and then verified; `recomputed_N` is the trainer's own at the beginning of the
    step, `reference_N` that of the first policy of the training: both None unless needed. `sequence_N` is the
    completion of each token: 0 … S − 1, never decreasing; None: all tokens belong to one."""

    logprobs_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    recomputed_N: Tensor | None = None
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None
    sequence_N: Tensor | None = None


@dataclass(frozen=True)
class LossParameters:
    """Parameters; each loss uses those that it needs. `epsilon` (with `epsilon_high` for ratios above 1) is the clip,
    `delta` (> 1 + epsilon) the limit of a ratio with negative advantage, `ratio_cap` the largest importance weight,
    `mask_low`/`mask_high` the band of a sequence's geometric mean; the others belong to `dppo`."""

    epsilon: float = 0.2
    delta: float = 4.0
    epsilon_high: float | None = None
    ratio_cap: float = 2.0
    mask_low: float = 0.99
    mask_high: float = 1.01
    move_limit: float = 0.2
    log_ratio_penalty: float = 1e-3
    recomputed_base: bool = False


@dataclass(frozen=True)
class LossOutput:
    """The loss of each token, and values to report, without gradient: the mean over the step's tokens of `mean`, the
    maximum of `peak`. Losses with a ratio report `ratio_mean`, `ratio_max` and `clip_fraction`: the share of tokens
    from which a clip, cap or mask has taken gradient."""

    loss_N: Tensor
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    peak: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LossTokens, LossParameters], LossOutput]


def base(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    """The log-probabilities in the denominator of ratios, without gradient."""
    return recomputed(tokens) if parameters.recomputed_base else tokens.behaviour_N


def recomputed(tokens: LossTokens) -> Tensor:
    if tokens.recomputed_N is None:
        raise ValueError("this loss needs the trainer's own log-probabilities (recomputed_N)")
    return tokens.recomputed_N


def bounded_exp(log_N: Tensor) -> Tensor:
    """The exponential; beyond e^±20 it is constant and has no gradient."""
    return log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio(tokens: LossTokens, parameters: LossParameters) -> Tensor:
    return bounded_exp(tokens.logprobs_N - base(tokens, parameters))


def clip(ratio_N: Tensor, advantages_N: Tensor, parameters: LossParameters) -> tuple[Tensor, Tensor]:
    """PPO's `min(r·A, clip(r, 1−ε, 1+ε)·A)`, and the tokens without gradient: r has moved by more than ε towards A."""
    low, upper = 1 - parameters.epsilon, parameters.epsilon_high
    high = 1 + (parameters.epsilon if upper is None else upper)
    objective_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    stopped_N = (advantages_N > 0) & (ratio_N > high) | (advantages_N < 0) & (ratio_N < low)
    return objective_N, stopped_N


def reported(loss_N: Tensor, ratio_N: Tensor, stopped_N: Tensor, **means: Tensor) -> LossOutput:
    """A loss with the values that all losses with a ratio report; `stopped_N` are the tokens without gradient."""
    ratio_N = ratio_N.detach()
    mean = {"ratio_mean": ratio_N, "clip_fraction": stopped_N, **means}
    mean = {name: values_N.detach().to(ratio_N.dtype) for name, values_N in mean.items()}
    return LossOutput(loss_N, mean, peak={"ratio_max": ratio_N})


def two_sided_clip(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(min(r, δ)·A, clip(r, 1−ε, 1+ε)·A)`. PPO's clip leaves a token with negative advantage and exploding ratio
    unbounded; δ bounds it: with A = −1, ε = 0.2, δ = 4 and r = 10 the loss is 4 (PPO: 10), and no gradient flows."""
    ratio_N, advantages_N = ratio(tokens, parameters), tokens.advantages_N
    objective_N, stopped_N = clip(ratio_N.clamp(max=parameters.delta), advantages_N, parameters)
    return reported(-objective_N, ratio_N, stopped_N | (advantages_N < 0) & (ratio_N > parameters.delta))


def ppo_clip(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(r·A, clip(r, 1−ε, 1+ε)·A)`; δ is not used. With `epsilon_high` above ε it is clip-higher. With A = 1, ε =
    0.2 and r = 1.25 the loss is −1.2 and no gradient flows; with `epsilon_high` = 0.28 both are −1.25."""
    ratio_N = ratio(tokens, parameters)
    objective_N, stopped_N = clip(ratio_N, tokens.advantages_N, parameters)
    return reported(-objective_N, ratio_N, stopped_N)


def plain(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−A·log π`: the policy gradient as if every token had just been drawn. For comparison only: without a clip it
    breaks down under staleness."""
    ratio_N = ratio(tokens, parameters)
    return reported(-tokens.advantages_N * tokens.logprobs_N, ratio_N, torch.zeros_like(ratio_N))


def cross_entropy(tokens: LossTokens, parameters: LossParameters) -> LossOutput:  # noqa: ARG001 - a `Loss`
    """`−A·log π` for demonstrations: A is the weight of a demonstration. There is no ratio."""
    return LossOutput(loss_N=-tokens.advantages_N * tokens.logprobs_N)


def tis(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """Truncated importance sampling: `−min(r, cap)·A·log π`, the minimum without gradient. Unbiased where r ≤ cap; the
    cap bounds the variance. With cap = 2, A = 1 and r = 10 the gradient is −2."""
    return _capped(tokens, parameters, parameters.ratio_cap)


def cispo(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(r, 1 + ε_high)·A·log π`, the minimum without gradient: every token keeps a gradient. As its authors use it,
    without a lower limit. Without `epsilon_high` the cap is `ratio_cap`, as in `tis`."""
    high = parameters.epsilon_high
    return _capped(tokens, parameters, parameters.ratio_cap if high is None else 1 + high)


def _capped(tokens: LossTokens, parameters: LossParameters, cap: float) -> LossOutput:
    ratio_N = ratio(tokens, parameters).detach()
    loss_N = -ratio_N.clamp(max=cap) * tokens.advantages_N * tokens.logprobs_N
    return reported(loss_N, ratio_N, (ratio_N > cap) & (tokens.advantages_N != 0))


def decoupled(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """Decoupled PPO: `−w·min(u·A, clip(u, 1−ε, 1+ε)·A)`, u = π / proximal, w = min(proximal / behaviour, cap). The
    proximal policy is that of the beginning of the step: the clip limits the change of this step, w corrects earlier
    staleness. So `recomputed_N` is always needed, and `recomputed_base` has no effect."""
    proximal_N = recomputed(tokens)
    before_N = bounded_exp(proximal_N - tokens.behaviour_N).detach()
    weight_N = before_N.clamp(max=parameters.ratio_cap)
    moved_N = bounded_exp(tokens.logprobs_N - proximal_N)
    objective_N, stopped_N = clip(moved_N, tokens.advantages_N, parameters)
    stopped_N = stopped_N | (before_N > parameters.ratio_cap)
    return reported(-weight_N * objective_N, moved_N, stopped_N, weight_mean=weight_N)


def dppo(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−r·A + λ·(log r)²`, the first term masked where the probability has moved by more than `move_limit` in A's
    direction. The limit is on the probability, not the ratio: a change from 0.001 to 0.003 is harmless, one from 0.9 to
    0.6 is not, although its ratio moved less. The second term (λ = `log_ratio_penalty`) pulls all tokens back, also
    masked ones and those without advantage; its gradient is 2λ·log r, and 0 on policy."""
    base_N, advantages_N = base(tokens, parameters), tokens.advantages_N
    log_ratio_N = tokens.logprobs_N - base_N
    ratio_N = bounded_exp(log_ratio_N)
    moved_N = tokens.logprobs_N.detach().exp() - base_N.exp()
    masked_N = moved_N * advantages_N.sign() > parameters.move_limit
    policy_N = torch.where(masked_N, torch.zeros_like(ratio_N), -ratio_N * advantages_N)
    loss_N = policy_N + parameters.log_ratio_penalty * log_ratio_N.square()
    return reported(loss_N, ratio_N, masked_N, masked_fraction=masked_N)


def gspo(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(s·A, clip(s, 1−ε, 1+ε)·A)` at every token of a completion, s its geometric mean of ratios. The gradient
    flows through s to all tokens of the completion: each gets −A·s, or 0 if s is clipped. With ε = 3e-4,
    `epsilon_high` = 4e-4 (a mean moves less than single ratios) and the normalisation "samples", which
    `TrainerSettings` fills in, the loss of a step is exactly that of its authors."""
    mean_N = bounded_exp(sequence_mean(tokens.logprobs_N - base(tokens, parameters), tokens.sequence_N))
    objective_N, stopped_N = clip(mean_N, tokens.advantages_N, parameters)
    return reported(-objective_N, mean_N, stopped_N)


def geometric_mask(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """The loss of `tis` for completions with `mask_low ≤ s ≤ mask_high`; others are left out: the current policy would
    hardly write them. With [0.99, 1.01], four tokens of ratio 1 and one of 1.1: s = 1.1^(1/5) = 1.0192, so all five are
    left out."""
    log_ratio_N = (tokens.logprobs_N - base(tokens, parameters)).detach()
    ratio_N, mean_N = bounded_exp(log_ratio_N), bounded_exp(sequence_mean(log_ratio_N, tokens.sequence_N))
    masked_N = (mean_N < parameters.mask_low) | (mean_N > parameters.mask_high)
    weight_N = torch.where(masked_N, torch.zeros_like(ratio_N), ratio_N.clamp(max=parameters.ratio_cap))
    stopped_N = masked_N | (ratio_N > parameters.ratio_cap)
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return reported(loss_N, ratio_N, stopped_N, masked_fraction=masked_N)


def sequence_mean(values_N: Tensor, sequence_N: Tensor | None) -> Tensor:
    """The mean of each token's completion, with gradient. Values 1, 3, 7 of completions 0, 0, 1 give 2, 2, 7."""
    if sequence_N is None:
        return values_N.mean().expand_as(values_N)
    none_S = torch.zeros_like(values_N)  # the number of tokens is enough, and asking a GPU for S would wait
    sum_S = none_S.index_add(0, sequence_N, values_N)
    count_S = none_S.index_add(0, sequence_N, torch.ones_like(values_N))
    return (sum_S / count_S.clamp(min=1))[sequence_N]
