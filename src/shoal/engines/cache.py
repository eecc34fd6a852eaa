"""A key-value cache that grows in place.

The library's own cache concatenates at every token, which allocates and copies everything decoded so far: most of the
time of a small model. Here keys and values lie in a buffer with room for what is still to come.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM_TOKENS = 16


def growing_cache(config: Any) -> Any:
    """The library's cache for a model, its plain layers replaced by growing ones (sliding windows stay theirs)."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # the library is untyped
    """Keys and values [rows, heads, tokens, size]: `keys` and `values` are views of the filled part of two buffers."""

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
        """New buffers of that capacity, holding these keys and values."""
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
