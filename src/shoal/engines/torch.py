"""The torch engine: batched decoding with a key-value cache, for any Hugging Face causal language model.

    requests ──by sampling parameters, then by length──► batches of rows, as many as fit into memory (`memory`)
    batch:  prompts, left-padded ──one forward, or pieces that fit──► cache and last state of every prompt
            cache and state repeated once per seed        (a group's prompt is computed once)
            loop: head in float32 → inverse CDF at u[t] → finished rows leave the batch → one forward per token
                  tool tokens replace drawn ones where the environment speaks (`dialogue`)
                  the hidden states of every `rows` steps are folded into proofs (`plain`)

A batch that does not fit into memory is halved: finished rows are kept, the others resume from their last whole chunk.
The limit is remembered; a group is split over batches if necessary, down to one row.

Prefill needs no cache: sequences are right-padded, and a causal model never looks at what follows. Only if groups share
long prompts is each prompt computed once, and the completions after its cache.

B: prompts of a batch, R: rows (one per seed), L: padded length, T: tokens, H: hidden size, V: vocabulary.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.engines import memory
from shoal.engines.batching import RowBatch, paged_decoder
from shoal.engines.cache import Rows, bytes_kept, check_cache, follows_with_cache
from shoal.engines.cpu.decoder import CpuDecoder
from shoal.engines.decoder import POOL_SHARE, PagedDecoder
from shoal.engines.memory import MEMORY_ERRORS, Room, is_out_of_memory, release_memory
from shoal.engines.plain import PlainBatch
from shoal.engines.protocol import PLAIN, GenerationRequest, Groups, Prefill, PrefillRequest
from shoal.engines.rows import DrawingEngine, DrawnRow
from shoal.errors import ModelError, ResourceError
from shoal.models.load import model_from_files
from shoal.models.logprobs import Head
from shoal.models.state import NARROWER, apply_state, change_state, policy_state
from shoal.protocol import PolicyRef, ProofParameters, TensorView
from shoal.sampling.sampler import token_statistics
from shoal.shardcast import ChangedValues
from shoal.toploc import PointBatch, top_points

log = logging.getLogger(__name__)

TILE_ELEMENTS = 2**23
TILE_ELEMENTS_GPU = 2**28  # a GPU wants few, large tiles: a gigabyte of float32 each
SHARED_WORTH = 0.2  # share of repeated prompts in a batch: with more, each prompt is computed once
CATCH_UP = 64  # tokens of each row at once, when a batch resumes from its kept tokens
LEAST_TILE = 2**20
TILE_SHARE = 16  # a tile of logits takes at most this part of the memory that may be used
EXPANDED = 4  # simultaneous tensors of a layer that are as large as the fastest growing one
PREFILL_TOKENS = 65_536
PREFILL_TOKENS_CPU = 4_096  # larger batches do not fit into the processor's caches: a third slower


class TorchEngine(DrawingEngine):
    """`max_rows` and `max_prefill_tokens` bound what is computed at once, not what may be asked for; within them, as
    much as fits into free memory, or into `memory_bytes` if those are set."""

    name = "torch"
    memory_bytes: int | None = None
    _paged_kind: type[PagedDecoder]

    def __init__(
        self, files: Mapping[str, bytes], dtype: str = "float32", device: str = "cpu", max_rows: int = 2048,
        max_prefill_tokens: int | None = None, pages: bool | None = None,
    ) -> None:  # fmt: skip
        self._setup(model_from_files(files, dtype, device, filled=False), max_rows, max_prefill_tokens)
        self._may_page = pages is not False
        if pages:
            self._paged_kind = PagedDecoder

    @classmethod
    def wrap(
        cls, model: Any, max_rows: int = 2048, max_prefill_tokens: int | None = None, pages: bool = False
    ) -> Self:  # fmt: skip
        """An engine around a model that somebody else owns and changes (the trainer's). Nothing is copied."""
        engine = cls.__new__(cls)
        engine._setup(model, max_rows, max_prefill_tokens)
        engine._loaded, engine._shared, engine._may_page = True, True, pages
        return engine

    def copied(self, files: Mapping[str, bytes], dtype: str, pages: bool = True) -> TorchEngine:
        """Another engine on the same device with a copy of the policy, computing in `dtype`; without `pages` by the
        plain path. Weights that `dtype` cannot hold are a `ModelError`: workers never compute with rounded weights."""
        self._refuse_unloaded()
        model, state = model_from_files(files, dtype, self._model.device.type, filled=False), policy_state(self._model)
        with torch.no_grad():
            for name, target in policy_state(model).items():
                source = state[name].to(target.device)
                target.copy_(source)
                if not torch.equal(target.to(source.dtype), source):
                    raise ModelError(f"weight {name} has values that {dtype} cannot hold{NARROWER}")
        engine = TorchEngine.wrap(model, self._max_rows)
        engine._shared, engine._may_page, engine._paged_kind = False, self._may_page and pages, self._paged_kind
        engine.memory_bytes = self.memory_bytes
        return engine

    @property
    def model(self) -> Any:
        return self._model

    @property
    def kind(self) -> str:
        """A GPU has two paths that round differently: `torch` decodes with pages and captured steps, `torch-plain`
        without. Which one a model takes is tried once its weights are loaded."""
        device, path = self._model.device.type, self.name
        if device == "cuda" and self._loaded:
            self._measure_room()
            with self._inference():
                path = self.name if self._paged() is not None else PLAIN
        return f"{path}/{device}/{str(self._model.dtype).removeprefix('torch.')}"

    def _setup(self, model: Any, max_rows: int, max_prefill_tokens: int | None) -> None:
        self._model, self._max_rows = model, max_rows
        default = PREFILL_TOKENS_CPU if model.device.type == "cpu" else PREFILL_TOKENS
        self._max_prefill_tokens = max_prefill_tokens or default
        self._room, self._prefill_room = Room(1), Room(1)  # until they are measured
        self._most_tile, self._tile_divisor = LEAST_TILE, 1
        self._usable, self._width = 0, memory.width(model)
        self._kept: tuple[int, int, int] | None = None  # `bytes_kept`, once measured
        self._loaded = self._shared = self._may_page = False
        self._paged_kind = CpuDecoder if model.device.type == "cpu" else PagedDecoder
        self._pages: PagedDecoder | None = None
        self._pages_tried, self._paged_tokens = False, sys.maxsize
        self.policy: PolicyRef | None = None
        self.vocabulary_size, self.hidden_size = model.get_output_embeddings().weight.shape
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

    def prefill(self, requests: Sequence[PrefillRequest], proof: ProofParameters | None = None) -> list[Prefill]:
        results: dict[int, Prefill] = {}
        self._measure_room()
        left = sorted(range(len(requests)), key=lambda index: _length(requests[index]))
        with self._inference():
            while left:  # requests of similar length together, as many padded tokens as there is room for
                size = 1
                while size < len(left) and (size + 1) * _length(requests[left[size]]) <= self._prefill_room.tokens:
                    size += 1
                found = self._try_prefill([requests[index] for index in left[:size]], proof)
                if found is not None:  # else the room has shrunk
                    results.update(zip(left[:size], found, strict=True))
                    left = left[size:]
        return [results[index] for index in range(len(requests))]

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """No gradients, evaluation mode; a wrapped model gets its own mode back."""
        self._refuse_unloaded()
        training = self._model.training
        if training:
            self._model.eval()
        try:
            # Tensors made in inference mode can never carry a gradient, not even ones that a shared model keeps.
            with torch.no_grad() if self._shared else torch.inference_mode():
                yield
        finally:
            if training:  # each call walks over all modules
                self._model.train()

    def release(self) -> None:
        """On a GPU: give back the memory of pages and captured steps, which training needs."""
        if self._pages is not None and self._model.device.type == "cuda":
            self._pages.drop()
            torch.cuda.empty_cache()

    def rows_at_once(self, tokens_each: int) -> int:
        self._measure_cache()
        self._measure_room()
        with self._inference():
            pages = self._paged()
        if pages is None:
            return self._fitting_rows(tokens_each)
        there = int(POOL_SHARE * (self._usable + pages.held_bytes)) // pages.page_bytes
        return max(1, min(self._max_rows, self._computable(tokens_each), there // pages.pages_for(tokens_each)))

    def _paged(self) -> PagedDecoder | None:
        """The decoder with pages, if this model can use it: tried once there are weights."""
        if not self._may_page or not self._loaded:
            return None
        if not self._pages_tried:
            self._pages, self._pages_tried = paged_decoder(self._model, self._usable, self._paged_kind), True
        return self._pages

    def _measure_room(self) -> None:
        """How much may be computed at once, from the memory that is free now."""
        left = None if self.memory_bytes is None else self.memory_bytes - self.size_bytes
        self._usable = usable = memory.usable_bytes(self._model.device.type, left)
        self._room.most = max(1, usable // self._token_bytes())
        self._most_tile = max(LEAST_TILE, usable // (TILE_SHARE * 4))
        self._prefill_room.most = min(self._max_prefill_tokens, self._computable(0))

    def _measure_cache(self) -> None:
        """Measure the cache's size once: a configuration may be wrong."""
        if self._kept is not None or not self._loaded:
            return
        with self._inference():
            try:
                check_cache(self._model)
                self._kept = bytes_kept(self._model)
            except MEMORY_ERRORS as error:
                if not is_out_of_memory(error):
                    raise

    def _token_bytes(self) -> int:
        """Bytes of a token in the cache, by the configuration or as measured, whichever is more."""
        kept, _, expanded = self._kept or (0, 0, 0)
        said = memory.cached_token_bytes(self._model.config.get_text_config(), self._model.dtype.itemsize)
        return max(said, memory.ALLOWANCE * kept, EXPANDED * expanded)

    def _computable(self, longest: int) -> int:
        """How many tokens of rows of up to so many fit into memory while a layer is computed; at least one."""
        config, itemsize = self._model.config.get_text_config(), self._model.dtype.itemsize
        return max(1, self._usable // memory.computed_token_bytes(config, itemsize, self._width, longest))

    def _drawn(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None, greedy: bool) -> Groups:
        self._measure_cache()
        self._measure_room()
        groups = [
            [DrawnRow(request, seed, self.vocabulary_size, group, greedy) for seed in request.seeds]
            for group, request in enumerate(requests)
        ]
        with self._inference():
            left = [row for group in groups for row in group]
            tokens = max((row.longest for row in left), default=1)
            at_once, prompts = self._computable(tokens), [request.prompt_ids for request in requests]
            pages = None if any(request.respond for request in requests) else self._paged()
            if pages is not None and left:
                self._refuse_unknown(*prompts)
                if max(map(len, prompts)) > at_once:
                    pages = None  # the plain path computes a prompt in pieces
            most = min(self._max_rows, at_once)
            while pages is not None and left and (most := min(most, self._paged_tokens // tokens)):
                left = RowBatch(pages, requests, groups, proof, at_once).draw(self._usable + pages.held_bytes, most)
                if left:
                    most = min(most, len(left)) // 2
                    self._paged_tokens = most * tokens or self._paged_tokens  # what does not fit is remembered
                    log.warning("memory did not suffice for all rows at once: trying %d", most)
            for begun in sorted({len(row.tokens) for row in left}):
                for rows in self._batches([row for row in left if len(row.tokens) == begun]):
                    waiting = [rows]  # if memory runs out, half as many at once, from their kept tokens
                    while waiting:
                        rows = waiting.pop()
                        size = self._fitting_rows(max(row.longest for row in rows))
                        left_over = self._try_draw(rows[:size], groups, proof)
                        waiting += [part for part in (rows[size:], left_over) if part]
        return [[row.completion() for row in group] for group in groups]

    def _batches(self, rows: Sequence[DrawnRow]) -> Iterator[list[DrawnRow]]:
        """Rows that can be decoded together: equal sampling, similar length, as many as fit. Groups stay whole if they
        fit; each batch uses what the one before showed."""
        groups: dict[int, list[DrawnRow]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        asked = {group: own[0].request for group, own in groups.items()}
        batch: list[DrawnRow] = []
        for index in sorted(groups, key=lambda i: (repr(asked[i].sampling), len(asked[i].prompt_ids))):
            own = groups[index]
            fitting = self._fitting_rows(own[0].longest)
            if batch and (len(batch) + len(own) > fitting or asked[index].sampling != batch[0].request.sampling):
                yield batch
                batch = []
            while len(own) > (fitting := self._fitting_rows(own[0].longest)):
                size = -(-len(own) // -(-len(own) // fitting))
                yield own[:size]
                own = own[size:]
            batch = batch + own
        if batch:
            yield batch

    def _fitting_rows(self, tokens_each: int) -> int:
        own = self._kept[1] // self._token_bytes() if self._kept else 0
        return max(1, min(self._max_rows, self._room.tokens // (tokens_each + own), self._computable(tokens_each)))

    def _try_draw(
        self, batch: list[DrawnRow], groups: Sequence[Sequence[DrawnRow]], proof: ProofParameters | None
    ) -> list[DrawnRow]:
        """Draw the rows of a batch; returns those that did not fit into memory."""
        size = len(batch) * max(row.longest for row in batch)
        try:
            self._decode(batch, PlainBatch(batch, groups, proof))
            self._room.fitted(size)
            return []
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # here, because the error's traceback held the tensors
        left = [row for row in batch if row.cut(proof)]
        if len(batch) == 1 and left:
            asked, short = batch[0].request, f"does not fit into the memory that is free for {self.kind}"
            limit, longest = asked.sampling.max_new_tokens, len(asked.prompt_ids)
            raise ResourceError(f"one completion of up to {limit} tokens, after a prompt of {longest}, {short}")
        self._room.failed(size)
        log.warning(
            "memory did not suffice for %d completions at once: %d of them are continued from token %d, half as many "
            "at once", len(batch), len(left), len(left[0].tokens) if left else 0,
        )  # fmt: skip
        return left

    def _decode(self, rows: Sequence[DrawnRow], batch: PlainBatch) -> None:
        """Prefill each prompt once, repeat it for its rows, and decode until every row has finished."""
        asked = {row.group: row.request.prompt_ids for row in rows}
        prompts, place = list(asked.values()), {group: index for index, group in enumerate(asked)}
        self._refuse_unknown(*prompts)
        check_cache(self._model)
        most = self._computable(max(row.longest for row in rows))
        state = Rows.after(self._model, prompts, torch.tensor([place[row.group] for row in rows]), most)
        kept_RT = torch.tensor([row.tokens for row in rows], dtype=torch.long, device=self._model.device)
        at_once = max(1, min(CATCH_UP, most // len(rows))) if follows_with_cache(self._model) else 1
        for ids_RT in torch.split(kept_RT, at_once, dim=1) if kept_RT.numel() else ():
            state.hidden = state.follow(self._model, ids_RT)[:, -1]
        head = Head.of(self._model)
        while (tokens_R := batch.step(head, state, self._tile_elements())) is not None:
            state.advance(self._model, tokens_R)

    def _try_prefill(self, batch: Sequence[PrefillRequest], proof: ProofParameters | None) -> list[Prefill] | None:
        """The prefills of a batch; None if they do not fit into memory, and less must be tried."""
        longest = max(map(_length, batch))
        try:
            found = self._prefill_batch(batch, proof)
            self._prefill_room.fitted(len(batch) * longest)
            return found
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # here, because the error's traceback held the tensors
        if len(batch) > 1:
            self._prefill_room.failed(len(batch) * longest)
        elif self._tile_elements() > LEAST_TILE:
            self._tile_divisor *= 4
        else:
            short = f"does not fit into the memory that is free for {self.kind}"
            raise ResourceError(f"the prefill of one sequence of {longest} tokens {short}")
        log.warning("memory did not suffice for a prefill of %d sequences at once: trying less", len(batch))
        return None

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
        """The hidden states that the tokens were drawn from, all requests end to end [N, H]."""
        prompts = list(dict.fromkeys(request.prompt_ids for request in batch))
        shared = sum(len(request.prompt_ids) for request in batch) - sum(map(len, prompts))
        worth_it = shared > SHARED_WORTH * (shared + sum(map(len, prompts)) + sum(lengths))
        if worth_it and follows_with_cache(self._model):
            place = {prompt: index for index, prompt in enumerate(prompts)}
            sources = [place[request.prompt_ids] for request in batch]
            self._refuse_unknown(*prompts)
            longest = max(map(len, prompts))
            state = Rows.after(self._model, prompts, torch.tensor(sources), self._computable(longest))
            ids_BT, ends_B1 = self._laid_out([request.token_ids for request in batch], np.array(lengths))
            device, n_more = self._model.device, ids_BT.shape[1] - 1
            states_BTH = state.hidden[:, None]
            if n_more:
                more_BT = torch.from_numpy(ids_BT[:, :-1].copy()).to(device)
                states_BTH = torch.cat([states_BTH, state.follow(self._model, more_BT)], dim=1)
            wanted_BT = np.arange(n_more + 1)[None, :] < ends_B1
            followed_NH: Tensor = states_BTH[torch.from_numpy(wanted_BT).to(device)]
            return followed_NH
        device, starts_B1 = self._model.device, np.array([len(request.prompt_ids) for request in batch])[:, None]
        pieces = [piece for request in batch for piece in (request.prompt_ids, request.token_ids)]
        ids_BL, ends_B1 = self._laid_out(pieces, starts_B1[:, 0] + np.array(lengths))
        column_1L = np.arange(ids_BL.shape[1])[None, :]
        wanted_BL = ((column_1L >= starts_B1 - 1) & (column_1L < ends_B1 - 1))[:, :-1]
        inputs_BL = torch.from_numpy(ids_BL[:, :-1].copy()).to(device)
        states = self._model.base_model(input_ids=inputs_BL, use_cache=False).last_hidden_state
        selected: Tensor = states[torch.from_numpy(wanted_BL).to(device)]
        return selected

    def _laid_out(
        self, pieces: Sequence[Any], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Token ids, piece after piece, in right-padded rows that end at `ends`; and `ends` as a column."""
        ids_BL = np.zeros((len(ends), int(ends.max())), dtype=np.int64)
        ids_BL[np.arange(ids_BL.shape[1])[None, :] < ends[:, None]] = np.concatenate(pieces)
        self._refuse_unknown((int(ids_BL.min()), int(ids_BL.max())))
        return ids_BL, ends[:, None]

    def _statistics(self, hidden_NH: Tensor, tokens_N: Tensor, temperatures_N: Tensor) -> list[Tensor]:
        """`token_statistics` of all tokens, the [tokens, vocabulary] table in tiles."""
        head = Head.of(self._model)
        tokens_N, temperatures_N = tokens_N.to(hidden_NH.device), temperatures_N.double().to(hidden_NH.device)
        rows = max(1, self._tile_elements() // self.vocabulary_size)
        columns = (torch.split(column, rows) for column in (hidden_NH, tokens_N, temperatures_N))
        parts = zip(*columns, strict=True)
        tiles = [token_statistics(head.logits(hidden), tokens, heat[:, None]) for hidden, tokens, heat in parts]
        return [torch.cat(column) for column in zip(*tiles, strict=True)]

    def _tile_elements(self) -> int:
        usual = TILE_ELEMENTS if self._model.device.type == "cpu" else TILE_ELEMENTS_GPU
        return min(usual, self._most_tile) // self._tile_divisor


def _length(request: PrefillRequest) -> int:
    return len(request.prompt_ids) + len(request.token_ids) - 1


def _points(hidden_NH: Tensor, lengths: Sequence[int], proof: ProofParameters | None) -> Sequence[PointBatch | None]:
    """The points of every sequence, from states end to end."""
    if proof is None:
        return [None] * len(lengths)
    points = top_points(hidden_NH.to(torch.bfloat16), lengths, proof.topk, proof.rows)
    return [points[chunks] for chunks in _cuts(np.cumsum([-(-length // proof.rows) for length in lengths]))]


def _cuts(ends: npt.NDArray[np.int64]) -> list[slice]:
    """The slices of pieces end to end."""
    bounds = [0, *ends.tolist()]
    return list(map(slice, bounds, bounds[1:]))
