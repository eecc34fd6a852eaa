"""The torch engine: batched decoding with a key-value cache, for any Hugging Face causal language model.

    requests ──by sampling parameters, then by length──► batches of rows
    batch:  prompts, left-padded ──one forward──► cache and last state of every prompt
            cache and state repeated once per seed        (a group's prompt is computed once)
            loop: head in float32 → inverse CDF at u[t] → finished rows leave the batch → one forward per token
                  rows to which the environment speaks take its tokens instead of drawn ones (`dialogue`)
                  the hidden states of every `rows` steps are folded into points (`decoding`)

Prefill needs no cache: sequences are right-padded, and a causal model never looks at what follows. Only where groups
share long prompts is each prompt computed once, and the completions after its cache.

B: prompts of a batch, R: rows (one per seed), L: padded length, T: tokens, H: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.engines.decoding import Choose, Decoding, Uniforms, choose_tiled
from shoal.engines.dialogue import Line
from shoal.engines.protocol import Chunks, Completion, GenerationRequest, Prefill, PrefillRequest, Respond
from shoal.engines.rows import CachedRows, RecomputedRows, Rows, decodes_with_cache, follows_with_cache
from shoal.errors import PolicyMismatch
from shoal.models.load import model_from_files
from shoal.models.logprobs import Head
from shoal.models.state import apply_state, change_state
from shoal.protocol import PolicyRef, ProofParameters, SamplingParameters, TensorView
from shoal.sampling.sampler import sample, token_statistics
from shoal.shardcast import ChangedValues
from shoal.toploc import PointBatch, top_points

COMPACT_BELOW = 0.8
TILE_ELEMENTS = 2**23
TILE_ELEMENTS_GPU = 2**28  # a GPU wants few, large tiles: a gigabyte of float32 each
UNIFORM_BLOCK = 256
SHARED_WORTH = 0.2  # the share of a batch that is prompts once more, from which on they are computed only once
TELL_EVERY = 4  # steps of decoding between two words about progress: each is a wait for the device
PREFILL_TOKENS = 65_536
PREFILL_TOKENS_CPU = 4_096  # larger batches fall out of the processor's caches: a third slower


def _nothing() -> None:
    """Nobody wants to know."""


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
        self.vocabulary_size, self.hidden_size = model.get_output_embeddings().weight.shape
        self.kind = f"{self.name}/{model.device.type}/{str(model.dtype).removeprefix('torch.')}"
        self.size_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        self._loaded, self.policy = False, None
        apply_state(self._model, tensors)
        self._loaded, self.policy = True, ref

    def update_policy(self, ref: PolicyRef, changes: Iterable[ChangedValues]) -> None:
        self._refuse_unloaded()
        self._loaded, self.policy = False, None
        change_state(self._model, changes)
        self._loaded, self.policy = True, ref

    def generate(
        self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = [[] for _ in requests]
        with self._inference():
            for sampling, indices in self._batches(requests):
                batch = [requests[index] for index in indices]
                rows = self._sample_batch(batch, sampling, proof)
                for index, request in zip(indices, batch, strict=True):
                    results[index] = [next(rows) for _ in request.seeds]
        return results

    def prefill(self, requests: Sequence[PrefillRequest], proof: ProofParameters | None = None) -> list[Prefill]:
        results: dict[int, Prefill] = {}
        with self._inference():
            for indices in self._prefill_batches(requests):
                batch = [requests[index] for index in indices]
                results.update(zip(indices, self._prefill_batch(batch, proof), strict=True))
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
                decoding = Decoding(len(indices), max_new_tokens, eos_token_id)
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
        self, batch: Sequence[GenerationRequest], sampling: SamplingParameters, proof: ProofParameters | None
    ) -> Iterator[Completion]:
        seeds = [seed for request in batch for seed in request.seeds]
        if not seeds:
            return iter(())
        stream = Uniforms(seeds, min(UNIFORM_BLOCK, sampling.max_new_tokens), self._model.device)

        def choose(logits_RV: Tensor, step: int, rows_R: Tensor) -> tuple[Tensor, Tensor]:
            return sample(logits_RV, stream.at(step)[rows_R], sampling.temperature)

        decoding = Decoding(len(seeds), sampling.max_new_tokens, sampling.eos_token_id, proof, self._lines(batch))
        counts = [len(request.seeds) for request in batch]

        def tell() -> None:
            if decoding.step % TELL_EVERY == 0:
                _tell_progress(batch, decoding.lengths())
            if proof is not None and decoding.step % proof.rows == 0:
                _tell_chunks(batch, cache(decoding.chunks))

        told = any(request.on_tokens is not None or request.on_chunks is not None for request in batch)
        watch = tell if told else _nothing
        self._decode([request.prompt_ids for request in batch], counts, decoding, choose, watch)
        return decoding.completions()

    def _lines(self, batch: Sequence[GenerationRequest]) -> dict[int, Line]:
        """One for every row of the requests whose turns are answered."""
        asked = [request for request in batch for _ in request.seeds]
        return {
            row: Line(
                partial(self._known, request.respond), request.sampling.eos_token_id, request.sampling.max_new_tokens
            )
            for row, request in enumerate(asked)
            if request.respond is not None
        }

    def _known(self, respond: Respond, token_ids: list[int]) -> tuple[int, ...] | None:
        given = respond(token_ids)
        if given:
            self._refuse_unknown(min(given), max(given))
        return given

    def _decode(
        self,
        prompts: Sequence[tuple[int, ...]],
        counts: Sequence[int],
        decoding: Decoding,
        choose: Choose,
        watch: Callable[[], None] = _nothing,
    ) -> None:
        """Prefill the prompts once, repeat each `counts` times, and decode until every row has finished.

        `watch` is called after every step.
        """
        sources = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(counts))
        state = self._rows_after(prompts, sources)
        head = Head.of(self._model)
        while True:
            drawn = choose_tiled(head, state, decoding.step, choose, self._tile_elements())
            tokens_R, logprobs_R = decoding.forced(state, *drawn)
            keep_R = decoding.record(state, tokens_R, logprobs_R)
            watch()
            if keep_R is None:
                return
            if int(keep_R.sum()) < COMPACT_BELOW * len(keep_R):
                state.select(keep_R.nonzero()[:, 0])
                tokens_R = tokens_R[keep_R]
            state.advance(self._model, tokens_R)

    def _rows_after(self, prompts: Sequence[tuple[int, ...]], source_R: Tensor) -> Rows:
        self._refuse_unknown(min(map(min, prompts)), max(map(max, prompts)))
        if decodes_with_cache(self._model):
            return CachedRows.after(self._model, prompts, source_R)
        return RecomputedRows.after(self._model, prompts, source_R, self._max_prefill_tokens)

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

    def _prefill_batch(self, batch: Sequence[PrefillRequest], proof: ProofParameters | None) -> list[Prefill]:
        lengths = [len(request.token_ids) for request in batch]
        hidden_NH = self._hidden_of(batch, lengths)
        tokens = np.concatenate([request.token_ids for request in batch]).astype(np.int64)
        temperatures = np.repeat([request.temperature for request in batch], lengths)
        columns = self._statistics(hidden_NH, torch.from_numpy(tokens), torch.from_numpy(temperatures))
        low, high, logprobs, entropy, varentropy = (values.cpu().numpy() for values in columns)
        points = _points(hidden_NH, lengths, proof)
        return [
            Prefill(logprobs[cut], low[cut], high[cut], entropy[cut], varentropy[cut], found)
            for cut, found in zip(_cuts(np.cumsum(lengths)), points, strict=True)
        ]

    def _hidden_of(self, batch: Sequence[PrefillRequest], lengths: Sequence[int]) -> Tensor:
        """The hidden state that each given token was drawn from, all requests' one after the other [N, H]."""
        prompts = list(dict.fromkeys(request.prompt_ids for request in batch))
        shared = sum(len(request.prompt_ids) for request in batch) - sum(map(len, prompts))
        worth_it = shared > SHARED_WORTH * (shared + sum(map(len, prompts)) + sum(lengths))
        if worth_it and follows_with_cache(self._model):
            return self._hidden_after(prompts, batch, lengths)
        starts_B1 = np.array([len(request.prompt_ids) for request in batch])[:, None]
        pieces = [piece for request in batch for piece in (request.prompt_ids, request.token_ids)]
        ids_BL, ends_B1 = self._laid_out(pieces, starts_B1[:, 0] + np.array(lengths))
        column_1L = np.arange(ids_BL.shape[1])[None, :]
        wanted_BL = ((column_1L >= starts_B1 - 1) & (column_1L < ends_B1 - 1))[:, :-1]
        device = self._model.device
        inputs_BL = torch.from_numpy(ids_BL[:, :-1].copy()).to(device)
        states = self._model.base_model(input_ids=inputs_BL, use_cache=False).last_hidden_state
        selected: Tensor = states[torch.from_numpy(wanted_BL).to(device)]
        return selected

    def _hidden_after(
        self, prompts: Sequence[tuple[int, ...]], batch: Sequence[PrefillRequest], lengths: Sequence[int]
    ) -> Tensor:
        """The same where a group shares its prompt: that is computed once, and what follows it with its cache."""
        place = {prompt: index for index, prompt in enumerate(prompts)}
        sources = [place[request.prompt_ids] for request in batch]
        self._refuse_unknown(min(map(min, prompts)), max(map(max, prompts)))
        state = CachedRows.after(self._model, prompts, torch.tensor(sources))
        ids_BT, ends_B1 = self._laid_out([request.token_ids for request in batch], np.array(lengths))
        device, n_more = self._model.device, ids_BT.shape[1] - 1
        states_BTH = state.hidden[:, None]
        if n_more:
            more_BT = torch.from_numpy(ids_BT[:, :-1].copy()).to(device)
            states_BTH = torch.cat([states_BTH, state.follow(self._model, more_BT)], dim=1)
        wanted_BT = np.arange(n_more + 1)[None, :] < ends_B1
        selected: Tensor = states_BTH[torch.from_numpy(wanted_BT).to(device)]
        return selected

    def _laid_out(
        self, pieces: Sequence[Any], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Token ids, piece after piece, in right-padded rows that end at `ends`; these once more, as a column."""
        ids_BL = np.zeros((len(ends), int(ends.max())), dtype=np.int64)
        ids_BL[np.arange(ids_BL.shape[1])[None, :] < ends[:, None]] = np.concatenate(pieces)
        self._refuse_unknown(int(ids_BL.min()), int(ids_BL.max()))
        return ids_BL, ends[:, None]

    def _statistics(self, hidden_NH: Tensor, tokens_N: Tensor, temperatures_N: Tensor) -> list[Tensor]:
        """What `token_statistics` says of all tokens, the [tokens, vocabulary] table in tiles."""
        head = Head.of(self._model)
        tokens_N, temperatures_N = tokens_N.to(hidden_NH.device), temperatures_N.double().to(hidden_NH.device)
        rows = max(1, self._tile_elements() // self.vocabulary_size)
        tiles = [
            token_statistics(head.logits(hidden), tokens, temperatures[:, None])
            for hidden, tokens, temperatures in zip(
                *(torch.split(column, rows) for column in (hidden_NH, tokens_N, temperatures_N)), strict=True
            )
        ]
        return [torch.cat(column) for column in zip(*tiles, strict=True)]

    def _tile_elements(self) -> int:
        return TILE_ELEMENTS if self._model.device.type == "cpu" else TILE_ELEMENTS_GPU

    def _refuse_unloaded(self) -> None:
        if not self._loaded:
            raise PolicyMismatch("no policy is loaded")

    def _refuse_unknown(self, smallest: int, largest: int) -> None:
        if smallest < 0 or largest >= self.vocabulary_size:
            raise ValueError(f"a token is outside the vocabulary of {self.vocabulary_size}")


def _tell_progress(batch: Sequence[GenerationRequest], lengths_R: npt.NDArray[np.int64]) -> None:
    """Say to each group how many tokens its rows have; those lie one group after the other."""
    ends = np.cumsum([len(request.seeds) for request in batch])
    for request, rows in zip(batch, _cuts(ends), strict=True):
        if request.on_tokens is not None:
            request.on_tokens(int(lengths_R[rows].sum()))


def _tell_chunks(batch: Sequence[GenerationRequest], chunks: Callable[[], list[Chunks]]) -> None:
    """Say to each group that chunks were finished; they are computed once, for the first group that asks."""
    ends = np.cumsum([len(request.seeds) for request in batch])
    for request, rows in zip(batch, _cuts(ends), strict=True):
        if request.on_chunks is not None:
            request.on_chunks(partial(_of_group, request.seeds, rows, chunks))


def _of_group(seeds: Sequence[int], rows: slice, chunks: Callable[[], list[Chunks]]) -> dict[int, Chunks]:
    return dict(zip(seeds, chunks()[rows], strict=True))


def _key(sampling: SamplingParameters) -> tuple[float, int, int]:
    return sampling.temperature, sampling.max_new_tokens, sampling.eos_token_id


def _points(hidden_NH: Tensor, lengths: Sequence[int], proof: ProofParameters | None) -> Sequence[PointBatch | None]:
    """The points of every sequence, from states that lie one sequence after the other."""
    if proof is None:
        return [None] * len(lengths)
    points = top_points(hidden_NH.to(torch.bfloat16), lengths, proof.topk, proof.rows)
    chunk_ends = np.cumsum([-(-length // proof.rows) for length in lengths])
    point_ends = np.cumsum(points.counts)[chunk_ends - 1]
    cuts = zip(_cuts(point_ends), _cuts(chunk_ends), strict=True)
    return [
        PointBatch(points.indices[at], points.bits[at], points.counts[chunks], points.sizes[chunks])
        for at, chunks in cuts
    ]


def _cuts(ends: npt.NDArray[np.int64]) -> list[slice]:
    """Where pieces that lie end to end are."""
    bounds = [0, *ends.tolist()]
    return list(map(slice, bounds, bounds[1:]))
