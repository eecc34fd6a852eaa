"""Rows that are decoded together by the plain path: their next tokens, and the proofs of their chunks.

The hidden states that tokens are drawn from are kept for `rows` steps at a time, in bf16, on the device, and become
proofs before the next block begins: memory stays bounded, and only points leave the device.

R: rows of the batch (one per seed), S: steps of a block, T: tokens, H: hidden size, V: vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.engines.cache import Rows
from shoal.engines.protocol import checks_of
from shoal.engines.rows import DrawnRow, report
from shoal.models.logprobs import Head
from shoal.protocol import ProofParameters
from shoal.sampling.sampler import sample
from shoal.sampling.stream import uniforms_at
from shoal.toploc import commit, top_points

COMPACT_BELOW = 0.8
UNIFORM_BLOCK = 256
REPORT_EVERY = 4  # steps of decoding between two reports of progress


class PlainBatch:
    """Rows of equal sampling that begin with equally many tokens. Other rows of their `groups` may have ended, or wait.
    Ended rows may stay in the batch for a while (dropping them copies the cache) and draw nothing."""

    def __init__(
        self, rows: Sequence[DrawnRow], groups: Sequence[Sequence[DrawnRow]], proof: ProofParameters | None
    ) -> None:
        self._rows, self._proof = rows, proof
        self._groups = [groups[group] for group in dict.fromkeys(row.group for row in rows)]
        self._checks = checks_of([group[0].request for group in self._groups])
        self._step = self._folded = len(rows[0].tokens)
        self._here = list(rows)  # those in the batch
        self._block_RSH, self._filled = torch.empty(0), 0
        self._sampling = rows[0].request.sampling
        self._seeds_R1 = np.array([row.seed for row in rows], dtype=np.uint64)[:, None]
        self._begun_R1 = np.array([row.request.begun for row in rows], dtype=np.uint64)[:, None]
        self._uniforms_RT, self._uniforms_from = torch.empty(0), 0

    def step(self, head: Head, state: Rows, tile_elements: int) -> Tensor | None:
        """Draw a token for each row. Returns the tokens of the rows that stay in the batch; None if all have ended."""
        for row, token, logprob in zip(self._here, *self._drawn(head, state, tile_elements), strict=True):
            if not row.ended:
                row.choose(token, logprob)
                row.take()
        self._step += 1
        is_over = all(row.ended for row in self._here)
        if self._proof is not None:
            self._keep(state, self._proof, is_over)
        for check in self._checks:
            check()
        for group in self._groups:
            report(group, self._proof, not self._filled, counts=self._step % REPORT_EVERY == 0)
        if is_over:
            return None
        alive = [place for place, row in enumerate(self._here) if not row.ended]
        if len(alive) < COMPACT_BELOW * len(self._here):
            state.select(torch.tensor(alive, device=state.rows.device))
            self._here = [self._here[place] for place in alive]
        return torch.tensor([row.chosen for row in self._here], device=state.rows.device)

    def _drawn(self, head: Head, state: Rows, tile_elements: int) -> tuple[list[int], list[float]]:
        """Logits and choice for all rows, the [rows, vocabulary] table in tiles."""
        size, greedy = max(1, tile_elements // head.weight.shape[0]), self._rows[0].greedy
        uniforms_R = None if greedy else self._uniforms(state.rows.device)
        tokens, logprobs = list[int](), list[float]()
        for hidden, rows_R in zip(torch.split(state.hidden, size), torch.split(state.rows, size), strict=True):
            logits = head.logits(hidden)
            if uniforms_R is None:
                tokens += logits.argmax(dim=1).tolist()
                logprobs += [0.0] * len(rows_R)
            else:
                drawn = sample(logits, uniforms_R[rows_R], self._sampling.temperature)
                tokens += drawn.tokens.tolist()
                logprobs += drawn.logprobs.tolist()
        return tokens, logprobs

    def _uniforms(self, device: torch.device) -> Tensor:
        """The uniforms of this step, computed a block at a time: a long limit would need gigabytes at once."""
        if not self._uniforms_from <= self._step < self._uniforms_from + self._uniforms_RT.shape[-1]:
            block = min(UNIFORM_BLOCK, self._sampling.max_new_tokens)
            positions_1T = np.arange(self._step, self._step + block, dtype=np.uint64)[None, :]
            self._uniforms_from = self._step
            self._uniforms_RT = torch.from_numpy(uniforms_at(self._seeds_R1, self._begun_R1 + positions_1T)).to(device)
        return self._uniforms_RT[:, self._step - self._uniforms_from]

    def _keep(self, state: Rows, proof: ProofParameters, is_over: bool) -> None:
        """Keep the states of this step. A full block, or the last one, becomes proofs: of each row as many states as it
        has tokens in the block."""
        if self._block_RSH.numel() == 0:
            shape = (len(self._rows), proof.rows, state.hidden.shape[-1])
            self._block_RSH = torch.empty(shape, dtype=torch.bfloat16, device=state.hidden.device)
        self._block_RSH[state.rows, self._filled] = state.hidden.to(torch.bfloat16)
        self._filled += 1
        if self._filled < proof.rows and not is_over:
            return
        counts_R = np.array([min(max(len(row.tokens) - self._folded, 0), self._filled) for row in self._rows])
        some = np.flatnonzero(counts_R)
        taken_RS = torch.from_numpy(np.arange(proof.rows)[None, :] < counts_R[:, None]).to(self._block_RSH.device)
        points = top_points(self._block_RSH[taken_RS], counts_R[some].tolist(), proof.topk, proof.rows)
        for place, made in zip(some.tolist(), commit(points), strict=True):
            self._rows[place].proofs.append(made)
        self._folded, self._filled = self._folded + self._filled, 0
