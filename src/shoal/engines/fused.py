"""Norms and rotary positions of one token per row in one kernel each, where transformers has eight and ten.

While rows are decoded with pages, most of a step's time goes into starting small kernels. So the parts of a model that
do what these kernels do, as a trial with numbers shows, are replaced while `pages.is_decoding` in this thread; at any
other time, and everywhere else, the model computes as it always does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engines.pages import is_decoding

LONGEST_LINE = 16_384
SAME = 2e-2  # of the largest value, in bfloat16
ROTARY = "apply_rotary_pos_emb"


def fuse(model: Any) -> None:
    """Replace what can be replaced. Does nothing to a model without such parts, nor a second time."""
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
    bound = SAME * float(theirs.abs().max())
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and float((ours - theirs).abs().max()) <= bound
