"""Tokens whose ratios are given, for tests of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.algorithms.losses import Loss, LossOutput, LossParameters, LossTokens

# The base log-probability of every token, if a test gives no other.
BASE = -1.0


def tokens(
    ratios: Sequence[float], advantages: Sequence[float], *, base: float = BASE, sequence: Sequence[int] | None = None
) -> LossTokens:
    """Tokens with these ratios. The trainer's own log-probabilities of the step's beginning are the recorded ones."""
    base_N = torch.full((len(ratios),), base, dtype=torch.float64)
    return LossTokens(
        logprobs_N=torch.tensor([math.log(r) + base for r in ratios], dtype=torch.float64, requires_grad=True),
        behaviour_N=base_N,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        recomputed_N=base_N.clone(),
        sequence_N=torch.arange(len(ratios)) if sequence is None else torch.tensor(sequence),
    )


def differentiated(loss: Loss, given: LossTokens, parameters: LossParameters) -> tuple[LossOutput, list[float]]:
    """What the loss gives, and the gradient of its sum by each token's log-probability."""
    output = loss(given, parameters)
    gradient: Tensor
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), given.logprobs_N)
    return output, gradient.tolist()
