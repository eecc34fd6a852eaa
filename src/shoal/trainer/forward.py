"""Samples → log-probabilities: how a micro-batch is laid out, computed and scored. Knows no loss.

    samples ─lay─► Laid (tensors on the device) ─score(model)─► log-probability and entropy of every drawn token

Packed where the model can be (`models.packed`), in padded rows elsewhere: the same numbers up to rounding.

Legend: T tokens end to end, B rows, L positions, N completion tokens that the model drew (flat), H hidden size.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.packing import PackedBatch, PaddedBatch, flatten, pad
from shoal.models.logprobs import Head, TokenLogprobs, hidden_states, token_logprobs
from shoal.models.packed import Packed, packed_states
from shoal.trainer.samples import Sample


@dataclass(frozen=True)
class Laid:
    """One micro-batch. `places_N` are the positions, counted through all rows, that predict the drawn tokens."""

    ids: Tensor
    # None: padded rows. Else `ids` lie end to end, with these positions and bounds.
    positions_T: Tensor | None
    bounds: tuple[int, ...]
    places_N: Tensor
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    # Tokens that stand in it, of `ids.numel()` positions.
    inputs: int


def lay(samples: Sequence[Sample], device: torch.device, *, packed: bool) -> Laid:
    """Tokens that the environment gave are read, and are not among the N that are scored."""
    sequences = [(sample.prompt_ids, sample.token_ids) for sample in samples]
    batch = flatten(sequences) if packed else pad(sequences)
    drawn_N = torch.from_numpy(np.concatenate([sample.drawn for sample in samples]))
    counts = torch.tensor([sample.trained for sample in samples])
    behaviour_N = torch.from_numpy(np.concatenate([sample.behaviour[sample.drawn] for sample in samples]))
    advantages_N = torch.tensor([sample.advantage for sample in samples]).repeat_interleave(counts)
    sequence_N = torch.arange(len(samples)).repeat_interleave(counts)
    ids, positions_T, bounds, places_N = _placed(batch)
    return Laid(
        ids=ids.to(device),
        positions_T=None if positions_T is None else positions_T.to(device),
        bounds=bounds,
        places_N=places_N[drawn_N].to(device),
        targets_N=batch.targets_N[drawn_N].to(device),
        behaviour_N=behaviour_N.to(device),
        advantages_N=advantages_N.to(device),
        sequence_N=sequence_N.to(device),
        inputs=sum(sample.length for sample in samples) - (len(samples) if packed else 0),
    )


def _placed(batch: PackedBatch | PaddedBatch) -> tuple[Tensor, Tensor | None, tuple[int, ...], Tensor]:
    if isinstance(batch, PackedBatch):
        return batch.ids_T, batch.positions_T, batch.bounds, batch.columns_N
    return batch.input_ids_BL, None, (), batch.rows_N * batch.input_ids_BL.shape[1] + batch.columns_N


def score(model: Any, laid: Laid, temperature: float) -> TokenLogprobs:
    """Log-probability and entropy of every drawn token, [N]. Differentiable."""
    if laid.positions_T is None:
        hidden_TH = hidden_states(model, laid.ids).flatten(0, 1)
    else:
        hidden_TH = packed_states(model, Packed(laid.ids, laid.positions_T, laid.bounds))
    # Selected, not indexed: going back, rows are added up in one order, the same every time.
    hidden_NH = hidden_TH.index_select(0, laid.places_N)
    return token_logprobs(hidden_NH, Head.of(model), laid.targets_N, temperature)
