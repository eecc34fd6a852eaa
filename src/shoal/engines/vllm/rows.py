"""What is under way in vLLM: completions that are being drawn, and given ones that are being recomputed.

H: hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.engines.protocol import PrefillRequest
from shoal.engines.rows import DrawnRow
from shoal.protocol import ProofParameters
from shoal.toploc import commit, top_points


@dataclass(eq=False)
class VllmRow(DrawnRow):
    """`states` are those of its open chunk, each a view of what the step of its token computed."""

    states: list[Tensor] = field(default_factory=list)
    name: str = ""  # vLLM's

    @property
    def position(self) -> int:
        """Of the next token, in the stream of its seed."""
        return self.request.begun + len(self.tokens)


def prove(rows: Sequence[VllmRow], proof: ProofParameters) -> list[VllmRow]:
    """The proofs of all chunks that are full, or the last of their completion; the rows that have new ones."""
    full = [row for row in rows if len(row.states) == proof.rows or (row.ended and row.states)]
    if full:
        states_NH = torch.stack([state for row in full for state in row.states])
        points = top_points(states_NH, [len(row.states) for row in full], proof.topk, proof.rows)
        for row, made in zip(full, commit(points), strict=True):
            row.proofs.append(made)
            row.states.clear()
    return full


@dataclass(eq=False)
class GivenRow:
    """A completion that somebody claims to have drawn. `pieces` are the states that its tokens would be drawn from:
    vLLM computes a long prompt piece by piece."""

    request: PrefillRequest
    pieces: list[Tensor] = field(default_factory=list)
    name: str = ""

    @property
    def is_whole(self) -> bool:
        return sum(map(len, self.pieces)) == len(self.request.token_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens but the last, from which nothing is drawn."""
        return [*self.request.prompt_ids, *self.request.token_ids.tolist()[:-1]]

    def see(self, states_TH: Tensor, first: int) -> None:
        """States of the tokens from position `first` on. What has lost its cache is computed again from the start."""
        begin = len(self.request.prompt_ids) - 1
        wanted_TH = states_TH[max(0, begin - first) :]
        if first <= begin:
            self.pieces.clear()
        if len(wanted_TH):
            self.pieces.append(wanted_TH.clone())
