"""Who is trained on together: groups → minibatches (one optimizer step each) → micro-batches (one forward pass each).

    groups ──minibatches(seed, step)──► K parts ──micro_batches(token_budget)──► rows ──pad──► input_ids_BL
             changes what is learnt                changes memory only: gradients are summed over all of them

Every function is deterministic and portable: a resumed step splits exactly as the first time.

Legend: B sequences, L positions of the longest of them, N completion tokens of all of them (flat).
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TokenIds = npt.NDArray[np.int64]


def minibatches(count: int, parts: int, *, seed: int, step: int) -> list[list[int]]:
    """Indices `0 … count − 1` in an order that depends on (seed, step) only, cut into at most `parts` even parts.

    The order is by hash, not by a library's generator, so that it is the same on every machine and version.
    """
    order = sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest())
    parts = min(parts, count)
    cuts = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [order[start:end] for start, end in pairwise(cuts)]


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices grouped so that rows × longest row ≤ `token_budget`; longest first, so that rows are of similar length.

    A sequence longer than the budget stands alone: it is trained on, not dropped.

    >>> micro_batches([3, 8, 4, 7], token_budget=16)
    [[1, 3], [2, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences side by side, padded on the right. Under causal attention no real token sees the padding, so that no
    attention mask is needed.

    Token `targets_N[i]` is predicted at `input_ids_BL[rows_N[i], columns_N[i]]`, the position before its own. The N
    tokens are the completions of the sequences, one after the other.
    """

    input_ids_BL: Tensor
    rows_N: Tensor
    columns_N: Tensor
    targets_N: Tensor


def pad(sequences: Sequence[tuple[TokenIds, TokenIds]], device: torch.device | str = "cpu") -> PaddedBatch:
    """Lay out (prompt, completion) pairs. A prompt has a token at least: it predicts the first of the completion."""
    longest = max(len(prompt) + len(completion) for prompt, completion in sequences)
    input_ids_BL = np.zeros((len(sequences), longest), dtype=np.int64)
    rows, columns = [], []
    for row, (prompt, completion) in enumerate(sequences):
        if len(prompt) == 0:
            raise ValueError("a sequence has an empty prompt: nothing predicts its first token")
        input_ids_BL[row, : len(prompt) + len(completion)] = np.concatenate([prompt, completion])
        rows.append(np.full(len(completion), row, dtype=np.int64))
        columns.append(np.arange(len(completion), dtype=np.int64) + len(prompt) - 1)
    return PaddedBatch(
        input_ids_BL=torch.from_numpy(input_ids_BL).to(device),
        rows_N=torch.from_numpy(np.concatenate(rows)).to(device),
        columns_N=torch.from_numpy(np.concatenate(columns)).to(device),
        targets_N=torch.from_numpy(np.concatenate([completion for _, completion in sequences])).to(device),
    )
