"""Divides groups into minibatches (one optimizer step each) and these into micro-batches (one forward pass each).

    groups ──minibatches(seed, step)──► K parts ──packs(token_budget, cost)──► bins ──shares──► bins of each rank
             changes the optimizer steps          changes time and memory only: gradients are summed over all bins

    ids_T        7 1 4 9 | 2 2 5 | 8 8 8          `flatten`: sequences end to end, no padding
    positions_T  0 1 2 3 | 0 1 2 | 0 1 2
    bounds       0         4       7       10     no token sees another sequence's

Every function is deterministic on all machines: a resumed step is divided in the same way, and every rank computes all
shares.

Legend: T tokens of all sequences end to end; B sequences, L positions of the longest; N completion tokens (flat).
"""
# ruff: noqa: N815 - dimension suffixes on fields

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TokenIds = npt.NDArray[np.int64]
Sequences = Sequence[tuple[TokenIds, TokenIds]]


def minibatches(count: int, parts: int, *, seed: int, step: int) -> list[list[int]]:
    """Indices `0 … count − 1` in an order by hash of (seed, step), the same on every machine, in even parts."""
    order = sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest())
    parts = min(parts, count)
    cuts = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [order[start:end] for start, end in pairwise(cuts)]


@dataclass(frozen=True)
class Cost:
    """The cost of a sequence: linear in its tokens, and quadratic for attention. Integers, so that all machines compare
    them in the same way."""

    linear: int
    quadratic: int

    def of(self, length: int) -> int:
        return self.linear * length + self.quadratic * length * length


def packs(lengths: Sequence[int], token_budget: int, cost: Cost, ranks: int = 1) -> list[list[int]]:
    """Indices in bins of at most `token_budget` tokens and about equal cost; the number of bins is a multiple of
    `ranks` if there are enough sequences. A sequence longer than the budget is alone. First-fit decides the number of
    bins; then each sequence, longest first, goes to the cheapest bin with room. If one does not fit, the bins of
    first-fit are used."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    fewest: list[list[int]] = []
    room = np.zeros(len(order), dtype=np.int64)  # of open bins; 0 for others
    for index in order:
        fits = np.flatnonzero(room[: len(fewest)] >= lengths[index])
        if len(fits):
            fewest[fits[0]].append(index)
            room[fits[0]] -= lengths[index]
        else:
            room[len(fewest)] = token_budget - lengths[index]
            fewest.append([index])
    count = min(-(-len(fewest) // ranks) * ranks, len(lengths))
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for index in order:
        free = np.flatnonzero((tokens == 0) | (tokens + lengths[index] <= token_budget))
        if not len(free):
            return fewest
        chosen = free[costs[free].argmin()]
        bins[chosen].append(index)
        tokens[chosen] += lengths[index]
        costs[chosen] += cost.of(lengths[index])
    return bins


def micro_batches(lengths: Sequence[int], token_budget: int, ranks: int = 1) -> list[list[int]]:
    """For models that cannot be packed: indices in batches with rows × longest row ≤ `token_budget`, longest first, so
    that rows have similar lengths. A sequence longer than the budget is alone. With several ranks the budget is at most
    an equal part for each."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    token_budget = min(token_budget, -(-len(lengths) * max(lengths, default=0) // ranks))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def shares(bins: Sequence[list[int]], costs: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """The bins of each rank, the same number for every rank; an empty bin is computed as a dummy without effect. Ranks
    wait for each other at every bin, so the n-th bins of all ranks have similar cost: the most expensive first, with
    the order of ranks reversed each time."""
    order = sorted(range(len(bins)), key=lambda bin_: (-costs[bin_], bin_))
    shared: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn, start in enumerate(range(0, len(order), ranks)):
        row = [bins[bin_] for bin_ in order[start : start + ranks]]
        row += [[] for _ in range(ranks - len(row))]
        for rank, given in enumerate(row if turn % 2 == 0 else reversed(row)):
            shared[rank].append(given)
    return shared


@dataclass(frozen=True)
class Layout:
    """The sequences of one forward pass. Token `targets_N[i]` is predicted at the position before its own, index
    `places_N[i]` of `ids` (counted through all rows). The N tokens are the completions, one after the other. If packed,
    `ids` [T] are the sequences end to end, each without its last token. Else (no `positions_T`) they are rows [B, L],
    padded on the right: under causal attention no real token sees the padding."""

    ids: Tensor
    places_N: Tensor
    targets_N: Tensor
    positions_T: Tensor | None = None
    bounds: tuple[int, ...] = ()


def flatten(sequences: Sequences) -> Layout:
    """Lay out (prompt, completion) pairs end to end. A prompt has at least one token, which predicts the next."""
    lengths = [len(prompt) + len(completion) - 1 for prompt, completion in sequences]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ids = [np.concatenate([prompt, completion])[:-1] for prompt, completion in sequences]
    positions_T = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
    return Layout(
        torch.from_numpy(np.concatenate(ids)), *_completions(sequences, bounds), positions_T, tuple(bounds.tolist())
    )


def pad(sequences: Sequences) -> Layout:
    """Lay out (prompt, completion) pairs as rows of equal length."""
    longest = max(len(prompt) + len(completion) for prompt, completion in sequences)
    ids_BL = np.zeros((len(sequences), longest), dtype=np.int64)
    for row, (prompt, completion) in enumerate(sequences):
        ids_BL[row, : len(prompt) + len(completion)] = np.concatenate([prompt, completion])
    return Layout(torch.from_numpy(ids_BL), *_completions(sequences, np.arange(len(sequences)) * longest))


def _completions(sequences: Sequences, starts: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Places and ids of the completions' tokens, for sequences that begin at `starts`."""
    if any(len(prompt) == 0 for prompt, _completion in sequences):
        raise ValueError("a sequence has an empty prompt: nothing predicts its first token")
    pairs = zip(starts, sequences, strict=False)
    places = [np.arange(len(completion)) + start + len(prompt) - 1 for start, (prompt, completion) in pairs]
    targets = [completion for _, completion in sequences]
    return torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(targets))
