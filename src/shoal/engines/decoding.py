"""What is being decoded: the rows still in the batch, their seeds, what they have said so far, and its proofs.

The hidden states that tokens are drawn from are kept for `rows` steps at a time, in bf16, where they were computed, and
folded into points before the next block begins: memory stays bounded, and only points leave the device.

R: rows of the batch (one per seed), S: steps of a block, T: tokens, H: hidden size, V: vocabulary, G: tool tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.engines.dialogue import Line
from shoal.engines.protocol import Chunks, Completion, GenerationRequest, checks_of
from shoal.engines.rows import Rows
from shoal.models.logprobs import Head
from shoal.protocol import ProofParameters
from shoal.sampling.sampler import sample
from shoal.sampling.stream import uniforms_at
from shoal.toploc import PointBatch, commit, top_points

UNIFORM_BLOCK = 256
TELL_EVERY = 4  # steps of decoding between two words about progress: each is a wait for the device

# Chooses the next token of each row: (logits_RV, step, row indices) -> (tokens_R, logprobs_R).
Choose = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]


class HiddenRows:
    """The hidden states of one block of steps [R, S, H], folded into points when it is full."""

    def __init__(self, n_rows: int, proof: ProofParameters, begun: int = 0) -> None:
        self._n_rows, self._proof = n_rows, proof
        self._block_RSH = torch.empty(0)
        self._filled = 0
        self._blocks = begun // proof.rows
        self._folded: list[tuple[npt.NDArray[np.int64], PointBatch]] = []  # those that have no proofs yet
        self._proofs: list[list[bytes]] = [[] for _ in range(n_rows)]

    def keep(self, state: Rows, lengths_R: Tensor) -> None:
        """Take one state per row of the batch; `lengths_R` are the tokens of every row, this step's included. Rows that
        have finished may linger in the batch: what they write lies beyond their length, and is not read."""
        if self._block_RSH.numel() == 0:
            shape = (self._n_rows, self._proof.rows, state.hidden.shape[-1])
            self._block_RSH = torch.empty(shape, dtype=torch.bfloat16, device=state.hidden.device)
        self._block_RSH[state.rows, self._filled] = state.hidden.to(torch.bfloat16)
        self._filled += 1
        if self._filled == self._proof.rows:
            self.fold(lengths_R)

    @property
    def folded_tokens(self) -> int:
        """How many tokens of each row have become points; a whole number of chunks."""
        return self._proof.rows * self._blocks

    def fold(self, lengths_R: Tensor) -> None:
        """Turn the states kept so far into points: of every row as many as it has tokens in this block."""
        if not self._filled:
            return
        before = self.folded_tokens
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
            rows, points = zip(*self._folded, strict=True)
            for row, proof in zip(np.concatenate(rows).tolist(), commit(PointBatch.concat(points)), strict=True):
                self._proofs[row].append(proof)
            self._folded = []
        return self._proofs


@dataclass(eq=False)
class Row:
    """One completion to be drawn, and what there is of it so far: all of a finished one, or whole chunks that are kept
    of a batch for which memory did not suffice, so that what was shown of them stays true."""

    group: int
    seed: int
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    proofs: list[bytes] = field(default_factory=list)
    completion: Completion | None = None


@dataclass
class Decoding:
    """What has been decoded so far; rows are those of the whole batch, finished or not, and begin with equally many
    tokens. `line_of` says of a row whether somebody answers its turns: such rows are looked at token by token."""

    rows: Sequence[Row]
    max_new_tokens: int
    eos_token_id: int
    proof: ProofParameters | None = None
    line_of: Callable[[Row], Line | None] = lambda _row: None
    _alive: Tensor | None = None
    lengths: Tensor = field(default_factory=lambda: torch.empty(0))  # the tokens of every row
    _steps: list[tuple[Tensor, ...]] = field(default_factory=list)
    _hidden: HiddenRows | None = None

    def __post_init__(self) -> None:
        self.n_rows, self.begun = len(self.rows), len(self.rows[0].tokens)
        self.step, lines = self.begun, [self._begun_line(row)[0] for row in self.rows]
        self.lines = {place: line for place, line in enumerate(lines) if line is not None}

    def _begun_line(self, row: Row) -> tuple[Line | None, bool]:
        """The line of a row after the tokens that it has, and whether the completion goes on."""
        line, goes_on = self.line_of(row), True
        for token in row.tokens.tolist():
            goes_on = token != self.eos_token_id if line is None else line.take(token)
        return line, goes_on and len(row.tokens) < self.max_new_tokens

    def record(self, state: Rows, tokens_R: Tensor, logprobs_R: Tensor) -> Tensor | None:
        """Take one token per live row; returns which rows of the batch continue, or None when none does. Finished rows
        may linger in the batch (dropping them costs a copy of the cache); they write nothing."""
        if self._alive is None:
            self._alive = torch.ones(self.n_rows, dtype=torch.bool, device=tokens_R.device)
            self.lengths = torch.full((self.n_rows,), self.begun, dtype=torch.long, device=tokens_R.device)
            self._hidden = None if self.proof is None else HiddenRows(self.n_rows, self.proof, self.begun)
        live_R = self._alive[state.rows]
        self._steps.append(tuple(column[live_R] for column in (state.rows, tokens_R, logprobs_R)))
        self.lengths += self._alive
        if self._hidden is not None:
            self._hidden.keep(state, self.lengths)
        self.step += 1
        keep_R = live_R & (tokens_R != self.eos_token_id)
        if self.lines:  # those whose turns are answered are told their token
            keep, live = keep_R.tolist(), live_R.tolist()
            for place, (row, token) in enumerate(zip(state.rows.tolist(), tokens_R.tolist(), strict=True)):
                if live[place] and row in self.lines:
                    keep[place] = self.lines[row].take(token)
            keep_R = torch.tensor(keep, device=keep_R.device)
        self._alive[state.rows] = keep_R
        if self.step == self.max_new_tokens or not bool(keep_R.any()):
            return None
        return keep_R

    def forced(self, state: Rows, tokens_R: Tensor, logprobs_R: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens with tool tokens in place of drawn ones, and 0 for their log-probabilities."""
        given = [
            (place, line.forced)
            for place, row in enumerate(state.rows.tolist() if self.lines else ())
            if (line := self.lines.get(row)) is not None and line.forced is not None
        ]
        if not given:
            return tokens_R, logprobs_R
        places_G, values_G = (torch.tensor(column, device=tokens_R.device) for column in zip(*given, strict=True))
        return tokens_R.index_copy(0, places_G, values_G.to(tokens_R.dtype)), logprobs_R.index_fill(0, places_G, 0.0)

    def _columns(self) -> list[list[npt.NDArray[Any]]]:
        """Tokens and log-probabilities, with those that the rows began with: for each, one array per row."""
        kept: list[list[npt.NDArray[Any]]] = [[row.tokens for row in self.rows], [row.logprobs for row in self.rows]]
        if not self._steps:
            return kept
        rows_N, *values = [torch.cat(column).cpu().numpy() for column in zip(*self._steps, strict=True)]
        order_N = np.argsort(rows_N, kind="stable")
        ends = np.cumsum(np.bincount(rows_N, minlength=self.n_rows))[:-1]
        drawn = [np.split(column[order_N], ends) for column in values]
        return [
            [np.concatenate([begin, more]).astype(begin.dtype) for begin, more in zip(*pair, strict=True)]
            for pair in zip(kept, drawn, strict=True)
        ]

    def _proofs(self) -> list[list[bytes]]:
        drawn = [[] for _ in self.rows] if self._hidden is None else self._hidden.proofs()
        return [[*row.proofs, *more] for row, more in zip(self.rows, drawn, strict=True)]

    def chunks(self) -> list[Chunks]:
        """The finished chunks of every row, right after a step that finished some (a multiple of `proof.rows`)."""
        return [
            Chunks(tokens, tuple(proofs)) for tokens, proofs in zip(self._columns()[0], self._proofs(), strict=True)
        ]

    def finish(self) -> None:
        if self._hidden is not None:
            self._hidden.fold(self.lengths)
        for place, (tokens, logprobs, proofs) in enumerate(zip(*self._columns(), self._proofs(), strict=True)):
            self._complete(place, tokens, logprobs, proofs)

    def _complete(
        self, place: int, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], proofs: list[bytes]
    ) -> None:
        row, line, ended = self.rows[place], self.lines.get(place), tokens[-1] == self.eos_token_id
        row.tokens, row.logprobs, row.proofs = tokens, logprobs, proofs
        finish = line.finish if line is not None else ("eos" if ended else "length")
        given = () if line is None else tuple(line.given)
        row.completion = Completion(tokens, logprobs, finish, b"".join(proofs), given)

    def salvage(self) -> list[Row]:
        """After memory ran out: keep what is finished. Returns the others with whole chunks (without proofs, all)."""
        end = self.step if self.proof is None else self.begun
        if self._hidden is not None:
            end = self._hidden.folded_tokens
        left = []
        for place, (tokens, logprobs, proofs) in enumerate(zip(*self._columns(), self._proofs(), strict=True)):
            row = self.rows[place]
            row.tokens, row.logprobs, row.proofs = tokens[:end], logprobs[:end], proofs
            line, goes_on = self._begun_line(row)
            if len(tokens) > end or (len(tokens) == end and goes_on):
                left.append(row)
                continue
            if line is not None:
                self.lines[place] = line
            self._complete(place, tokens, logprobs, proofs)
        return left


@dataclass(frozen=True)
class GenerationCall:
    requests: Sequence[GenerationRequest]
    groups: list[list[Row]]
    proof: ProofParameters | None
    greedy: bool

    @classmethod
    def of(
        cls, requests: Sequence[GenerationRequest], proof: ProofParameters | None, greedy: bool = False
    ) -> GenerationCall:
        groups = [[Row(index, seed) for seed in request.seeds] for index, request in enumerate(requests)]
        return cls(requests, groups, proof, greedy)

    def tokens_each(self, group: int) -> int:
        """How many tokens a row of this group has at most, its prompt included."""
        request = self.requests[group]
        return len(request.prompt_ids) + request.sampling.max_new_tokens

    def choice(self, decoding: Decoding, device: torch.device) -> Choose:
        if self.greedy:
            return lambda logits_RV, _step, rows_R: (logits_RV.argmax(dim=1), torch.zeros(len(rows_R), device=device))
        sampling = self.requests[decoding.rows[0].group].sampling
        seeds_R1 = np.array([row.seed for row in decoding.rows], dtype=np.uint64)[:, None]
        begun_R1 = np.array([self.requests[row.group].begun for row in decoding.rows], dtype=np.uint64)[:, None]
        block = min(UNIFORM_BLOCK, sampling.max_new_tokens)

        @lru_cache(maxsize=1)  # a block at a time: a long limit would need gigabytes at once
        def uniforms_from(start: int) -> Tensor:
            positions_1T = np.arange(start, start + block, dtype=np.uint64)[None, :]
            return torch.from_numpy(uniforms_at(seeds_R1, begun_R1 + positions_1T)).to(device)

        def choose(logits_RV: Tensor, step: int, rows_R: Tensor) -> tuple[Tensor, Tensor]:
            uniforms_R = uniforms_from(step - step % block)[:, step % block][rows_R]
            return sample(logits_RV, uniforms_R, sampling.temperature)

        return choose

    def watch(self, decoding: Decoding) -> Callable[[], None]:
        """For after every step. Rows of a group that are not in this batch are finished, or wait."""
        places: dict[int, list[int]] = {}
        for place, row in enumerate(decoding.rows):
            places.setdefault(row.group, []).append(place)
        told = [self.requests[group] for group in places]
        checks = checks_of(told)
        if not checks and all(request.on_tokens is None and request.on_chunks is None for request in told):
            return lambda: None
        here = set(map(id, decoding.rows))
        others = {group: [row for row in self.groups[group] if id(row) not in here] for group in places}

        def tell() -> None:
            for check in checks:
                check()
            if decoding.step % TELL_EVERY == 0:
                lengths_R = decoding.lengths.cpu().numpy()
                for group, own in places.items():
                    on_tokens = self.requests[group].on_tokens
                    if on_tokens is not None:
                        on_tokens(int(lengths_R[own].sum()) + sum(len(row.tokens) for row in others[group]))
            if self.proof is not None and decoding.step % self.proof.rows == 0:
                chunks = cache(decoding.chunks)  # computed once, for the first group that asks
                for group in places:
                    on_chunks = self.requests[group].on_chunks
                    if on_chunks is not None:
                        on_chunks(partial(finished, group, chunks))

        def finished(group: int, chunks: Callable[[], list[Chunks]]) -> dict[int, Chunks]:
            found = {row.seed: Chunks(row.tokens, tuple(row.proofs)) for row in others[group] if row.proofs}
            return found | {decoding.rows[place].seed: chunks()[place] for place in places[group]}

        return tell


def choose_tiled(head: Head, state: Rows, step: int, choose: Choose, tile_elements: int) -> tuple[Tensor, Tensor]:
    """Logits and choice for all rows, the [rows, vocabulary] table in tiles."""
    size = max(1, tile_elements // head.weight.shape[0])
    pairs = zip(torch.split(state.hidden, size), torch.split(state.rows, size), strict=True)
    chosen = [choose(head.logits(hidden), step, rows) for hidden, rows in pairs]
    tokens, logprobs = zip(*chosen, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)
