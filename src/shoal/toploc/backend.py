"""Chooses the arithmetic: compiled for large work if numba works here, else numpy. The results are the same. Small work
is not worth importing numba (one second) or compiling for the first time (about ten seconds)."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from shoal.toploc import plain
from shoal.toploc.plain import Bits, Ints

LARGE_POINTS = 2**11  # in one call: 16 chunks of 128
KERNELS = "shoal.toploc.kernels"  # once imported, it is faster for small work, too
_is_broken = False


def interpolate(indices: Ints, bits: Bits, counts: Ints) -> tuple[Ints, Bits]:
    found: tuple[Ints, Bits] = _run("interpolate", len(bits) >= LARGE_POINTS, indices, bits, counts)
    return found


def measure(indices: Ints, bits: Bits, *rest: Any) -> Ints:
    found: Ints = _run("measure", len(bits) >= LARGE_POINTS, indices, bits, *rest)
    return found


def _run(name: str, is_large: bool, *arguments: Any) -> Any:
    """After a failure of compiled code (a broken installation, a damaged cache) numpy is used for the rest."""
    global _is_broken
    if _is_broken or not (is_large or KERNELS in sys.modules):
        return getattr(plain, name)(*arguments)
    try:
        return getattr(importlib.import_module(KERNELS), name)(*arguments)
    except Exception as error:  # noqa: BLE001 - wrong arguments make numpy raise, too
        result = getattr(plain, name)(*arguments)
        _is_broken = True
        warnings.warn(f"numba does not work here ({error}); proofs are computed with numpy, slower", stacklevel=3)
        return result
