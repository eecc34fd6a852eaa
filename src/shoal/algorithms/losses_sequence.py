"""Losses that look at a completion as a whole: at the geometric mean of its ratios, `s = exp(mean of log r)`.

A completion is whole in every call: packing never parts one. Completions never look at each other.

Legend: N tokens, laid out flat, as in `losses`; S completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algorithms.losses import (
    LossOutput,
    LossParameters,
    LossTokens,
    beyond_clip,
    bounded_exp,
    clipped,
    log_ratio,
    reported,
)


def gspo(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """`−min(s·A, clip(s, 1−ε, 1+ε)·A)` at every token of a completion: its mean is the loss of the completion.

    The gradient flows through s to all tokens of the completion: each gets −A·s, or nothing if s is clipped. Its
    authors take ε = 3e-4, `epsilon_high` = 4e-4 (a mean of logarithms moves far less than one of them) and the
    normalisation "samples": with these, which `TrainerSettings` fills in, the step's loss is exactly theirs.
    """
    advantages_N = tokens.advantages_N
    mean_N = bounded_exp(sequence_mean(log_ratio(tokens, parameters), tokens.sequence_N))
    objective_N = torch.minimum(mean_N * advantages_N, clipped(mean_N, parameters) * advantages_N)
    return reported(-objective_N, mean_N, beyond_clip(mean_N, advantages_N, parameters))


def geometric_mask(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
    """A completion is trained on iff `mask_low ≤ s ≤ mask_high`; what stays has the loss of `tis`.

    A completion that today's policy would hardly write says little about it, whichever of its tokens it is. With
    [0.99, 1.01], four tokens of ratio 1 and one of 1.1: s = 1.1^(1/5) = 1.0192, so that all five are left out.
    """
    log_ratio_N = log_ratio(tokens, parameters).detach()
    ratio_N, mean_N = bounded_exp(log_ratio_N), bounded_exp(sequence_mean(log_ratio_N, tokens.sequence_N))
    masked_N = (mean_N < parameters.mask_low) | (mean_N > parameters.mask_high)
    weight_N = torch.where(masked_N, torch.zeros_like(ratio_N), ratio_N.clamp(max=parameters.ratio_cap))
    stopped_N = masked_N | (ratio_N > parameters.ratio_cap)
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return reported(loss_N, ratio_N, stopped_N, masked_fraction=masked_N)


def sequence_mean(values_N: Tensor, sequence_N: Tensor | None) -> Tensor:
    """At every token the mean over its completion's tokens. Carries the gradient.

    >>> sequence_mean(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 1]))
    tensor([2., 2., 7.])
    """
    if sequence_N is None:
        return values_N.mean().expand_as(values_N)
    none_S = torch.zeros_like(values_N)  # as many as tokens: enough, and a GPU need not be asked how many there are
    sum_S = none_S.index_add(0, sequence_N, values_N)
    count_S = none_S.index_add(0, sequence_N, torch.ones_like(values_N))
    return (sum_S / count_S.clamp(min=1))[sequence_N]
