"""What is under way in vLLM: completions that are being drawn, and given ones that are being recomputed.

H: hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.engines.dialogue import Line
from shoal.engines.protocol import Chunks, Completion, GenerationRequest, PrefillRequest
from shoal.protocol import ProofParameters
from shoal.toploc import commit, top_points


@dataclass(eq=False)
class DrawnRow:
    """One completion. `states` are those of its open chunk, each a view of what the step of its token computed."""

    request: GenerationRequest
    seed: int
    vocabulary: int
    greedy: bool = False
    line: Line = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    proofs: list[bytes] = field(default_factory=list)
    chosen: int = 0
    ended: bool = False
    name: str = ""  # vLLM's

    def __post_init__(self) -> None:
        self.line = Line.of(self.request, self.vocabulary)

    @property
    def position(self) -> int:
        """Of the next token, in the stream of its seed."""
        return self.request.begun + len(self.line.tokens)

    def choose(self, drawn: int, logprob: float) -> None:
        """The next token, unless the environment says another one."""
        forced = self.line.forced
        self.chosen = drawn if forced is None else forced
        self.logprobs.append(logprob if forced is None else 0.0)

    def take(self) -> None:
        """When the step is over: what was chosen is part of the completion, which may end it."""
        self.ended = not self.line.take(self.chosen)

    def chunks(self, rows: int) -> Chunks:
        """Those that are finished."""
        return Chunks(np.array(self.line.tokens[: rows * len(self.proofs)], dtype=np.int32), tuple(self.proofs))

    def completion(self) -> Completion:
        tokens, logprobs = np.array(self.line.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        return Completion(tokens, logprobs, self.line.finish, b"".join(self.proofs), tuple(self.line.given))


def prove(rows: Sequence[DrawnRow], proof: ProofParameters) -> list[DrawnRow]:
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
