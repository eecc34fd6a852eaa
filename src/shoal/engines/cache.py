"""The rows of a batch that is being decoded: which are still in it, and how each gets its next hidden state.

The state of recurrent layers (also the last inputs of a convolution) cannot always be repeated, dropped or padded, so
such a model is tried first, and refused if its results with a cache differ (`check_cache`). Some recurrent layers
forget their state if they get several tokens at once (`follows_with_cache`).

B: prompts of a batch, R: rows (one per seed), L: padded length, T: tokens, H: hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from shoal.engines.memory import is_out_of_memory, kept_bytes
from shoal.errors import ModelError
from shoal.models.logprobs import hidden_states
from shoal.models.packed import PROBE_ERRORS, PROBE_TOLERANCE

log = logging.getLogger(__name__)

_known: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()
ROOM_TOKENS = 16
AT_ONCE = 5  # tokens: more than the convolutions of recurrent layers look back


@dataclass
class Rows:
    """The rows still in the batch: indices, states that next tokens are drawn from, positions, masks and cache."""

    rows: Tensor
    hidden: Tensor
    position: Tensor
    mask: Tensor
    cache: Any

    @classmethod
    def after(
        cls, model: Any, prompts: Sequence[tuple[int, ...]], source_R: Tensor, max_tokens: int | None = None
    ) -> Rows:
        """Compute each prompt once, padded on the left; row r begins after prompt `source_R[r]`. Prompts of more than
        `max_tokens` together are computed in pieces; recurrent layers take no padded pieces."""
        longest, device = max(map(len, prompts)), model.device
        ids_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_BL = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_BL[row, longest - len(prompt) :] = True
        ids_BL, mask_BL, source_R = ids_BL.to(device), mask_BL.to(device), source_R.to(device)
        positions_BL = (mask_BL.long().cumsum(dim=1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        piece = longest if max_tokens is None else min(longest, max_tokens // len(prompts))
        if piece < 1 or (piece < longest and _is_recurrent(model)):
            raise MemoryError(f"{len(prompts)} prompts of up to {longest} tokens do not fit into memory")
        for start in range(0, longest, piece):
            columns = slice(start, start + piece)
            output = model.base_model(
                input_ids=ids_BL[:, columns], attention_mask=mask_BL[:, : start + piece],
                position_ids=positions_BL[:, columns], past_key_values=cache, use_cache=True,
            )  # fmt: skip
        cache.reorder_cache(source_R)
        rows, hidden = torch.arange(len(source_R), device=device), output.last_hidden_state[:, -1][source_R]
        return cls(rows, hidden, positions_BL[source_R, -1], mask_BL[source_R], cache)

    def select(self, kept: Tensor) -> None:
        self.rows, self.hidden = self.rows[kept], self.hidden[kept]
        self.position, self.mask = self.position[kept], self.mask[kept]
        self.cache.reorder_cache(kept)

    def advance(self, model: Any, tokens_R: Tensor) -> None:
        """Feed each row its own token; afterwards `hidden` is what the next token is drawn from."""
        self.hidden = self.follow(model, tokens_R[:, None])[:, -1]

    def follow(self, model: Any, ids_RT: Tensor) -> Tensor:
        """The states of tokens that come next in each row [R, T, H]."""
        steps_T = torch.arange(1, ids_RT.shape[1] + 1, device=ids_RT.device)
        positions_RT = self.position[:, None] + steps_T[None, :]
        self.mask = torch.cat([self.mask, self.mask.new_ones(ids_RT.shape)], dim=1)
        states_RTH: Tensor = model.base_model(
            input_ids=ids_RT, attention_mask=self.mask, position_ids=positions_RT, past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state  # fmt: skip
        self.position = positions_RT[:, -1]
        return states_RTH


def bytes_kept(model: Any) -> tuple[int, int, int]:
    """Measured: the cache's bytes per token of a row, its bytes per row, and the growth per token of the tensor that
    grows fastest (some models expand the cache at every step)."""
    state = Rows.after(model, [(0,)], torch.tensor([0]))
    kept, made = [], []
    for _ in range(2):
        with _Sizes() as sizes:
            state.advance(model, torch.zeros(1, dtype=torch.long, device=model.device))
        made.append(sizes.found)
        kept.append(kept_bytes([vars(layer) for layer in state.cache.layers]))
    each = max(0, kept[1] - kept[0])
    return each, kept[0] - 2 * each, max(0, *(after - before for before, after in zip(*made, strict=False)))


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.found.append(result.untyped_storage().nbytes())
        return result


def check_cache(model: Any) -> None:
    """Raise `ModelError` unless decoding rows token by token with a cache gives what each sequence gives alone."""
    if not _tried(model, at_once=1):
        raise ModelError(
            f"{type(model).__name__} cannot be decoded in batches: what its recurrent layers keep does not agree with "
            "the whole sequence; choose another model"
        )


def follows_with_cache(model: Any) -> bool:
    """The same for several tokens at once. In 16 bits, rounding is as large as the effect of a forgotten state on a
    short probe, so recurrent models are not trusted with it there."""
    return not _is_recurrent(model) or (model.dtype in PROBE_TOLERANCE and _tried(model, at_once=AT_ONCE))


def _tried(model: Any, at_once: int) -> bool:
    """Models with attention alone pass. Others are tried once, in inference mode, with the weights that they have."""
    known = _known.setdefault(model, {})
    if at_once not in known:
        try:
            known[at_once] = not _is_recurrent(model) or _agrees(model, at_once)
        except PROBE_ERRORS as error:
            if is_out_of_memory(error):  # says nothing about the model
                raise
            log.debug("%s is not computed with a cache: %s", type(model).__name__, error)
            known[at_once] = False
    return known[at_once]


def _is_recurrent(model: Any) -> bool:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    plain = all(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds)
    return bool(getattr(model, "_is_stateful", False)) or not plain


def _agrees(model: Any, at_once: int) -> bool:
    """Two prompts of different lengths, one continued twice, one row dropped, compared with the sequences alone."""
    size = model.config.get_text_config().vocab_size
    prompts = [tuple(number % size for number in range(3, 9)), tuple(number % size for number in range(20, 23))]
    rows = Rows.after(model, prompts, torch.tensor([0, 1, 1]))
    said = torch.arange(11, 11 + 3 * (1 + AT_ONCE), device=model.device).view(3, -1) % size
    rows.advance(model, said[:, 0])
    rows.select(torch.tensor([0, 2], device=model.device))
    followed = [rows.follow(model, tokens) for tokens in said[[0, 2], 1:].split(at_once, dim=1)]
    for states_TH, prompt, row in zip(torch.cat(followed, dim=1), prompts, (0, 2), strict=True):
        alone = torch.tensor([[*prompt, *said[row].tolist()]], device=model.device)
        alone_TH = hidden_states(model, alone)[0, -AT_ONCE:]  # all of them: a forgotten state shows in the first
        bound = PROBE_TOLERANCE.get(alone_TH.dtype, 0.1) * float(alone_TH.abs().max())
        if not float((states_TH - alone_TH).abs().max()) <= bound:
            return False
    return True


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # the library is untyped
    """Keys and values [rows, heads, tokens, size]: views of the filled part of two buffers with spare room. The
    library's own layer copies everything at every token."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._buffers = (key_states[..., :0, :], value_states[..., :0, :])
        self.keys, self.values = self._buffers

    def update(
        self, key_states: Tensor, value_states: Tensor, *_arguments: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.keys.shape[-2]
        end = used + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            self._move(self.keys, self.values, capacity=end + max(ROOM_TOKENS, used))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., used:end, :] = states
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Only these rows, in this order; a row may come several times."""
        capacity = self._buffers[0].shape[-2]
        self._move(self.keys[beam_idx], self.values[beam_idx], capacity)

    def _move(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        used = keys.shape[-2]
        buffers = []
        for filled in (keys, values):
            buffer = filled.new_empty((*filled.shape[:-2], capacity, filled.shape[-1]))
            buffer[..., :used, :] = filled
            buffers.append(buffer)
        self._buffers = (buffers[0], buffers[1])
        self._show(used)

    def _show(self, used: int) -> None:
        self.keys, self.values = (buffer[..., :used, :] for buffer in self._buffers)
