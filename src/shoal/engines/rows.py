"""The rows of a batch that is being decoded: which are still in it, and how each gets its next hidden state.

    CachedRows      one forward pass over one token per row, keys and values of what came before in a cache
    RecomputedRows  one forward pass over everything so far; for models whose cache does not do for such a batch

Attention has a cache that rows can be repeated in, dropped from and padded on the left. What recurrent layers keep
instead (a state, the last inputs of a convolution) does not always bear that, so such a model is tried first
(`decodes_with_cache`), and computed anew for every token if it does not agree with itself: slow, but right.

B: prompts of a batch, R: rows (one per seed), L: padded length, T: tokens, H: hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.engines.cache import growing_cache
from shoal.models.logprobs import hidden_states
from shoal.models.packed import PROBE_ERRORS, PROBE_TOLERANCE

log = logging.getLogger(__name__)

_known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class Rows(Protocol):
    """The rows still in the batch: their indices, and the states that their next tokens are drawn from."""

    rows: Tensor
    hidden: Tensor

    def select(self, kept: Tensor) -> None: ...

    def advance(self, model: Any, tokens_R: Tensor) -> None:
        """Feed each row its own token; afterwards `hidden` is what the next token is drawn from."""
        ...


@dataclass
class CachedRows:
    """Implements `Rows`: positions, masks and cache of what came before."""

    rows: Tensor
    hidden: Tensor
    position: Tensor
    mask: Tensor
    cache: Any

    @classmethod
    def after(cls, model: Any, prompts: Sequence[tuple[int, ...]], source_R: Tensor) -> CachedRows:
        """Each prompt computed once, padded on the left; row r begins after prompt `source_R[r]`."""
        longest, device = max(map(len, prompts)), model.device
        ids_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_BL = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_BL[row, longest - len(prompt) :] = True
        ids_BL, mask_BL, source_R = ids_BL.to(device), mask_BL.to(device), source_R.to(device)
        positions_BL = (mask_BL.long().cumsum(dim=1) - 1).clamp(min=0)
        cache = growing_cache(model.config)
        output = model.base_model(
            input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL, past_key_values=cache, use_cache=True
        )
        cache.reorder_cache(source_R)
        return cls(
            rows=torch.arange(len(source_R), device=device),
            hidden=output.last_hidden_state[:, -1][source_R],
            position=positions_BL[source_R, -1],
            mask=mask_BL[source_R],
            cache=cache,
        )

    def select(self, kept: Tensor) -> None:
        self.rows, self.hidden = self.rows[kept], self.hidden[kept]
        self.position, self.mask = self.position[kept], self.mask[kept]
        self.cache.reorder_cache(kept)

    def advance(self, model: Any, tokens_R: Tensor) -> None:
        self.hidden = self.follow(model, tokens_R[:, None])[:, -1]

    def follow(self, model: Any, ids_RT: Tensor) -> Tensor:
        """The states of tokens that come next in each row [R, T, H]."""
        steps_T = torch.arange(1, ids_RT.shape[1] + 1, device=ids_RT.device)
        positions_RT = self.position[:, None] + steps_T[None, :]
        self.mask = torch.cat([self.mask, self.mask.new_ones(ids_RT.shape)], dim=1)
        output = model.base_model(
            input_ids=ids_RT,
            attention_mask=self.mask,
            position_ids=positions_RT,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.position = positions_RT[:, -1]
        states_RTH: Tensor = output.last_hidden_state
        return states_RTH


@dataclass
class RecomputedRows:
    """Implements `Rows`: all tokens so far, padded on the right, which a causal model never looks at."""

    rows: Tensor
    hidden: Tensor
    ids: Tensor
    lengths: Tensor
    max_tokens: int  # of one forward pass

    @classmethod
    def after(cls, model: Any, prompts: Sequence[tuple[int, ...]], source_R: Tensor, max_tokens: int) -> RecomputedRows:
        """Each prompt computed once; row r begins after prompt `source_R[r]`."""
        device, source_R = model.device, source_R.to(model.device)
        lengths_B = torch.tensor([len(prompt) for prompt in prompts])
        ids_BL = torch.zeros(len(prompts), int(lengths_B.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids_BL[row, : len(prompt)] = torch.tensor(prompt)
        ids_BL, lengths_B = ids_BL.to(device), lengths_B.to(device)
        hidden_BH = _last_states(model, ids_BL, lengths_B, max_tokens)
        rows = torch.arange(len(source_R), device=device)
        return cls(rows, hidden_BH[source_R], ids_BL[source_R], lengths_B[source_R], max_tokens)

    def select(self, kept: Tensor) -> None:
        self.rows, self.hidden = self.rows[kept], self.hidden[kept]
        self.ids, self.lengths = self.ids[kept], self.lengths[kept]

    def advance(self, model: Any, tokens_R: Tensor) -> None:
        if int(self.lengths.max()) == self.ids.shape[1]:
            self.ids = torch.nn.functional.pad(self.ids, (0, 1))
        self.ids[torch.arange(len(tokens_R), device=self.ids.device), self.lengths] = tokens_R
        self.lengths = self.lengths + 1
        self.hidden = _last_states(model, self.ids, self.lengths, self.max_tokens)


def decodes_with_cache(model: Any) -> bool:
    """Whether a model computes rows with a cache as it computes each sequence alone. The answer is kept.

    Attention does. Models with other layers are tried, in inference mode, with the weights that they have.
    """
    if model not in _known:
        try:
            _known[model] = not _is_recurrent(model) or _agrees(model)
        except PROBE_ERRORS as error:
            log.debug("%s is decoded without a cache: %s", type(model).__name__, error)
            _known[model] = False
        if not _known[model]:
            log.warning(
                "%s is decoded without a cache, every token from the beginning, which is slow: what its layers keep "
                "does not do for batches",
                type(model).__name__,
            )
    return _known[model]


def _is_recurrent(model: Any) -> bool:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    plain = all(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds)
    return bool(getattr(model, "_is_stateful", False)) or not plain


def _agrees(model: Any) -> bool:
    """Two prompts of unlike length, one of them continued twice, one row dropped, against the sequences alone."""
    size = model.config.get_text_config().vocab_size
    prompts = [tuple(number % size for number in range(3, 9)), tuple(number % size for number in range(20, 23))]
    rows = CachedRows.after(model, prompts, torch.tensor([0, 1, 1]))
    said = torch.tensor([[11, 12, 13], [14, 15, 16], [17, 18, 19]], device=model.device) % size
    rows.advance(model, said[:, 0])
    rows.select(torch.tensor([0, 2], device=model.device))
    for step in (1, 2):
        rows.advance(model, said[[0, 2], step])
    for hidden_H, prompt, row in zip(rows.hidden, prompts, (0, 2), strict=True):
        alone = torch.tensor([[*prompt, *said[row].tolist()]], device=model.device)
        alone_H = hidden_states(model, alone)[0, -1]
        bound = PROBE_TOLERANCE.get(alone_H.dtype, 0.1) * float(alone_H.abs().max())
        if not float((hidden_H - alone_H).abs().max()) <= bound:
            return False
    return True


def _last_states(model: Any, ids_RL: Tensor, lengths_R: Tensor, max_tokens: int) -> Tensor:
    """The state after the last token of each row [R, H], so many rows at a time as `max_tokens` allows."""
    size = max(1, max_tokens // ids_RL.shape[1])
    states = []
    for ids, lengths in zip(torch.split(ids_RL, size), torch.split(lengths_R, size), strict=True):
        states_RLH = hidden_states(model, ids)
        states.append(states_RLH[torch.arange(len(ids), device=ids.device), lengths - 1])
    return torch.cat(states)
