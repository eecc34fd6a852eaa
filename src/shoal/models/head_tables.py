"""One tile of the table [tokens, vocabulary]: what is read off its logits, and the slopes that flow back into them.

Two ways with one meaning: plain torch, whose numbers on a CPU engines and validators rely on, and two Triton kernels
that read the tile once each. Both take and give float32; slopes may be narrower (`dtype`).

N: tokens of a tile, V: vocabulary.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

BLOCK = 4096
SLOPE_BLOCK = 2048
LEAST_LOGPROB = -200.0  # as in the kernels: e to its power is 0 in float32, and 0 · −∞ would be no number


class TokenMeasures(NamedTuple):
    """Per token: its log-probability, the entropy of its distribution, and log Σ exp(logit / temperature)."""

    logprobs_N: Tensor
    entropy_N: Tensor
    logsum_N: Tensor


@dataclass(frozen=True)
class Slopes:
    """What flows back into a tile's log-probabilities, and into its entropies if anybody asked for them."""

    logprobs_N: Tensor
    entropy_N: Tensor | None


def measure(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> TokenMeasures:
    if usable(logits_NV):
        return _measure_fused(logits_NV, targets_N, temperature)
    all_NV = functional.log_softmax(logits_NV / temperature, dim=-1)
    chosen_N = all_NV.gather(1, targets_N[:, None])[:, 0]
    all_NV.clamp_(min=LEAST_LOGPROB)
    entropy_N = -all_NV.exp().mul_(all_NV).sum(dim=-1)
    return TokenMeasures(chosen_N, entropy_N, torch.zeros_like(chosen_N))


def slopes(
    logits_NV: Tensor, targets_N: Tensor, measured: TokenMeasures, given: Slopes, temperature: float, dtype: torch.dtype
) -> Tensor:
    """How the sum of (given slope × value) changes with each logit: [N, V] of `dtype`. In plain torch it is computed in
    place: three tables are there at a time, four if entropies have a slope."""
    if usable(logits_NV):
        return _slopes_fused(logits_NV, targets_N, measured, given, temperature, dtype)
    all_NV = functional.log_softmax(logits_NV / temperature, dim=-1).clamp_(min=LEAST_LOGPROB)
    weight_NV = all_NV.exp()
    if given.entropy_N is None:
        slopes_NV = weight_NV.mul_(-given.logprobs_N[:, None])
    else:
        slopes_NV = weight_NV * -given.logprobs_N[:, None]
        weight_NV.mul_(given.entropy_N[:, None]).mul_(all_NV.add_(measured.entropy_N[:, None]))
        slopes_NV -= weight_NV
    slopes_NV.scatter_add_(1, targets_N[:, None], given.logprobs_N[:, None])
    return slopes_NV.div_(temperature).to(dtype)


def usable(logits_NV: Tensor) -> bool:
    """Whether the kernels can serve this tile; if not, plain torch gives the same answers."""
    return logits_NV.is_cuda and logits_NV.shape[0] > 0 and _compiles(logits_NV.device)


@cache
def _compiles(device: torch.device) -> bool:
    """Triton comes with CUDA builds of torch, but needs a C compiler on the machine: tried once."""
    if find_spec("triton") is None:
        return False
    logits, targets, one = torch.zeros(1, 2, device=device), torch.zeros(1, device=device).long(), torch.ones(1)
    try:
        measured = _measure_fused(logits, targets, 1.0)
        _slopes_fused(logits, targets, measured, Slopes(one.to(device), None), 1.0, torch.float32)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("the head runs without its Triton kernels, slower but with the same results: %s", error)
        return False
    return True


def _measure_fused(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> TokenMeasures:
    from shoal.models.head_kernels import measure_rows  # there may be no Triton

    count, vocabulary = logits_NV.shape
    # Three, not parts of one: Triton compiles anew where an address is aligned otherwise, as parts are at odd counts.
    logprobs_N, entropy_N, logsum_N = (logits_NV.new_empty(count) for _ in range(3))
    measure_rows[(count,)](
        logits_NV, targets_N, logprobs_N, entropy_N, logsum_N, 1 / temperature, vocabulary, logits_NV.stride(0),
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return TokenMeasures(logprobs_N, entropy_N, logsum_N)


def _slopes_fused(
    logits_NV: Tensor, targets_N: Tensor, measured: TokenMeasures, given: Slopes, temperature: float, dtype: torch.dtype
) -> Tensor:
    from shoal.models.head_kernels import slope_rows

    count, vocabulary = logits_NV.shape
    found_NV = torch.empty((count, vocabulary), dtype=dtype, device=logits_NV.device)
    entropy_slopes_N = given.logprobs_N if given.entropy_N is None else given.entropy_N
    slope_rows[(count, -(-vocabulary // SLOPE_BLOCK))](
        logits_NV, targets_N, measured.logsum_N, measured.entropy_N, given.logprobs_N, entropy_slopes_N, found_NV,
        1 / temperature, vocabulary, logits_NV.stride(0),
        BLOCK=SLOPE_BLOCK, WITH_ENTROPY=given.entropy_N is not None, num_warps=8,
    )  # fmt: skip
    return found_NV
