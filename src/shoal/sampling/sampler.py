"""Inverse-CDF sampling on torch tensors: float32 logits, float64 sums, batched, no generator state.

Rows are treated independently, so a row's token depends on its own logits and uniform only, not on its neighbours.
B: rows, V: vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """Sampled tokens (int64) and their log-probabilities (float32), one per row."""

    tokens: Tensor
    logprobs: Tensor


class Intervals(NamedTuple):
    """Where given tokens lie on the unit interval (float64), and their log-probabilities (float32)."""

    low: Tensor
    high: Tensor
    logprobs: Tensor


def sample(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> Draw:
    """The token whose interval contains u, for each row. Its probability is never 0, since u < 1 = the last sum."""
    weights_BV, cdf_BV = _cumulative(logits_BV, temperature)
    total_B = cdf_BV[:, -1]
    cdf_BV = cdf_BV / total_B[:, None]
    tokens_B = torch.searchsorted(cdf_BV, uniforms_B.double()[:, None], right=True)[:, 0]
    chosen_B = weights_BV.gather(1, tokens_B[:, None])[:, 0]
    return Draw(tokens_B, torch.log(chosen_B / total_B).float())


def intervals(logits_BV: Tensor, tokens_B: Tensor, temperature: float | Tensor) -> Intervals:
    """The interval [low, high) of each given token, and its log-probability; `temperature` may be [B, 1]."""
    weights_BV, cdf_BV = _cumulative(logits_BV, temperature)
    total_B = cdf_BV[:, -1]
    column_B1 = tokens_B[:, None]
    high_B = cdf_BV.gather(1, column_B1)[:, 0] / total_B
    before_B = cdf_BV.gather(1, (column_B1 - 1).clamp(min=0))[:, 0] / total_B
    low_B = torch.where(tokens_B == 0, torch.zeros_like(before_B), before_B)
    logprobs_B = torch.log(weights_BV.gather(1, column_B1)[:, 0] / total_B).float()
    return Intervals(low_B, high_B, logprobs_B)


def _cumulative(logits_BV: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised weights of softmax(logits / T) and their running sums; the largest weight is 1."""
    scaled_BV = logits_BV.float().double() / temperature
    weights_BV = torch.exp(scaled_BV - scaled_BV.amax(dim=1, keepdim=True))
    return weights_BV, weights_BV.cumsum(dim=1)
