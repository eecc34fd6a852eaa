"""What is being decoded: the rows still in the batch, their dice, what they have said so far, and its proofs.

The hidden states that tokens are drawn from are kept for `rows` steps at a time, in bf16, where they were computed. A
block of steps is one chunk of every sequence that lived in it, and is folded into points before the next one begins: so
memory stays bounded, and only points leave the device.

R: rows of the batch (one per seed), S: steps of a block, T: tokens, H: hidden size, V: vocabulary, G: given tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.engines.dialogue import Line
from shoal.engines.protocol import Chunks, Completion
from shoal.engines.rows import Rows
from shoal.models.logprobs import Head
from shoal.protocol import ProofParameters
from shoal.sampling.stream import uniforms_matrix
from shoal.toploc import PointBatch, commit, top_points

# Chooses the next token of each row: (logits_RV, step, row indices) -> (tokens_R, logprobs_R).
Choose = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]


class Uniforms:
    """The streams of all rows, a block of positions at a time (a long limit would need gigabytes at once)."""

    def __init__(self, seeds: Sequence[int], block: int, device: torch.device) -> None:
        self._seeds, self._block, self._device = seeds, block, device
        self._start = -1
        self._values_RT = torch.empty(0)

    def at(self, step: int) -> Tensor:
        start = step - step % self._block
        if start != self._start:
            self._start = start
            self._values_RT = torch.from_numpy(uniforms_matrix(self._seeds, start, self._block)).to(self._device)
        return self._values_RT[:, step - start]


class HiddenRows:
    """The hidden states of one block of steps [R, S, H], folded into points when it is full."""

    def __init__(self, n_rows: int, proof: ProofParameters) -> None:
        self._n_rows, self._proof = n_rows, proof
        self._block_RSH = torch.empty(0)
        self._filled = 0
        self._blocks = 0
        self._folded: list[tuple[npt.NDArray[np.int64], PointBatch]] = []  # those that have no proofs yet
        self._proofs: list[list[bytes]] = [[] for _ in range(n_rows)]

    def keep(self, state: Rows, lengths_R: Tensor) -> None:
        """Take one state per row of the batch; `lengths_R` are the tokens of every row, this step's included.

        Rows that have finished may linger in the batch: what they write lies beyond their length, and is not read.
        """
        if self._block_RSH.numel() == 0:
            shape = (self._n_rows, self._proof.rows, state.hidden.shape[-1])
            self._block_RSH = torch.empty(shape, dtype=torch.bfloat16, device=state.hidden.device)
        self._block_RSH[state.rows, self._filled] = state.hidden.to(torch.bfloat16)
        self._filled += 1
        if self._filled == self._proof.rows:
            self.fold(lengths_R)

    def fold(self, lengths_R: Tensor) -> None:
        """Turn the states kept so far into points: of every row as many as it has tokens in this block."""
        if not self._filled:
            return
        before = self._proof.rows * self._blocks
        counts_R = (lengths_R - before).clamp(0, self._filled).to(self._block_RSH.device)
        taken_RS = torch.arange(self._proof.rows, device=counts_R.device)[None, :] < counts_R[:, None]
        counts = counts_R.cpu().numpy()
        rows = np.flatnonzero(counts)
        points = top_points(self._block_RSH[taken_RS], counts[rows].tolist(), self._proof.topk, self._proof.rows)
        self._folded.append((rows, points))
        self._blocks += 1
        self._filled = 0

    def proofs(self) -> list[list[bytes]]:
        """The proofs of all folded chunks, of every row. Each is computed once, however often this is asked."""
        if self._folded:
            rows = np.concatenate([rows for rows, _ in self._folded]).tolist()
            made = commit(PointBatch.concat([points for _, points in self._folded]))
            for row, proof in zip(rows, made, strict=True):
                self._proofs[row].append(proof)
            self._folded = []
        return self._proofs


@dataclass
class Decoding:
    """What has been decoded so far, step by step; rows are those of the whole batch, finished or not.

    `lines` are of the rows whose turns somebody answers: those are looked at token by token, the others never.
    """

    n_rows: int
    max_new_tokens: int
    eos_token_id: int
    proof: ProofParameters | None = None
    lines: Mapping[int, Line] = field(default_factory=dict)
    step: int = 0
    _alive: Tensor | None = None
    _lengths: Tensor = field(default_factory=lambda: torch.empty(0))
    _steps: list[tuple[Tensor, ...]] = field(default_factory=list)
    _hidden: HiddenRows | None = None

    def record(self, state: Rows, tokens_R: Tensor, logprobs_R: Tensor) -> Tensor | None:
        """Take one token per live row; returns which rows of the batch go on, or None when none does.

        Finished rows may linger in the batch (dropping them costs a copy of the cache); they write nothing.
        """
        if self._alive is None:
            self._alive = torch.ones(self.n_rows, dtype=torch.bool, device=tokens_R.device)
            self._lengths = torch.zeros(self.n_rows, dtype=torch.long, device=tokens_R.device)
            self._hidden = None if self.proof is None else HiddenRows(self.n_rows, self.proof)
        live_R = self._alive[state.rows]
        self._steps.append(tuple(column[live_R] for column in (state.rows, tokens_R, logprobs_R)))
        self._lengths += self._alive
        if self._hidden is not None:
            self._hidden.keep(state, self._lengths)
        self.step += 1
        keep_R = live_R & (tokens_R != self.eos_token_id)
        if self.lines:
            keep_R = self._heard(state.rows.tolist(), tokens_R.tolist(), live_R, keep_R)
        self._alive[state.rows] = keep_R
        if self.step == self.max_new_tokens or not bool(keep_R.any()):
            return None
        return keep_R

    def _heard(self, rows: list[int], tokens: list[int], live_R: Tensor, keep_R: Tensor) -> Tensor:
        """Which rows go on once those whose turns are answered have been told their token."""
        keep = keep_R.tolist()
        for place, (row, token, live) in enumerate(zip(rows, tokens, live_R.tolist(), strict=True)):
            if live and row in self.lines:
                keep[place] = self.lines[row].take(token)
        return torch.tensor(keep, device=keep_R.device)

    def forced(self, state: Rows, tokens_R: Tensor, logprobs_R: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens with those that are given in place of drawn ones, and 0 for their log-probabilities."""
        given = [
            (place, line.forced)
            for place, row in enumerate(state.rows.tolist() if self.lines else ())
            if (line := self.lines.get(row)) is not None and line.forced is not None
        ]
        if not given:
            return tokens_R, logprobs_R
        places_G, values_G = (torch.tensor(column, device=tokens_R.device) for column in zip(*given, strict=True))
        return tokens_R.index_copy(0, places_G, values_G.to(tokens_R.dtype)), logprobs_R.index_fill(0, places_G, 0.0)

    def lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens every row has so far."""
        found: npt.NDArray[np.int64] = self._lengths.cpu().numpy()
        return found

    def columns(self) -> list[list[npt.NDArray[Any]]]:
        """Tokens and log-probabilities: for each, one array per row."""
        rows_N, *values = [torch.cat(column).cpu().numpy() for column in zip(*self._steps, strict=True)]
        order_N = np.argsort(rows_N, kind="stable")
        ends = np.cumsum(np.bincount(rows_N, minlength=self.n_rows))[:-1]
        return [np.split(column[order_N], ends) for column in values]

    def tokens(self) -> list[npt.NDArray[np.int32]]:
        return [tokens.astype(np.int32) for tokens in self.columns()[0]]

    def chunks(self) -> list[Chunks]:
        """The finished chunks of every row, right after a step that finished some (a multiple of `proof.rows`)."""
        assert self._hidden is not None, "only with proofs"
        pairs = zip(self.tokens(), self._hidden.proofs(), strict=True)
        return [Chunks(tokens, tuple(proofs)) for tokens, proofs in pairs]

    def completions(self) -> Iterator[Completion]:
        for row, (tokens, logprobs, proofs) in enumerate(zip(*self.columns(), self._proofs(), strict=True)):
            line, ended = self.lines.get(row), tokens[-1] == self.eos_token_id
            yield Completion(
                token_ids=tokens.astype(np.int32),
                logprobs=logprobs,
                finish=line.finish if line is not None else ("eos" if ended else "length"),
                proofs=proofs,
                given=() if line is None else tuple(line.given),
            )

    def _proofs(self) -> list[bytes]:
        if self._hidden is None:
            return [b""] * self.n_rows
        self._hidden.fold(self._lengths)
        return list(map(b"".join, self._hidden.proofs()))


def choose_tiled(head: Head, state: Rows, step: int, choose: Choose, tile_elements: int) -> tuple[Tensor, Tensor]:
    """Logits and choice for all rows, the [rows, vocabulary] table in tiles."""
    size = max(1, tile_elements // head.weight.shape[0])
    pairs = zip(torch.split(state.hidden, size), torch.split(state.rows, size), strict=True)
    chosen = [choose(head.logits(hidden), step, rows) for hidden, rows in pairs]
    tokens, logprobs = zip(*chosen, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)
