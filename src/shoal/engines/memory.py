"""How much an engine computes at once: from the memory that is free, and from what did not fit.

free memory ──► Room.most ──► batches ──► too much? ──► Room.failed: half as much from now on
                                 └── fits ──► Room.fitted: after many of them, twice as much is tried again
"""

import gc
import sys
from typing import Any

from shoal.runtime.limits import free_memory_bytes

MEMORY_ERRORS = (RuntimeError, MemoryError)  # among them torch's OutOfMemoryError; `is_out_of_memory` tells which
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
SHARES = {"cpu": 0.5, "cuda": 0.8}  # of free memory; a processor's runs out without an error, by killing a process
ALLOWANCE = 2  # a growing cache has room for as much again
_share = 1.0  # of a GPU's memory, for this process
PATIENCE = 64  # batches near the limit that have to fit before twice as much is tried: a failure costs one batch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch and the libraries below it have several ways to say so."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in SIGNS)


def release_memory() -> None:
    """Give back what nobody refers to any more. To be called outside of `except`: a traceback refers to a lot."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_bytes(device: str) -> int:
    """Memory that is free on the device ("cpu", "cuda"), for this process."""
    if device != "cuda":
        return free_memory_bytes()
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    idle = reserved - torch.cuda.memory_allocated()  # what torch's allocator keeps for the next time
    return int(max(0, min(free, _share * total - reserved)) + idle)


def keep_to_share(kind: str, share: float) -> None:
    """Take at most `share` of a GPU's memory. More is refused as if memory had run out: batches shrink."""
    global _share
    if share < 1 and kind.split("/")[1] == "cuda":
        import torch

        _share = share
        torch.cuda.set_per_process_memory_fraction(share)


def usable_bytes(device: str, most: int | None = None) -> int:
    """Memory of a device that a batch may take: a share of what is free, which is at most `most`."""
    free = free_bytes(device)
    return int(SHARES.get(device, 0.5) * (free if most is None else max(0, min(free, most))))


def cached_token_bytes(config: Any, itemsize: int) -> int:
    """What one token of one row takes while it is decoded: its keys and values in every layer."""
    layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    size = _count(config, "head_dim", max(1, _count(config, "hidden_size") // heads))
    return ALLOWANCE * 2 * layers * _count(config, "num_key_value_heads", heads) * size * itemsize


def computed_token_bytes(config: Any, itemsize: int, widest: int = 0) -> int:
    """What one token takes while a layer is computed of many at once; `widest` is what the weights show (`width`)."""
    hidden = _count(config, "hidden_size")
    return (8 * hidden + 4 * max(widest, _count(config, "intermediate_size", 4 * hidden))) * itemsize


def scores_bytes(config: Any) -> int:
    """What one token takes for each token that it attends to, where attention is written out (in float32, twice)."""
    return 8 * _count(config, "num_attention_heads") if config._attn_implementation == "eager" else 0


def width(model: Any) -> int:
    """The widest output of a layer, by the weights: a configuration has many names for it."""
    tables = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    weights = (each for each in model.parameters() if each.dim() > 1 and id(each) not in tables)
    return max((max(each.shape[-2:]) for each in weights), default=0)


def kept_bytes(held: Any) -> int:
    """The bytes of the tensors that a cache, or a part of it, holds (of a buffer, those that are filled)."""
    if hasattr(held, "nbytes"):
        return int(held.nbytes)
    if isinstance(held, dict):
        return sum(kept_bytes(value) for name, value in held.items() if name != "_buffers")
    return sum(map(kept_bytes, held)) if isinstance(held, list | tuple) else 0


def _count(config: Any, name: str, default: int = 1) -> int:
    values = vars(config)  # by attribute, a configuration whose layers differ refuses to say
    value = values.get(name, values.get(config.attribute_map.get(name, name)))
    return value if isinstance(value, int) and value > 0 else default


class Room:
    """How many tokens may be computed at once, at most `most`; it learns from what did not fit."""

    def __init__(self, most: int) -> None:
        self.most, self._learned, self._fitted = most, sys.maxsize, 0

    @property
    def tokens(self) -> int:
        return min(self._learned, self.most)

    def failed(self, tokens: int) -> None:
        self._learned, self._fitted = max(1, min(tokens, self.tokens) // 2), 0

    def fitted(self, tokens: int) -> None:
        """So many did fit. The limit is raised again slowly: memory may have been short for a while only."""
        self._fitted += 2 * tokens >= self._learned
        if self._fitted == PATIENCE:
            self._learned, self._fitted = 2 * self._learned, 0
