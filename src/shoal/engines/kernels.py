"""Other kernels for a model's attention: they compute the same in another order, and so round in another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

EAGER = "eager"
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_kernels(model: Any) -> tuple[str, ...]:
    """The kernels that a model can be tried with besides the one that is chosen for it; some may still refuse."""
    if model.config._attn_implementation != "sdpa":
        return ()
    return (EAGER, *(SDPA_BACKENDS if model.device.type == "cuda" else ("math",)))


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Compute attention with this kernel; "" leaves the choice to torch. One that cannot is a `RuntimeError`."""
    if name in SDPA_BACKENDS:
        with sdpa_kernel(SDPA_BACKENDS[name]):
            yield
        return
    before = model.config._attn_implementation
    if name:
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        if name:
            model.set_attn_implementation(before)
