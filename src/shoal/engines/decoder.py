"""One step of decoding for many rows as one CUDA graph: feed every row its token, keep the state, draw the next one.

Everything that a step reads and writes lies in a `PagePool` and keeps its place, so that the step of some numbers of
rows (`SIZES`) is captured once and replayed. Which row is in which slot is the business of `batching`.

S: slots, R: rows of a step, E: end tokens, W: pages of a row, C: tokens of a chunk, H: hidden size.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from shoal.engines.guesses import Guessed
from shoal.engines.memory import release_memory
from shoal.engines.page_cache import PAGE, PagedCache, decoding, fuse, shapes_of
from shoal.models.logprobs import Head
from shoal.protocol.lease import MAX_END_TOKENS
from shoal.sampling.sampler import sample, uniforms_of

SIZES = (4, 16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
WINDOW = 16  # steps until the host reads the results; at most the rows of a chunk
WARM_UPS = 2
LOGIT_ELEMENTS = 2**28  # of one tile of logits
POOL_SHARE = 0.7  # of the usable memory: the rest is for logits, prompts and the steps themselves
LONGS = ("token", "context", "drawn", "limit", "key_low", "key_high", "begun")


@dataclass
class Slots:
    """What a step reads and writes of each slot."""

    token: Tensor  # the next to be fed
    context: Tensor  # how many are in the cache
    drawn: Tensor  # how many there are of the completion
    limit: Tensor
    key_low: Tensor  # of the seed
    key_high: Tensor
    begun: Tensor
    ends_SE: Tensor  # the tokens that end it, and -1
    alive: Tensor
    temperature: Tensor
    table_SW: Tensor
    hidden_SCH: Tensor  # the states of the last two chunks: one that is complete, and the next

    @classmethod
    def empty(cls, slots: int, pages: int, chunk: int, hidden: int, device: torch.device) -> Slots:
        return cls(
            **{name: torch.zeros(slots, dtype=torch.long, device=device) for name in LONGS},
            ends_SE=torch.full((slots, MAX_END_TOKENS), -1, dtype=torch.long, device=device),
            alive=torch.zeros(slots, dtype=torch.bool, device=device),
            temperature=torch.ones(slots, dtype=torch.float64, device=device),
            table_SW=torch.zeros(slots, pages, dtype=torch.int32, device=device),
            hidden_SCH=torch.zeros(slots, 2 * chunk, hidden, dtype=torch.bfloat16, device=device),
        )

    def __len__(self) -> int:
        return len(self.token)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for each in fields(self):
            column = getattr(self, each.name)
            column[targets] = column[sources]

    def clear(self, places: Tensor | slice) -> None:
        """Idle slots write to page 0."""
        self.alive[places], self.table_SW[places], self.context[places] = False, 0, 0


@dataclass
class PagePool:
    cache: PagedCache
    slots: Slots
    tokens_SW: Tensor
    logprobs_SW: Tensor
    step_1: Tensor
    chunk: int


class PagedDecoder:
    """The pool and the captured steps of one model. Called with the model in inference mode."""

    page, prefill_tokens = PAGE, 16_384  # of prompts computed at once
    kept_bytes = sys.maxsize  # a larger pool is given back after every call
    guessing_rows = 0  # most rows with guesses; none on a GPU, where steps have fixed shapes

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device
        self.head = Head.of(model)
        self.vocabulary, self.hidden = self.head.weight.shape
        self._shapes = shapes_of(model)
        if self.device.type == "cuda":
            fuse(model)
        self._tile = max(1, LOGIT_ELEMENTS // self.vocabulary)
        self._make: Callable[..., Tensor] = torch.zeros
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        self._pool: PagePool | None = None

    @property
    def page_bytes(self) -> int:
        return sum(2 * heads * size for heads, size in self._shapes) * self.page * int(self.model.dtype.itemsize)

    @property
    def held_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.cache.pages * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def release(self) -> None:
        """Give all memory back; the next call allocates it again."""
        self.drop()
        release_memory()

    def drop(self) -> None:
        self._graphs, self._memory, self._pool = {}, None, None

    def pool(self, rows: int, pages_each: int, chunk: int, memory_bytes: int) -> PagePool | None:
        """A pool for `rows` rows of `pages_each` pages, or for as many as fit (None: not even one). The existing pool
        is reused if it is large enough."""
        size, slot_bytes = size_for(min(rows, SIZES[-1])), 4 * chunk * self.hidden + 8 * self.vocabulary
        # A slot's kept states, and logits with what sampling makes of them.
        while size > SIZES[0] and size * slot_bytes > (1 - POOL_SHARE) * memory_bytes:
            size = SIZES[SIZES.index(size) - 1]
        pages = min(1 + rows * pages_each, 1 + size * pages_each, int(POOL_SHARE * memory_bytes) // self.page_bytes)
        if pages <= pages_each:
            return None
        width = 1 << (pages_each - 1).bit_length()  # so that longer prompts seldom need another pool
        there = self._pool
        fits = there is not None and len(there.slots) >= size and there.slots.table_SW.shape[1] >= pages_each
        if there is None or not fits or there.cache.pages < pages or chunk not in (0, there.chunk):
            self.release()
            device, chunk = self.device, max(1, chunk)
            there = self._pool = PagePool(
                PagedCache(self._shapes, pages, self.page, partial(self._make, dtype=self.model.dtype, device=device)),
                Slots.empty(size, width, chunk, self.hidden, device),
                torch.zeros(size, WINDOW, dtype=torch.int32, device=device),
                torch.zeros(size, WINDOW, dtype=torch.float32, device=device),
                torch.zeros(1, dtype=torch.long, device=device),
                chunk,
            )
        there.slots.clear(slice(None))
        return there

    def run(
        self, size: int, steps: int, greedy: bool, proves: bool, checks: Sequence[Callable[[], None]] = (),
        _ended: int = 0, _guesses: Mapping[int, Guessed] | None = None,
    ) -> None:  # fmt: skip
        """Queue `steps` steps of the first `size` slots without waiting for them; ended rows are not counted. `checks`
        are called after each step on a processor, on a GPU when all steps are queued."""
        assert self._pool is not None
        self._pool.step_1.zero_()
        if self.device.type != "cuda":
            for _ in range(steps):
                self._step(self._pool, size, greedy, proves)
                for check in checks:
                    check()
            return
        graph = self._captured(self._pool, size, greedy, proves)
        for _ in range(steps):
            graph.replay()
        for check in checks:
            check()

    def _captured(self, pool: PagePool, size: int, greedy: bool, proves: bool) -> torch.cuda.CUDAGraph:
        """Capture a step. It runs first with all rows inactive: then it changes only what the next step overwrites."""
        key = (size, greedy, proves)
        if key not in self._graphs:
            alive = pool.slots.alive.clone()
            pool.slots.alive.zero_()
            stream = _capture_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._step(pool, *key)
                    pool.step_1.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._memory, stream, capture_error_mode="thread_local"):
                self._step(pool, *key)
            self._memory = self._memory or graph.pool()
            self._graphs[key] = graph
            pool.slots.alive.copy_(alive)
        return self._graphs[key]

    def _step(self, pool: PagePool, size: int, greedy: bool, proves: bool) -> None:
        """Inactive rows change nothing that lasts."""
        slots, cache, here = pool.slots, pool.cache, slice(0, size)
        position_R, alive_R, drawn_R = slots.context[here], slots.alive[here], slots.drawn[here]
        page_R = slots.table_SW[here].gather(1, (position_R // cache.page)[:, None])[:, 0].long()
        cache.at = (page_R, position_R % cache.page)
        cache.table, cache.counts = slots.table_SW[here], (position_R + 1).int()
        with decoding(self.model, cache):
            states_R1H = self.model.base_model(
                input_ids=slots.token[here, None], position_ids=position_R[:, None], past_key_values=cache,
                use_cache=True,
            ).last_hidden_state  # fmt: skip
        hidden_RH = states_R1H[:, -1]
        if proves:
            rows_R = torch.arange(size, device=self.device)
            slots.hidden_SCH[rows_R, drawn_R % (2 * pool.chunk)] = hidden_RH.to(torch.bfloat16)
        token_R, logprob_R = self._draw(slots, here, hidden_RH, greedy)
        for out, column in ((pool.tokens_SW, token_R), (pool.logprobs_SW, logprob_R)):
            out[here].index_copy_(1, pool.step_1, column[:, None].to(out.dtype))
        pool.step_1 += 1
        slots.token[here] = torch.where(alive_R, token_R, slots.token[here])
        position_R += alive_R
        drawn_R += alive_R
        alive_R &= (token_R[:, None] != slots.ends_SE[here]).all(dim=1) & (drawn_R < slots.limit[here])

    def _draw(self, slots: Slots, here: slice, hidden_RH: Tensor, greedy: bool) -> Iterator[Tensor]:
        """The next token of every row and its log-probability, with logits in tiles."""
        tiles = [self.head.logits(part) for part in torch.split(hidden_RH, self._tile)] if greedy else []
        drawn = [(logits.argmax(dim=1), logits.new_zeros(len(logits))) for logits in tiles]
        if not greedy:
            place_R = slots.begun[here] + slots.drawn[here]
            uniforms_R = uniforms_of(place_R, slots.key_low[here], slots.key_high[here])
            columns = (hidden_RH, uniforms_R, slots.temperature[here])
            for hidden, uniforms, heat in zip(*(torch.split(column, self._tile) for column in columns), strict=True):
                drawn.append(sample(self.head.logits(hidden), uniforms, heat))
        return (torch.cat(column) for column in zip(*drawn, strict=True))


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps 64 MiB for every stream."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def padded_ends(ids: Sequence[int]) -> list[int]:
    """One line of `Slots.ends_SE`."""
    return [*ids, *[-1] * (MAX_END_TOKENS - len(ids))]


def size_for(rows: int) -> int:
    """The smallest captured step that has room for so many rows."""
    return next(size for size in SIZES if size >= rows)
