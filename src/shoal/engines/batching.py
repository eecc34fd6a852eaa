"""Rows come and go while the others are decoded (continuous batching), by `decoder`.

    waiting rows ──free slots and pages──► admitted: the keys and values of a prompt are computed once for its group
    a window of steps ──► tokens to their rows, finished chunks to points; ended rows make room for waiting ones
    while the next window runs: proofs, callbacks, completions

A row reserves the pages of its longest completion when it is admitted, so that it never runs out of pages. When no row
waits and few are left, they are moved into the first slots, so that a smaller step suffices.
"""

import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.engines.decoder import WINDOW, PagedDecoder, PagePool, padded_ends, size_for
from shoal.engines.guesses import Guessed, SeenTokens
from shoal.engines.memory import MEMORY_ERRORS, is_out_of_memory
from shoal.engines.protocol import GenerationRequest, checks_of
from shoal.engines.rows import DrawnRow, report
from shoal.models.logprobs import hidden_states
from shoal.models.packed import PROBE_ERRORS
from shoal.protocol import ProofParameters, SamplingParameters
from shoal.toploc import PointBatch, commit, top_points

log = logging.getLogger(__name__)

ENDED_SHARE = 16  # a window ends early when this part of the rows has ended and others wait
PROBE_TOKENS = 12
PROBE_PROMPT = 40  # more than a page
PROBE_BOUND = {torch.float32: 0.02}  # of the mean size of a value; states are kept in bfloat16
USUAL_BOUND = 0.2


@dataclass(eq=False)
class Prefix:
    """The tokens that several rows begin with. The rows share its whole pages. The tokens that do not fill a page are
    in `rest`, the first row's own page, and are copied for the other rows. Both are kept while such rows wait."""

    tokens: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    rest: int = 0
    is_kept: bool = False  # whether the page `rest` is kept after its row has ended
    slots: list[int] = field(default_factory=list)  # of rows that are being admitted
    users: int = 0
    waiting: int = 0


@dataclass(eq=False)
class HeldRow:
    """A row in a slot, its own pages, and the points of finished chunks that are not proofs yet."""

    row: DrawnRow
    prefix: Prefix
    pages: list[int]
    points: list[PointBatch] = field(default_factory=list)
    guessed: Guessed | None = None


class RowBatch:
    """The rows of one call. `groups` are all rows of every request, for reports of progress. At most `most_tokens`
    tokens of prompts are computed at once."""

    def __init__(
        self, decoder: PagedDecoder, requests: Sequence[GenerationRequest], groups: Sequence[Sequence[DrawnRow]],
        proof: ProofParameters | None, most_tokens: int = sys.maxsize,
    ) -> None:  # fmt: skip
        self._decoder, self._proof = decoder, proof
        self._requests, self._groups = requests, groups
        self._prefill_tokens = min(decoder.prefill_tokens, most_tokens)
        self._waiting = deque(row for group in groups for row in group if not row.ended)
        self._greedy = bool(self._waiting) and self._waiting[0].greedy
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        for row in self._waiting:
            key = self._prefix_key(row)
            if key not in self._prefixes:
                self._prefixes[key] = Prefix((*row.request.prompt_ids, *row.tokens))
            self._prefixes[key].waiting += 1
        self._seen_tokens: dict[int, SeenTokens] = {}
        self._held: dict[int, HeldRow] = {}
        self._free: list[int] = []
        self._seen: list[HeldRow] = []  # rows of the last window, until they are reported

    @staticmethod
    def _prefix_key(row: DrawnRow) -> tuple[int, ...]:
        return row.group, *row.tokens

    def draw(self, memory_bytes: int, most_rows: int) -> list[DrawnRow]:
        """Draw all rows within `memory_bytes`. Returns the rows that did not fit, each with its whole chunks."""
        rows = min(len(self._waiting), most_rows)
        longest = max(len(each.prompt_ids) + each.sampling.max_new_tokens - 1 for each in self._requests)
        needed = self._decoder.pages_for(longest)
        try:
            pool = self._decoder.pool(rows, needed, self._proof.rows if self._proof else 0, memory_bytes)
            if pool is not None:
                self._free, checks = list(range(pool.cache.pages - 1, 0, -1)), checks_of(self._requests)
                self._admit(pool)
                while self._held:
                    rows_held = [held.row for held in self._held.values()]
                    longest = max(row.request.sampling.max_new_tokens - len(row.tokens) for row in rows_held)
                    steps = min(WINDOW, longest, self._proof.rows if self._proof else WINDOW)
                    ended = -(-len(self._held) // ENDED_SHARE) if self._waiting else len(self._held)
                    size, guesses = size_for(max(self._held) + 1), self._guesses()
                    self._decoder.run(size, steps, self._greedy, self._proof is not None, checks, ended, guesses)
                    self._report()
                    self._seen = self._harvest(pool)
                    self._admit(pool)
                self._report()
                if self._decoder.held_bytes > self._decoder.kept_bytes:
                    self._decoder.release()
            return list(self._waiting)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                self._decoder.release()
                raise
        self._report()
        held = [held.row for held in self._held.values() if held.row.cut(self._proof)]
        self._decoder.release()
        return [*self._waiting, *held]

    def _guesses(self) -> dict[int, Guessed] | None:
        """Rows with guesses by slot; None if there are too many rows for guessing to be worthwhile."""
        if len(self._held) > self._decoder.guessing_rows:
            return None
        for group in {held.row.group for held in self._held.values()} - self._seen_tokens.keys():
            prompt = self._requests[group].prompt_ids
            self._seen_tokens[group] = SeenTokens(*((*prompt, *row.tokens) for row in self._groups[group]))
        for held in self._held.values():
            if held.guessed is None:
                text = [*held.row.request.prompt_ids, *held.row.tokens]
                held.guessed = Guessed(text, self._seen_tokens[held.row.group])
        return {slot: held.guessed for slot, held in self._held.items() if held.guessed is not None}

    def _admit(self, pool: PagePool) -> None:
        """Move waiting rows into free slots while there are pages for them."""
        empty = deque(slot for slot in range(len(pool.slots)) if slot not in self._held)
        found = list[Prefix]()
        while self._waiting and empty:
            row = self._waiting[0]
            request, prefix = row.request, self._prefixes[self._prefix_key(row)]
            whole = (len(prefix.tokens) - 1) // pool.cache.page
            own = self._decoder.pages_for(len(request.prompt_ids) - 1 + request.sampling.max_new_tokens) - whole
            is_new = not prefix.rest
            if len(self._free) < own + whole * is_new:
                if self._held or not prefix.is_kept:
                    break
                self._free += [*prefix.pages, prefix.rest]  # otherwise no row could ever be admitted
                prefix.pages, prefix.rest, prefix.is_kept = [], 0, False
                continue
            self._waiting.popleft()
            slot, pages = empty.popleft(), [self._free.pop() for _ in range(own)]
            if is_new:
                prefix.pages, prefix.rest = [self._free.pop() for _ in range(whole)], pages[0]
            if not prefix.slots:
                found.append(prefix)
            prefix.slots.append(slot)
            prefix.users += 1
            prefix.waiting -= 1
            self._held[slot] = HeldRow(row, prefix, pages)
        if found:
            self._prefill(pool, [prefix for prefix in found if self._held[prefix.slots[0]].pages[0] == prefix.rest])
            # copy the tokens that do not fill a page into the first own page of every row that was just admitted
            counts = [(len(prefix.tokens) - 1) % pool.cache.page for prefix in found]
            copies = [
                (prefix.rest, page)
                for prefix, count in zip(found, counts, strict=True)
                for page in (self._held[slot].pages[0] for slot in prefix.slots)
                if count and page != prefix.rest
            ]
            if copies:
                source, target = torch.tensor(copies, device=self._decoder.device).T
                for each in (each for stored in pool.cache.stored for each in stored):
                    each[target, :, : max(counts)] = each[source, :, : max(counts)]
            self._place(pool, [slot for prefix in found for slot in prefix.slots])
        for prefix in found:
            prefix.slots = []
            if prefix.is_kept and not prefix.waiting:
                self._free.append(prefix.rest)

    def _prefill(self, pool: PagePool, new: Sequence[Prefix]) -> None:
        """Compute the keys and values of every prefix except its last token, which the first step feeds."""
        device, model = self._decoder.device, self._decoder.model
        waiting = sorted((prefix for prefix in new if len(prefix.tokens) > 1), key=lambda prefix: len(prefix.tokens))
        while waiting:
            size = max(1, self._prefill_tokens // len(waiting[-1].tokens))
            part, waiting = waiting[-size:], waiting[:-size]
            shape = (len(part), len(part[-1].tokens) - 1)
            ids, pages, live = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
            for line, prefix in enumerate(part):
                length = len(prefix.tokens) - 1
                ids[line, :length], live[line, :length] = prefix.tokens[:-1], True
                pages[line, :length] = np.repeat([*prefix.pages, prefix.rest], pool.cache.page)[:length]
            ids_BL, pages_BL, live_BL = (torch.from_numpy(each).to(device) for each in (ids, pages, live))
            offsets_BL = (torch.arange(shape[1], device=device) % pool.cache.page).expand(shape)
            pool.cache.at = (pages_BL[live_BL], offsets_BL[live_BL], live_BL)
            model.base_model(input_ids=ids_BL, past_key_values=pool.cache, use_cache=True)

    def _place(self, pool: PagePool, places: Sequence[int]) -> None:
        held, device = [self._held[slot] for slot in places], self._decoder.device
        asked = [(each.row, each.row.request, each.row.request.sampling) for each in held]
        index = torch.tensor(places, device=device)
        columns: dict[str, list[Any]] = {
            "token": [each.prefix.tokens[-1] for each in held],
            "context": [len(each.prefix.tokens) - 1 for each in held],
            "drawn": [len(row.tokens) for row, *_ in asked],
            "limit": [sampling.max_new_tokens for *_, sampling in asked],
            "ends_SE": [padded_ends(sampling.eos_token_ids) for *_, sampling in asked],
            "key_low": [row.seed & 0xFFFFFFFF for row, *_ in asked],
            "key_high": [row.seed >> 32 for row, *_ in asked],
            "begun": [request.begun for _, request, _ in asked],
            "alive": [True] * len(held),
            "temperature": [sampling.temperature for *_, sampling in asked],
        }
        for name, values in columns.items():
            column = getattr(pool.slots, name)
            column[index] = torch.tensor(values, dtype=column.dtype, device=device)
        table = np.zeros((len(held), pool.slots.table_SW.shape[1]), dtype=np.int32)
        for line, each in zip(table, held, strict=True):
            line[: len(each.prefix.pages) + len(each.pages)] = each.prefix.pages + each.pages
        pool.slots.table_SW[index] = torch.from_numpy(table).to(device)

    def _harvest(self, pool: PagePool) -> list[HeldRow]:
        """What the window drew: tokens to their rows, finished chunks to points, room of ended rows to the next."""
        slots, proof = pool.slots, self._proof
        drawn, alive = slots.drawn.tolist(), slots.alive.tolist()  # waits for the window
        tokens, logprobs = pool.tokens_SW.cpu().numpy(), pool.logprobs_SW.cpu().numpy()
        seen, gone, cuts = list(self._held.values()), list[int](), list[tuple[HeldRow, int, int, int]]()
        for slot, held in list(self._held.items()):
            row, before = held.row, len(held.row.tokens)
            row.ended = row.line.extend(tokens[slot, : drawn[slot] - before].tolist(), not alive[slot])
            now = len(row.tokens)
            row.logprobs += logprobs[slot, : now - before].tolist()
            if proof is not None:
                cuts += [(held, slot, n % 2, proof.rows) for n in range(before // proof.rows, now // proof.rows)]
                if row.ended and now % proof.rows:
                    cuts.append((held, slot, now // proof.rows % 2, now % proof.rows))
            if row.ended:
                gone.append(slot)
                del self._held[slot]
                # free the pages of a row that has ended, but for what is needed by rows that wait or continue
                prefix, pages = held.prefix, held.pages
                prefix.users -= 1
                if prefix.waiting and pages[0] == prefix.rest:
                    prefix.is_kept, pages = True, pages[1:]
                self._free += pages if prefix.users or prefix.waiting else pages + prefix.pages
        if cuts:
            # the points of chunks: of which row, in which slot, in which half of its states, of how many tokens
            assert self._proof is not None
            rows, device = self._proof.rows, self._decoder.device
            counts = [count for *_, count in cuts]
            states = pool.slots.hidden_SCH.view(len(pool.slots), 2, pool.chunk, -1)
            taken = states[[slot for _, slot, _, _ in cuts], [half for _, _, half, _ in cuts]]
            kept = torch.arange(pool.chunk, device=device) < torch.tensor(counts, device=device)[:, None]
            points = top_points(taken[kept], counts, self._proof.topk, rows)
            for place, (held, *_) in enumerate(cuts):
                held.points.append(points[place : place + 1])
        if gone:
            slots.clear(torch.tensor(gone, device=self._decoder.device))
            self._compact(pool)
        return seen

    def _compact(self, pool: PagePool) -> None:
        """Move rows into the first slots if a smaller step then suffices for all of them."""
        if self._waiting or not self._held:
            return
        wanted = size_for(len(self._held))
        high = [slot for slot in self._held if slot >= wanted]
        if not high:
            return
        low = [slot for slot in range(wanted) if slot not in self._held][: len(high)]
        high_N, low_N = (torch.tensor(each, device=self._decoder.device) for each in (high, low))
        pool.slots.move(high_N, low_N)
        pool.slots.clear(high_N)
        for old, new in zip(high, low, strict=True):
            self._held[new] = self._held.pop(old)

    def _report(self) -> None:
        """Make the proofs of what the last window drew, and report progress to the requests."""
        seen, self._seen = self._seen, []
        pairs = [(held, points) for held in seen for points in held.points]
        if pairs:
            for (held, _), made in zip(pairs, commit(PointBatch.concat([points for _, points in pairs])), strict=True):
                held.row.proofs.append(made)
                held.points = []
        chunked = {held.row.group for held, _ in pairs}
        for group in dict.fromkeys(held.row.group for held in seen):
            report(self._groups[group], self._proof, group in chunked)


def paged_decoder(model: Any, memory_bytes: int, kind: type[PagedDecoder] = PagedDecoder) -> PagedDecoder | None:
    """A decoder, if a trial shows that the model's states token by token are those of the whole sequence; else None."""
    try:
        decoder = kind(model)
        prompt = tuple(7 * n % decoder.vocabulary for n in range(1, PROBE_PROMPT))
        sampling = SamplingParameters.model_construct(temperature=1.0, max_new_tokens=PROBE_TOKENS, eos_token_ids=())
        request = GenerationRequest(prompt, (0, 1), sampling)
        rows = [DrawnRow(request, seed, decoder.vocabulary, greedy=True) for seed in request.seeds]
        proof = ProofParameters(topk=8, rows=2 * WINDOW)
        RowBatch(decoder, [request], [rows], proof).draw(memory_bytes, len(rows))
        pool = decoder._pool
        if pool is None or not rows[1].ended:
            return None  # there is too little memory: nothing is known of the model
        kept_TH = pool.slots.hidden_SCH[1, :PROBE_TOKENS].float()
        ids = torch.tensor([[*prompt, *rows[1].tokens]], device=model.device)
        alone_TH = hidden_states(model, ids)[0, len(prompt) - 1 : -1].float()
        bound = PROBE_BOUND.get(model.dtype, USUAL_BOUND) * float(alone_TH.abs().mean())
        if float((kept_TH - alone_TH).abs().mean()) <= bound:
            return decoder
        why = "its states are not those of the whole sequence"
    except (*PROBE_ERRORS, NotImplementedError, ImportError, OSError) as error:
        if is_out_of_memory(error):
            return None
        why = str(error)[:200]
    level = logging.WARNING if kind is PagedDecoder else logging.INFO
    log.log(level, "%s is decoded without pages and graphs, which is slower: %s", type(model).__name__, why)
    return None
