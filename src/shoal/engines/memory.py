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
SHARES = {"cpu": 0.5, "cuda": 0.8}  # of free memory; on a processor the system kills a process when memory runs out
ALLOWANCE = 2  # a growing cache reserves as much again
_share = 1.0  # of a GPU's memory, for this process
PATIENCE = 64  # batches near the limit that have to fit before twice as much is tried: a failure costs one batch


def is_out_of_memory(error: BaseException) -> bool:
    """torch and the libraries below it report this in several ways."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in SIGNS)


def release_memory() -> None:
    """Give unused memory back. Call it outside of `except`: a traceback keeps many objects alive."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_bytes(device: str) -> int:
    """Free memory of the device ("cpu", "cuda") for this process."""
    if device != "cuda":
        return free_memory_bytes()
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    idle = reserved - torch.cuda.memory_allocated()  # kept by torch's allocator for reuse
    return int(max(0, min(free, _share * total - reserved)) + idle)


def keep_to_share(kind: str, share: float) -> None:
    """Take at most `share` of a GPU's memory. Beyond it allocations fail as if memory had run out, so batches
    shrink."""
    global _share
    if share < 1 and kind.split("/")[1] == "cuda":
        import torch

        _share = share
        torch.cuda.set_per_process_memory_fraction(share)


def usable_bytes(device: str, most: int | None = None) -> int:
    """Memory that a batch may take: a share of what is free, which counts as at most `most`."""
    free = free_bytes(device)
    return int(SHARES.get(device, 0.5) * (free if most is None else max(0, min(free, most))))


def cached_token_bytes(config: Any, itemsize: int) -> int:
    """The memory of one token of one row during decoding: its keys and values in every layer."""
    layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    size = _count(config, "head_dim", max(1, _count(config, "hidden_size") // heads))
    return ALLOWANCE * 2 * layers * _count(config, "num_key_value_heads", heads) * size * itemsize


def computed_token_bytes(config: Any, itemsize: int, widest: int, attended: int) -> int:
    """The memory of one token while a layer is computed for many, if it attends to `attended` tokens. Eager attention
    holds its scores in float32, twice. `widest`: see `width`."""
    hidden, is_eager = _count(config, "hidden_size"), config._attn_implementation == "eager"
    scores = 8 * _count(config, "num_attention_heads") * attended if is_eager else 0
    return (8 * hidden + 4 * max(widest, _count(config, "intermediate_size", 4 * hidden))) * itemsize + scores


def width(model: Any) -> int:
    """The widest output of a layer, from the weights: a configuration has many names for it."""
    tables = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    weights = (each for each in model.parameters() if each.dim() > 1 and id(each) not in tables)
    return max((max(each.shape[-2:]) for each in weights), default=0)


def kept_bytes(held: Any) -> int:
    """The bytes of the tensors in a cache, or in a part of it (of a buffer: the filled part)."""
    if hasattr(held, "nbytes"):
        return int(held.nbytes)
    if isinstance(held, dict):
        return sum(kept_bytes(value) for name, value in held.items() if name != "_buffers")
    return sum(map(kept_bytes, held)) if isinstance(held, list | tuple) else 0


def _count(config: Any, name: str, default: int = 1) -> int:
    values = vars(config)  # attributes of a configuration whose layers differ raise an error
    value = values.get(name, values.get(config.attribute_map.get(name, name)))
    return value if isinstance(value, int) and value > 0 else default


class Room:
    """How many tokens may be computed at once, at most `most`; adapted to what did not fit."""

    def __init__(self, most: int) -> None:
        self.most, self._learned, self._fitted = most, sys.maxsize, 0

    @property
    def tokens(self) -> int:
        return min(self._learned, self.most)

    def failed(self, tokens: int) -> None:
        self._learned, self._fitted = max(1, min(tokens, self.tokens) // 2), 0

    def fitted(self, tokens: int) -> None:
        """The limit is raised again slowly: memory may have been short for a while only."""
        self._fitted += 2 * tokens >= self._learned
        if self._fitted == PATIENCE:
            self._learned, self._fitted = 2 * self._learned, 0
