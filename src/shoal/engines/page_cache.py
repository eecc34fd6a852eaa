"""A key-value cache in pages, and the attention that reads it: what one token per row needs on a GPU.

    page     keys and values of PAGE tokens in every layer; rows of one group share the whole pages of their prompt
    table    [rows, pages of a row]: which pages hold a row's tokens, in order

`PagedCache` replaces transformers' cache: every layer stores its keys and values where `at` says. Inside `decoding` the
layers' attention is `attend` over the pages; a prompt's own attention is left to transformers.

Norms and rotary positions of one token per row are one kernel each (`fuse`) instead of eight and ten: starting small
kernels takes most of a step's time. A part of a model is replaced only if a trial gives the same numbers, and only
while this thread is decoding.

R: rows, B: prompts, L: padded length, Q: query heads, K: key heads, D: size of a head, W: pages of a table.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

PAGE = 32  # tokens
NAME = "shoal_pages"
LEAST_HEAD = 16  # smallest size of Triton's matrix product
PROGRAMS = 1024  # at least, if there are enough tokens: a GPU has more than a hundred processors
MOST_SPLITS = 16
KNOWN = {"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache", "cache_position"}
LONGEST_LINE = 16_384
SAME = 2e-2  # relative tolerance, in bfloat16
SMALL = 1e-3  # absolute tolerance, in units of the mean size
ROTARY = "apply_rotary_pos_emb"

_active = local()


class PagedCache(DynamicCache):  # type: ignore[misc]  # the library is untyped
    """Keys and values of all layers, each [pages, K, page, D]. Page 0 belongs to no row: idle rows write there."""

    def __init__(self, shapes: list[tuple[int, int]], pages: int, page: int, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stored = [(make(pages, heads, page, size), make(pages, heads, page, size)) for heads, size in shapes]
        self.pages, self.page = pages, page
        self.at: tuple[Tensor, ...] = ()
        self.table = self.counts = torch.empty(0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_arguments: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values; `at` are the page and the offset of each token, and which tokens count."""
        page, offset, *which = self.at
        if key_states.device.type == "cuda" and not which:
            _store_cuda(key_states, value_states, self.stored[layer_idx], page, offset)
            return key_states, value_states
        for stored, states in zip(self.stored[layer_idx], (key_states, value_states), strict=True):
            tokens = states.transpose(1, 2)
            stored[page, :, offset] = tokens[which[0]] if which else tokens[:, 0]
        return key_states, value_states


class ShapeCache(DynamicCache):  # type: ignore[misc]
    """Records the number of heads of every layer, and their size."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, tuple[int, int]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_arguments: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        if key_states.shape != value_states.shape:
            raise NotImplementedError("keys and values of unlike sizes")
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3])
        return key_states, value_states


def shapes_of(model: Any) -> list[tuple[int, int]]:
    """Key heads and their size, of every layer, as the model's own forward pass shows them."""
    cache = ShapeCache()
    model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
    if sorted(cache.shapes) != list(range(len(cache.shapes))) or not cache.shapes:
        raise NotImplementedError("layers without keys and values")
    return [cache.shapes[layer] for layer in range(len(cache.shapes))]


@contextmanager
def decoding(model: Any, cache: PagedCache) -> Iterator[None]:
    """Inside, every attention of the model reads the pages of `cache`, in this thread."""
    before, _active.cache = model.config._attn_implementation, cache
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        del _active.cache


def is_decoding() -> bool:
    return hasattr(_active, "cache")


def _attention(
    module: Any, query: Tensor, _key: Tensor, _value: Tensor, _mask: Any, scaling: float | None = None,
    sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Called by transformers instead of its own attention: query [R, Q, 1, D] → [R, 1, Q, D]."""
    unknown = [
        name for name, value in options.items() if name not in KNOWN and value is not None and value is not False
    ]
    if unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    cache: PagedCache = _active.cache
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = attend(query[:, :, 0], cache.stored[module.layer_idx], cache.table, cache.counts, scale, sliding_window)
    return found[:, None], None


AttentionInterface.register(NAME, _attention)


def attend(
    query_RQD: Tensor, stored: tuple[Tensor, Tensor], table_RW: Tensor, counts_R: Tensor, scale: float,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one token per row over the `counts_R` tokens of its pages; with a window, over the last of them."""
    if query_RQD.device.type == "cuda":
        return _attend_cuda(query_RQD, stored, table_RW, counts_R, scale, window or 0)
    keys, values = (each[table_RW].transpose(2, 3).flatten(1, 2) for each in stored)  # [R, W · PAGE, K, D]
    place_T = torch.arange(keys.shape[1], device=keys.device)
    mask_RT = place_T < counts_R[:, None]
    if window:
        mask_RT &= place_T >= counts_R[:, None] - window
    found = torch.nn.functional.scaled_dot_product_attention(
        query_RQD[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), mask_RT[:, None, None], scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    return found[:, :, 0]


def _store_cuda(key: Tensor, value: Tensor, stored: tuple[Tensor, Tensor], page_R: Tensor, offset_R: Tensor) -> None:
    """Keys and values [R, K, 1, D] to the pages and offsets of their rows."""
    from shoal.engines.page_kernels import store_pages

    rows, heads, _, size = key.shape
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    store_pages[(rows, heads)](
        key, value, *stored, page_R, offset_R, *strides, KEY_HEADS=heads, SIZE=size, PAGE=PAGE, num_warps=1
    )


def _attend_cuda(
    query_RQD: Tensor, stored: tuple[Tensor, Tensor], table_RW: Tensor, counts_R: Tensor, scale: float, window: int
) -> Tensor:
    from shoal.engines.page_kernels import attend_pages  # there may be no Triton

    (rows, heads, size), keys, values = query_RQD.shape, *stored
    key_heads = keys.shape[1]
    splits = 1
    while splits < MOST_SPLITS and rows * key_heads * splits < PROGRAMS:
        splits *= 2
    parts = query_RQD.new_empty(rows, heads, splits, size, dtype=torch.float32 if splits > 1 else query_RQD.dtype)
    sums = torch.empty(rows, heads, splits, device=query_RQD.device, dtype=torch.float32)
    share = heads // key_heads
    attend_pages[(rows, key_heads, splits)](
        query_RQD.contiguous(), keys, values, table_RW, counts_R, parts, sums, scale, window, table_RW.stride(0),
        HEADS=heads, KEY_HEADS=key_heads, SHARE=share, ROOM=max(LEAST_HEAD, 1 << (share - 1).bit_length()), SIZE=size,
        PAGE=PAGE, BLOCK=64 if size <= 128 else 32, SPLITS=splits, EXACT=query_RQD.dtype == torch.float32, num_warps=4,
    )  # fmt: skip
    if splits == 1:
        return parts[:, :, 0]
    return (torch.softmax(sums, dim=2)[..., None] * parts).sum(dim=2).to(query_RQD.dtype)


def fuse(model: Any) -> None:
    """Replace what can be replaced, once. A model without such parts does not change."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module):
            _fuse_norm(module)
    for source in {type(module).__module__ for module in model.modules()}:
        original = getattr(sys.modules.get(source), ROTARY, None)
        if original is not None and not hasattr(original, "is_fused") and _same_rotation(original, model):
            setattr(sys.modules[source], ROTARY, _rotation(original))


def _fuse_norm(module: nn.Module) -> None:
    weight, original = getattr(module, "weight", None), module.forward
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or len(weight) > LONGEST_LINE or not isinstance(eps, float):
        return
    probe = torch.randn(3, 1, 2, len(weight), device=weight.device).to(weight.dtype)
    expected = original(probe)
    for plus_one in (False, True):
        if _alike(_norm(probe, weight, eps, plus_one), expected):

            def forward(values: Tensor, plus_one: bool = plus_one) -> Tensor:
                if is_decoding() and values.dtype == weight.dtype:
                    return _norm(values, weight, eps, plus_one)
                found: Tensor = original(values)
                return found

            module.forward = forward
            return


def _norm(values: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    from shoal.engines.page_kernels import normalise

    count, out = values.shape[-1], torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if values.stride(-1) != 1 or not values[..., 0, :].is_contiguous():
        values = values.contiguous()
    heads = values.shape[-2]
    lines = values.numel() // count
    outer = heads * count
    normalise[(lines,)](
        values, weight, out, eps, count, heads, outer, count, ROOM=1 << (count - 1).bit_length(), PLUS_ONE=plus_one,
        num_warps=4 if count > 512 else 1,
    )  # fmt: skip
    return out


def _rotation(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        plain = not more and not named and query.dim() == 4 and query.shape[2] == 1 and cos.dim() == 3
        if is_decoding() and plain and cos.shape[-1] == query.shape[-1] and cos.dtype == query.dtype:
            return _rotated(query, cos, sin), _rotated(key, cos, sin)
        return original(query, key, cos, sin, *more, **named)

    rotate.is_fused = True  # type: ignore[attr-defined]
    return rotate


def _rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[R, heads, 1, D] with cosines [R or 1, 1, D]."""
    from shoal.engines.page_kernels import rotate

    rows, heads, _, size = values.shape
    out = torch.empty(rows, heads, 1, size, dtype=values.dtype, device=values.device)
    table = cos.stride(0) if cos.shape[0] == rows else 0
    rotate[(rows, heads)](
        values, cos, sin, out, values.stride(0), values.stride(1), table, HEADS=heads, SIZE=size, num_warps=1
    )
    return out


def _same_rotation(original: Callable[..., Any], model: Any) -> bool:
    """Whether a model's own function rotates halves, as the kernel does."""
    size = 64
    query, key, cos, sin = (
        torch.randn(*shape, device=model.device).to(model.dtype)
        for shape in ((3, 2, 1, size), (3, 1, 1, size), (3, 1, size), (3, 1, size))
    )
    try:
        pairs = zip(original(query, key, cos, sin), (_rotated(query, cos, sin), _rotated(key, cos, sin)), strict=True)
        return all(_alike(ours, theirs) for theirs, ours in pairs)
    except (TypeError, ValueError, RuntimeError):
        return False


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    small = SMALL * float(theirs.float().abs().mean())
    return torch.allclose(ours.float(), theirs.float(), rtol=SAME, atol=small)
