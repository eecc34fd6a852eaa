"""The torch engine: batched decoding with a key-value cache, for any Hugging Face causal language model.

    requests ──by sampling parameters, then by length──► batches of rows
    batch:  prompts, left-padded ──one forward──► cache and last state of every prompt
            cache and state repeated once per seed        (a group's prompt is computed once)
            loop: head in float32 → inverse CDF at u[t] → finished rows leave the batch → one forward per token

Prefill needs no cache: sequences are right-padded, and a causal model never looks at what follows.

B: prompts of a batch, R: rows (one per seed), L: padded length, T: tokens, H: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.engines.cache import growing_cache
from shoal.engines.protocol import Completion, GenerationRequest, Prefill, PrefillRequest
from shoal.errors import PolicyMismatch
from shoal.models.load import model_from_files
from shoal.models.logprobs import Head
from shoal.models.state import apply_state, change_state
from shoal.protocol import PolicyRef, SamplingParameters, TensorView
from shoal.sampling.sampler import intervals, sample
from shoal.sampling.stream import uniforms_matrix
from shoal.shardcast import ChangedValues

COMPACT_BELOW = 0.8
TILE_ELEMENTS = 2**23
UNIFORM_BLOCK = 256
PREFILL_TOKENS = 65_536
PREFILL_TOKENS_CPU = 4_096  # larger batches fall out of the processor's caches: a third slower

# Chooses the next token of each row: (logits_RV, step, row indices) -> (tokens_R, logprobs_R).
Choose = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]


class TorchEngine:
    """Implements `Engine` on torch. `max_rows` and `max_prefill_tokens` bound memory, not what may be asked for."""

    name = "torch"

    def __init__(
        self,
        files: Mapping[str, bytes],
        dtype: str = "float32",
        device: str = "cpu",
        max_rows: int = 2048,
        max_prefill_tokens: int | None = None,
    ) -> None:
        self._setup(model_from_files(files, dtype, device), max_rows, max_prefill_tokens)

    @classmethod
    def wrap(cls, model: Any, max_rows: int = 2048, max_prefill_tokens: int | None = None) -> Self:
        """An engine around a model that somebody else owns and changes (the trainer's): nothing is copied."""
        engine = cls.__new__(cls)
        engine._setup(model, max_rows, max_prefill_tokens)
        engine._loaded = engine._shared = True
        return engine

    def _setup(self, model: Any, max_rows: int, max_prefill_tokens: int | None) -> None:
        self._model = model
        self._max_rows = max_rows
        default = PREFILL_TOKENS_CPU if model.device.type == "cpu" else PREFILL_TOKENS
        self._max_prefill_tokens = max_prefill_tokens or default
        self._loaded = self._shared = False
        self.policy: PolicyRef | None = None
        self.vocabulary_size: int = model.get_output_embeddings().weight.shape[0]

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        self._loaded, self.policy = False, None
        apply_state(self._model, tensors)
        self._loaded, self.policy = True, ref

    def update_policy(self, ref: PolicyRef, changes: Iterable[ChangedValues]) -> None:
        self._refuse_unloaded()
        self._loaded, self.policy = False, None
        change_state(self._model, changes)
        self._loaded, self.policy = True, ref

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        results: list[list[Completion]] = [[] for _ in requests]
        with self._inference():
            for sampling, indices in self._batches(requests):
                batch = [requests[index] for index in indices]
                rows = self._sample_batch(batch, sampling, keep_hidden)
                for index, request in zip(indices, batch, strict=True):
                    results[index] = [next(rows) for _ in request.seeds]
        return results

    def prefill(self, requests: Sequence[PrefillRequest], keep_hidden: bool = False) -> list[Prefill]:
        results: dict[int, Prefill] = {}
        with self._inference():
            for indices in self._prefill_batches(requests):
                batch = [requests[index] for index in indices]
                results.update(zip(indices, self._prefill_batch(batch, keep_hidden), strict=True))
        return [results[index] for index in range(len(requests))]

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_id: int
    ) -> list[npt.NDArray[np.int32]]:
        def choose(logits_RV: Tensor, _step: int, rows_R: Tensor) -> tuple[Tensor, Tensor]:
            return logits_RV.argmax(dim=1), torch.zeros(len(rows_R), device=logits_RV.device)

        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        results: dict[int, npt.NDArray[np.int32]] = {}
        with self._inference():
            for start in range(0, len(order), self._max_rows):
                indices = order[start : start + self._max_rows]
                decoding = _Decoding(len(indices), max_new_tokens, eos_token_id, keep_hidden=False)
                self._decode([prompts[index] for index in indices], [1] * len(indices), decoding, choose)
                results.update(zip(indices, decoding.tokens(), strict=True))
        return [results[index] for index in range(len(prompts))]

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """No gradients, evaluation mode; a wrapped model gets its own mode back."""
        self._refuse_unloaded()
        training = self._model.training
        self._model.eval()
        try:
            # Tensors made in inference mode can never carry a gradient, not even ones that a shared model keeps.
            with torch.no_grad() if self._shared else torch.inference_mode():
                yield
        finally:
            self._model.train(training)

    def _batches(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[SamplingParameters, list[int]]]:
        """Requests that can be decoded together: equal sampling, similar length, at most `max_rows` rows."""
        order = sorted(range(len(requests)), key=lambda i: (_key(requests[i].sampling), len(requests[i].prompt_ids)))
        batch: list[int] = []
        rows = 0
        for index in order:
            request = requests[index]
            full = rows + len(request.seeds) > self._max_rows
            if batch and (full or request.sampling != requests[batch[0]].sampling):
                yield requests[batch[0]].sampling, batch
                batch, rows = [], 0
            batch.append(index)
            rows += len(request.seeds)
        if batch:
            yield requests[batch[0]].sampling, batch

    def _sample_batch(
        self, batch: Sequence[GenerationRequest], sampling: SamplingParameters, keep_hidden: bool
    ) -> Iterator[Completion]:
        seeds = [seed for request in batch for seed in request.seeds]
        if not seeds:
            return iter(())
        stream = _Uniforms(seeds, min(UNIFORM_BLOCK, sampling.max_new_tokens), self._model.device)

        def choose(logits_RV: Tensor, step: int, rows_R: Tensor) -> tuple[Tensor, Tensor]:
            return sample(logits_RV, stream.at(step)[rows_R], sampling.temperature)

        decoding = _Decoding(len(seeds), sampling.max_new_tokens, sampling.eos_token_id, keep_hidden)
        counts = [len(request.seeds) for request in batch]
        self._decode([request.prompt_ids for request in batch], counts, decoding, choose)
        return decoding.completions()

    def _decode(
        self, prompts: Sequence[tuple[int, ...]], counts: Sequence[int], decoding: _Decoding, choose: Choose
    ) -> None:
        """Prefill the prompts once, repeat each `counts` times, and decode until every row has finished."""
        state = self._prompt_state(prompts, torch.tensor(counts))
        head = Head.of(self._model)
        while True:
            tokens_R, logprobs_R = _choose_tiled(head, state, decoding.step, choose)
            keep_R = decoding.record(state, tokens_R, logprobs_R)
            if keep_R is None:
                return
            if int(keep_R.sum()) < COMPACT_BELOW * len(keep_R):
                state.select(keep_R.nonzero()[:, 0])
                tokens_R = tokens_R[keep_R]
            state.advance(self._model, tokens_R)

    def _prompt_state(self, prompts: Sequence[tuple[int, ...]], counts: Tensor) -> _RowState:
        longest = max(map(len, prompts))
        ids_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_BL = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            self._refuse_unknown(prompt)
            ids_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_BL[row, longest - len(prompt) :] = True
        device = self._model.device
        ids_BL, mask_BL, counts = ids_BL.to(device), mask_BL.to(device), counts.to(device)
        positions_BL = (mask_BL.long().cumsum(dim=1) - 1).clamp(min=0)
        cache = growing_cache(self._model.config)
        output = self._model.base_model(
            input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL, past_key_values=cache, use_cache=True
        )
        source_R = torch.repeat_interleave(torch.arange(len(prompts), device=device), counts)
        cache.batch_select_indices(source_R)
        return _RowState(
            rows=torch.arange(len(source_R), device=device),
            hidden=output.last_hidden_state[:, -1][source_R],
            position=positions_BL[source_R, -1],
            mask=mask_BL[source_R],
            cache=cache,
        )

    def _prefill_batches(self, requests: Sequence[PrefillRequest]) -> Iterator[list[int]]:
        """Indices of requests of similar length, at most `max_prefill_tokens` padded tokens together."""

        def length(index: int) -> int:
            return len(requests[index].prompt_ids) + len(requests[index].token_ids) - 1

        batch: list[int] = []
        for index in sorted(range(len(requests)), key=length):
            if batch and length(index) * (len(batch) + 1) > self._max_prefill_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _prefill_batch(self, batch: Sequence[PrefillRequest], keep_hidden: bool) -> list[Prefill]:
        lengths = [len(request.token_ids) for request in batch]
        hidden_NH = self._hidden_of(batch)
        flat = np.concatenate([request.token_ids for request in batch]).astype(np.int64)
        temperatures = [request.temperature for request in batch for _ in request.token_ids]
        tokens_N = torch.from_numpy(flat).to(hidden_NH.device)
        low_N, high_N, logprobs_N = self._intervals(hidden_NH, tokens_N, torch.tensor(temperatures))
        ends = np.cumsum(lengths)[:-1]
        columns = [np.split(_numpy(values), ends) for values in (logprobs_N, low_N, high_N)]
        states = np.split(_numpy(hidden_NH.float()), ends) if keep_hidden else [None] * len(batch)
        return [Prefill(*parts) for parts in zip(*columns, states, strict=True)]

    def _hidden_of(self, batch: Sequence[PrefillRequest]) -> Tensor:
        """The hidden state that each given token was drawn from, all requests' one after the other [N, H]."""
        inputs = [[*request.prompt_ids, *map(int, request.token_ids)] for request in batch]
        longest = max(map(len, inputs)) - 1
        ids_BL = torch.zeros(len(batch), longest, dtype=torch.long)
        wanted_BL = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, (request, ids) in enumerate(zip(batch, inputs, strict=True)):
            self._refuse_unknown(ids)
            ids_BL[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            wanted_BL[row, len(request.prompt_ids) - 1 : len(ids) - 1] = True
        device = self._model.device
        states = self._model.base_model(input_ids=ids_BL.to(device), use_cache=False).last_hidden_state
        selected: Tensor = states[wanted_BL.to(device)]
        return selected

    def _intervals(self, hidden_NH: Tensor, tokens_N: Tensor, temperatures_N: Tensor) -> list[Tensor]:
        """Interval ends and log-probabilities of tokens, the [tokens, vocabulary] table in tiles."""
        head = Head.of(self._model)
        rows = max(1, TILE_ELEMENTS // self.vocabulary_size)
        tiles = []
        for start in range(0, len(tokens_N), rows):
            part = slice(start, start + rows)
            temperature_N1 = temperatures_N[part, None].double().to(hidden_NH.device)
            tiles.append(intervals(head.logits(hidden_NH[part]), tokens_N[part], temperature_N1))
        return [torch.cat(column) for column in zip(*tiles, strict=True)]

    def _refuse_unloaded(self) -> None:
        if not self._loaded:
            raise PolicyMismatch("no policy is loaded")

    def _refuse_unknown(self, token_ids: Sequence[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self.vocabulary_size:
            raise ValueError(f"a token is outside the vocabulary of {self.vocabulary_size}")


@dataclass
class _RowState:
    """The rows still in the batch: their indices, last hidden states, positions, masks and cache."""

    rows: Tensor
    hidden: Tensor
    position: Tensor
    mask: Tensor
    cache: Any

    def select(self, kept: Tensor) -> None:
        self.rows, self.hidden = self.rows[kept], self.hidden[kept]
        self.position, self.mask = self.position[kept], self.mask[kept]
        self.cache.batch_select_indices(kept)

    def advance(self, model: Any, tokens_R: Tensor) -> None:
        """Feed each row its own token; afterwards `hidden` is what the next token is drawn from."""
        self.position = self.position + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens_R), 1)], dim=1)
        output = model.base_model(
            input_ids=tokens_R[:, None],
            attention_mask=self.mask,
            position_ids=self.position[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.hidden = output.last_hidden_state[:, -1]


class _Uniforms:
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


@dataclass
class _Decoding:
    """What has been decoded so far, step by step; rows are those of the whole batch, finished or not."""

    n_rows: int
    max_new_tokens: int
    eos_token_id: int
    keep_hidden: bool
    step: int = 0
    _alive: Tensor | None = None
    _steps: list[tuple[Tensor, ...]] = field(default_factory=list)

    def record(self, state: _RowState, tokens_R: Tensor, logprobs_R: Tensor) -> Tensor | None:
        """Take one token per live row; returns which rows of the batch go on, or None when none does.

        Finished rows may linger in the batch (dropping them costs a copy of the cache); they write nothing.
        """
        if self._alive is None:
            self._alive = torch.ones(self.n_rows, dtype=torch.bool, device=tokens_R.device)
        live_R = self._alive[state.rows]
        columns = (state.rows, tokens_R, logprobs_R, *((state.hidden.float(),) if self.keep_hidden else ()))
        self._steps.append(tuple(column[live_R] for column in columns))
        self.step += 1
        keep_R = live_R & (tokens_R != self.eos_token_id)
        self._alive[state.rows] = keep_R
        if self.step == self.max_new_tokens or not bool(keep_R.any()):
            return None
        return keep_R

    def columns(self) -> list[list[npt.NDArray[Any]]]:
        """Tokens, log-probabilities and, if kept, hidden states: for each, one array per row."""
        rows_N, *values = [_numpy(torch.cat(column)) for column in zip(*self._steps, strict=True)]
        order_N = np.argsort(rows_N, kind="stable")
        ends = np.cumsum(np.bincount(rows_N, minlength=self.n_rows))[:-1]
        return [np.split(column[order_N], ends) for column in values]

    def tokens(self) -> list[npt.NDArray[np.int32]]:
        return [tokens.astype(np.int32) for tokens in self.columns()[0]]

    def completions(self) -> Iterator[Completion]:
        for tokens, logprobs, *hidden in zip(*self.columns(), strict=True):
            yield Completion(
                token_ids=tokens.astype(np.int32),
                logprobs=logprobs,
                finish="eos" if tokens[-1] == self.eos_token_id else "length",
                hidden=hidden[0] if hidden else None,
            )


def _choose_tiled(head: Head, state: _RowState, step: int, choose: Choose) -> tuple[Tensor, Tensor]:
    """Logits and choice for all rows, the [rows, vocabulary] table in tiles."""
    size = max(1, TILE_ELEMENTS // head.weight.shape[0])
    pairs = zip(torch.split(state.hidden, size), torch.split(state.rows, size), strict=True)
    chosen = [choose(head.logits(hidden), step, rows) for hidden, rows in pairs]
    tokens, logprobs = zip(*chosen, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _key(sampling: SamplingParameters) -> tuple[float, int, int]:
    return sampling.temperature, sampling.max_new_tokens, sampling.eos_token_id


def _numpy(values: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = values.cpu().numpy()
    return array
