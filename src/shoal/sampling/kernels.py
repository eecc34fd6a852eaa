"""The sampler on CUDA, in Triton: the logits are read once, and nothing of their size is written.

    logits [N, V] ──blocks of 4096──► per (row, block): maximum m, and of w = exp(score - m): sum w, w·s, w·s²
                  [N, V/4096], plain torch: weights of the blocks, their running sums, entropy, varentropy
    one block per row again: the sum before a token, or the token that a given u falls on

Scores are logits / T. All sums are float64 (an H200 computes it at half its float32 rate; on consumer cards it is
slower than the read, but far faster than the model). Sums of a block are trees, so errors are near 1e-15 of the total.
"""

import logging
import subprocess
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

log = logging.getLogger(__name__)

BLOCK = 4096
# For a block of only -inf: its maximum must be finite, or its scores are NaN.
LOWEST_MAXIMUM, LOWEST_SCORE = -1e30, -800.0


def usable(logits_NV: Tensor) -> bool:
    return logits_NV.device.type == "cuda" and logits_NV.shape[0] > 0 and compiles(logits_NV.device)


@cache
def compiles(device: torch.device) -> bool:
    """Tried once: Triton comes with CUDA builds of torch, but needs a C compiler."""
    if find_spec("triton") is None:
        return False
    logits, one = torch.zeros(1, 2, device=device), torch.ones(1, device=device, dtype=torch.float64)
    try:
        token_statistics(logits, one.long(), one)
        sample(logits, one / 2, one)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("sampling runs without its Triton kernels, slower but with the same results: %s", error)
        return False
    return True


def token_statistics(logits_NV: Tensor, tokens_N: Tensor, inverse_N: Tensor) -> tuple[Tensor, ...]:
    """low, high, logprobs, entropy, varentropy of tokens; `inverse_N` is 1 / temperature."""
    blocks = _KernelBlocks(logits_NV, inverse_N)
    block_N = torch.div(tokens_N, BLOCK, rounding_mode="floor")
    before_N, at_N = blocks.within(block_N, tokens_N)
    low_N = blocks.before(block_N) + before_N
    total_N = blocks.total_N
    first_N = blocks.moment_1_N / total_N
    varentropy_N = (blocks.moment_2_N / total_N - first_N.square()).clamp(min=0.0)
    logprobs_N, entropy_N = torch.log(at_N / total_N).float(), (torch.log(total_N) - first_N).float()
    return low_N / total_N, (low_N + at_N) / total_N, logprobs_N, entropy_N, varentropy_N.float()


def sample(logits_NV: Tensor, uniforms_N: Tensor, inverse_N: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _KernelBlocks(logits_NV, inverse_N)
    total_N = blocks.total_N
    # u < 1, but the product may round up to the total, which no running sum exceeds.
    target_N = torch.minimum(uniforms_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    block_N = torch.searchsorted(blocks.sums_NK, target_N[:, None], right=True)[:, 0]
    block_N.clamp_(max=blocks.count - 1)  # NaN sums give an index beyond the end
    tokens_N, at_N = blocks.find(block_N, target_N - blocks.before(block_N))
    return tokens_N, torch.log(at_N / total_N).float()


class _KernelBlocks:
    """The sums of every block of every row, relative to the row's maximum. K: blocks of a row."""

    def __init__(self, logits_NV: Tensor, inverse_N: Tensor) -> None:
        self._logits_NV, self._inverse_N = logits_NV.contiguous(), inverse_N
        rows, vocabulary = logits_NV.shape
        self.count = -(-vocabulary // BLOCK)
        parts = torch.empty(4, rows, self.count, dtype=torch.float64, device=logits_NV.device)
        from shoal.sampling.triton_kernels import block_sums  # there may be no Triton

        block_sums[(rows, self.count)](
            self._logits_NV, inverse_N, parts, vocabulary, self.count, rows * self.count,
            BLOCK=BLOCK, LOWEST_MAXIMUM=LOWEST_MAXIMUM, LOWEST_SCORE=LOWEST_SCORE, num_warps=8,
        )  # fmt: skip
        self._maximum_NK, sum_NK, first_NK, second_NK = parts
        shift_NK = (self._maximum_NK - self._maximum_NK.amax(dim=1, keepdim=True)).clamp_(min=LOWEST_SCORE)
        self._scale_NK = torch.exp(shift_NK)
        self.sums_NK = (self._scale_NK * sum_NK).cumsum(dim=1)
        self.total_N = self.sums_NK[:, -1]
        second_NK = second_NK + shift_NK * (2.0 * first_NK + shift_NK * sum_NK)
        first_NK = first_NK + shift_NK * sum_NK
        self.moment_1_N = (self._scale_NK * first_NK).sum(dim=1)
        self.moment_2_N = (self._scale_NK * second_NK).sum(dim=1)

    def before(self, block_N: Tensor) -> Tensor:
        sums_N = self.sums_NK.gather(1, (block_N - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(block_N == 0, torch.zeros_like(sums_N), sums_N)

    def within(self, block_N: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        found = self._one_block(block_N, tokens_N.double(), find=False)
        return found[0], found[1]

    def find(self, block_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        scale_N = self._scale_NK.gather(1, block_N[:, None])[:, 0]
        found = self._one_block(block_N, target_N / scale_N, find=True)
        return found[0].long(), found[1]

    def _one_block(self, block_N: Tensor, given_N: Tensor, find: bool) -> Tensor:
        rows, vocabulary = self._logits_NV.shape
        found_2N = torch.empty(2, rows, dtype=torch.float64, device=block_N.device)
        from shoal.sampling.triton_kernels import look_into_block

        look_into_block[(rows,)](
            self._logits_NV, self._inverse_N, self._maximum_NK, self._scale_NK, block_N.contiguous(),
            given_N.contiguous(), found_2N, vocabulary, self.count, rows,
            BLOCK=BLOCK, FIND=find, num_warps=8,
        )  # fmt: skip
        return found_2N
