"""Inverse-CDF sampling on torch tensors: float32 logits, float64 sums, batched, no generator state.

A row's token depends on its own logits and uniform only. On CUDA with Triton `shoal.sampling.kernels` does the work and
reads the logits once; otherwise plain torch operations do. Both sum in float64: the ends of an interval are exact to
about 1e-14 for the given logits.

N: rows (tokens to check, or sequences to continue), V: vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.sampling import kernels
from shoal.sampling.stream import LOW_32, philox4x32

# Few rows at a time keep the float64 tables in the processor's cache: twice as fast with 49,152 tokens.
CPU_TILE_ELEMENTS = 2**18
# exp(-800) is 0: weights of 0 stay 0, and 0 * log 0 stays 0 instead of becoming NaN.
LOWEST = -800.0


class Draw(NamedTuple):
    tokens: Tensor
    logprobs: Tensor


class TokenStatistics(NamedTuple):
    """Statistics of tokens for the checks, one value per row. `low`, `high` (float64): the token's interval of
    the CDF. `logprobs` (float32). `entropy` and `varentropy` (float32): mean and variance of -log p under the
    distribution that the token was drawn from."""

    low: Tensor
    high: Tensor
    logprobs: Tensor
    entropy: Tensor
    varentropy: Tensor


def sample(logits_NV: Tensor, uniforms_N: Tensor, temperature: float | Tensor) -> Draw:
    """The token whose interval contains u, for each row. Its probability is never 0, since u < 1 = the last sum."""
    inverse_N = _inverse_temperature(logits_NV, temperature)
    if kernels.usable(logits_NV):
        return Draw(*kernels.sample(logits_NV.float(), uniforms_N.double(), inverse_N))
    return Draw(*_in_tiles(_sample_tile, logits_NV, uniforms_N.double(), inverse_N))


def token_statistics(logits_NV: Tensor, tokens_N: Tensor, temperature: float | Tensor = 1.0) -> TokenStatistics:
    inverse_N = _inverse_temperature(logits_NV, temperature)
    if kernels.usable(logits_NV):
        return TokenStatistics(*kernels.token_statistics(logits_NV.float(), tokens_N, inverse_N))
    return TokenStatistics(*_in_tiles(_statistics_tile, logits_NV, tokens_N, inverse_N))


def _inverse_temperature(logits_NV: Tensor, temperature: float | Tensor) -> Tensor:
    rows = logits_NV.shape[0]
    if isinstance(temperature, Tensor):
        return temperature.to(logits_NV.device, torch.float64).reshape(-1).reciprocal().expand(rows).contiguous()
    return torch.full((rows,), 1.0 / temperature, dtype=torch.float64, device=logits_NV.device)


def _in_tiles(tile: Callable[..., tuple[Tensor, ...]], logits_NV: Tensor, *others: Tensor) -> list[Tensor]:
    rows = max(1, CPU_TILE_ELEMENTS // max(1, logits_NV.shape[1])) if logits_NV.device.type == "cpu" else 2**31
    split = (torch.split(tensor, rows) for tensor in (logits_NV, *others))
    tiles = [tile(*part) for part in zip(*split, strict=True)]
    return [torch.cat(column) for column in zip(*tiles, strict=True)] if len(tiles) > 1 else list(tiles[0])


def _cumulative(logits_NV: Tensor, inverse_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (log-weights, the largest 0), weights, and the weights' running sums, of softmax(logits / T)."""
    scores_NV = logits_NV.float().double().mul_(inverse_N[:, None])
    scores_NV.sub_(scores_NV.amax(dim=1, keepdim=True)).clamp_(min=LOWEST)
    weights_NV = torch.exp(scores_NV)
    return scores_NV, weights_NV, weights_NV.cumsum(dim=1)


def _sample_tile(logits_NV: Tensor, uniforms_N: Tensor, inverse_N: Tensor) -> tuple[Tensor, Tensor]:
    _, weights_NV, sums_NV = _cumulative(logits_NV, inverse_N)
    total_N1 = sums_NV[:, -1:].clone()
    tokens_N1 = torch.searchsorted(sums_NV.div_(total_N1), uniforms_N[:, None].contiguous(), right=True)
    tokens_N1.clamp_(max=logits_NV.shape[1] - 1)  # NaN logits give an index beyond the end
    chosen_N1 = weights_NV.gather(1, tokens_N1)
    return tokens_N1[:, 0], torch.log(chosen_N1 / total_N1)[:, 0].float()


def _statistics_tile(logits_NV: Tensor, tokens_N: Tensor, inverse_N: Tensor) -> tuple[Tensor, ...]:
    scores_NV, weights_NV, sums_NV = _cumulative(logits_NV, inverse_N)
    total_N, column_N1 = sums_NV[:, -1], tokens_N[:, None]
    high_N = sums_NV.gather(1, column_N1)[:, 0] / total_N
    before_N = sums_NV.gather(1, (column_N1 - 1).clamp(min=0))[:, 0] / total_N
    low_N = torch.where(tokens_N == 0, torch.zeros_like(before_N), before_N)
    logprobs_N = torch.log(weights_NV.gather(1, column_N1)[:, 0] / total_N).float()
    first_N = torch.linalg.vecdot(weights_NV, scores_NV) / total_N
    second_N = torch.linalg.vecdot(weights_NV, scores_NV.square_()) / total_N
    entropy_N = torch.log(total_N) - first_N
    varentropy_N = (second_N - first_N.square()).clamp(min=0.0)
    return low_N, high_N, logprobs_N, entropy_N.float(), varentropy_N.float()


def uniforms_of(positions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`stream.uniforms_at` on a device, bit for bit; positions and the halves of seeds are int64 and broadcast."""
    zero = torch.zeros_like(positions)
    word0, word1, *_ = philox4x32((positions & LOW_32, positions >> 32, zero, zero), (low, high))
    uniforms: Tensor = ((word0 >> 5) * 2**26 + (word1 >> 6)).double() * 2.0**-53
    return uniforms
