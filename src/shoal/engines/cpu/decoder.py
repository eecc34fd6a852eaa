"""Decoding with pages on a processor: only live rows are computed, and a row that ends frees its place at once.

The forward pass is `dense`. The counterpart of a GPU's captured graph is a short loop: the host sees every token, so
ended rows leave the step, and a window ends early if other rows wait for their places.

R: live rows, E: end tokens, T: steps of a window, H: hidden size, W: pages of a row.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.engines.cpu.dense import DenseModel
from shoal.engines.decoder import PagedDecoder, PagePool
from shoal.engines.guesses import Guessed
from shoal.sampling.sampler import sample
from shoal.sampling.stream import uniforms_at

WINDOW_S = 0.5  # longest time of a window (or one step): progress is reported after every window
LOGIT_ELEMENTS = 2**23


class CpuDecoder(PagedDecoder):
    page, prefill_tokens, kept_bytes = 8, 4_096, 2**28  # small pages: more of a short prompt is shared
    guessing_rows = 4  # 1.3 to 2.1 times as fast on repetitive text, 1.0 on other text; 8 rows: 0.92 to 1.3

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._dense, self._make = DenseModel(model), torch.empty  # memory is taken when it is written
        self._tile = max(1, LOGIT_ELEMENTS // self.vocabulary)

    def run(
        self, size: int, steps: int, greedy: bool, proves: bool, checks: Sequence[Callable[[], None]] = (),
        ended: int = 0, guesses: Mapping[int, Guessed] | None = None,
    ) -> None:  # fmt: skip
        """Draw `steps` tokens of every live row; fewer if `ended` rows have ended, or if `WINDOW_S` is over."""
        assert self._pool is not None
        until_s, pool, slots = time.monotonic() + WINDOW_S, self._pool, self._pool.slots
        if guesses is not None:
            self._run_guessing(pool, steps, greedy, proves, until_s, checks, guesses)
            return
        live_R = slots.alive[:size].nonzero()[:, 0]
        uniforms_RT = self._uniforms(pool, live_R, steps)
        names = ("token", "context", "drawn", "limit", "ends_SE", "temperature", "table_SW")
        columns, left = [getattr(slots, name)[live_R] for name in names], len(live_R) - ended
        for step in range(steps):
            token_R, context_R, drawn_R, limit_R, ends_RE, heat_R, table_RW = columns
            states_RH = self._dense.states(pool.cache, token_R, context_R, table_RW)
            if proves:
                slots.hidden_SCH[live_R, drawn_R % (2 * pool.chunk)] = states_RH.to(torch.bfloat16)
            token_R, logprob_R = self._choose(states_RH, uniforms_RT[:, step], heat_R, greedy)
            pool.tokens_SW[live_R, step], pool.logprobs_SW[live_R, step] = token_R.int(), logprob_R
            columns[:3] = token_R, context_R + 1, drawn_R + 1
            lives_R = (token_R[:, None] != ends_RE).all(dim=1) & (columns[2] < limit_R)
            if not bool(lives_R.all()):
                slots.drawn[live_R], slots.alive[live_R] = columns[2], lives_R
                live_R, uniforms_RT = live_R[lives_R], uniforms_RT[lives_R]
                columns = [column[lives_R] for column in columns]
            for check in checks:
                check()
            if len(live_R) <= left or time.monotonic() > until_s:
                break
        for name, column in zip(names[:3], columns, strict=False):
            getattr(slots, name)[live_R] = column

    def _run_guessing(
        self, pool: PagePool, steps: int, greedy: bool, proves: bool, until_s: float,
        checks: Sequence[Callable[[], None]], rows: Mapping[int, Guessed],
    ) -> None:  # fmt: skip
        """The same for few rows, with guesses of their next tokens in the same step: a guess is right if the seed draws
        it, and then the token after it is drawn, too. Later steps overwrite what wrong guesses stored."""
        slots, first = pool.slots, dict(zip(rows, pool.slots.drawn[list(rows)].tolist(), strict=True))
        uniforms_RT = dict(zip(rows, self._uniforms(pool, torch.tensor(list(rows)), steps), strict=True))
        while time.monotonic() < until_s:
            done = {slot: int(slots.drawn[slot]) - first[slot] for slot in rows}
            if max(done.values()) == steps or not bool(slots.alive[list(rows)].all()):
                return
            room = {slot: min(steps - done[slot], int(slots.limit[slot] - slots.drawn[slot])) - 1 for slot in rows}
            fed = {slot: [row.text[-1], *row.guess(room[slot])] for slot, row in rows.items()}
            slot_N = torch.tensor([slot for slot, tokens in fed.items() for _ in tokens])
            place_N = slots.context[slot_N] + torch.cat([torch.arange(len(tokens)) for tokens in fed.values()])
            ids_N = torch.tensor([token for tokens in fed.values() for token in tokens])
            states_NH = self._dense.states(pool.cache, ids_N, place_N, slots.table_SW[slot_N])
            uniforms_N = torch.cat([uniforms_RT[slot][done[slot] :][: len(tokens)] for slot, tokens in fed.items()])
            tokens_N, logprobs_N = self._choose(states_NH, uniforms_N, slots.temperature[slot_N], greedy)
            said, start = tokens_N.tolist(), 0
            for slot, tokens in fed.items():
                own, ends, count = said[start : start + len(tokens)], slots.ends_SE[slot].tolist(), 1
                while count < len(tokens) and own[count - 1] == tokens[count] and tokens[count] not in ends:
                    count += 1
                new, at = slice(start, start + count), slice(done[slot], done[slot] + count)
                pool.tokens_SW[slot, at], pool.logprobs_SW[slot, at] = tokens_N[new].int(), logprobs_N[new]
                if proves:
                    kept_T = (slots.drawn[slot] + torch.arange(count)) % (2 * pool.chunk)
                    slots.hidden_SCH[slot, kept_T] = states_NH[new].to(torch.bfloat16)
                rows[slot].take(own[:count], len(tokens) - 1)
                slots.token[slot] = own[count - 1]
                slots.context[slot] += count
                slots.drawn[slot] += count
                slots.alive[slot] = own[count - 1] not in ends and slots.drawn[slot] < slots.limit[slot]
                start += len(tokens)
            for check in checks:
                check()

    def _uniforms(self, pool: PagePool, live_R: Tensor, steps: int) -> Tensor:
        slots = pool.slots
        seeds_R = (slots.key_high[live_R] << 32 | slots.key_low[live_R]).numpy().view(np.uint64)
        places_R = (slots.begun[live_R] + slots.drawn[live_R]).numpy()
        places_RT = (places_R[:, None] + np.arange(steps)).astype(np.uint64)
        return torch.from_numpy(uniforms_at(seeds_R[:, None], places_RT))

    def _choose(self, states_RH: Tensor, uniforms_R: Tensor, heat_R: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
        """The next token of every row, and its log-probability; logits in tiles."""
        drawn, columns = [], (states_RH, uniforms_R, heat_R)
        for states, uniforms, heat in zip(*(torch.split(each, self._tile) for each in columns), strict=True):
            logits = self._dense.logits(states)
            best = logits.argmax(dim=1) if greedy else None
            drawn.append(sample(logits, uniforms, heat) if best is None else (best, torch.zeros(len(best))))
        tokens, logprobs = zip(*drawn, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)
