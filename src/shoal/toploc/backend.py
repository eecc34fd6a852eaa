"""Which arithmetic runs: the compiled one for large work if numba works here, else numpy. The numbers are the same.
Small work is not worth the import of numba (a second), or its first compilation (some ten seconds)."""

import importlib
import sys
import warnings
from typing import Any

import numpy.typing as npt

from shoal.toploc import plain
from shoal.toploc.plain import Bits, Ints

LARGE_VALUES = 2**21  # activations in one call: 16 chunks of 32 rows of 4096
LARGE_POINTS = 2**11  # 16 chunks of 128
KERNELS = "shoal.toploc.kernels"  # once imported, for large work, it is the faster one for small work too
_is_broken = False


def select(flat: npt.NDArray[Any], *chunks: Ints) -> tuple[Ints, Bits]:
    found: tuple[Ints, Bits] = _run("select", len(flat) >= LARGE_VALUES, flat, *chunks)
    return found


def interpolate(indices: Ints, bits: Bits, counts: Ints) -> tuple[Ints, Bits]:
    found: tuple[Ints, Bits] = _run("interpolate", len(bits) >= LARGE_POINTS, indices, bits, counts)
    return found


def measure(indices: Ints, bits: Bits, *rest: Any) -> Ints:
    found: Ints = _run("measure", len(bits) >= LARGE_POINTS, indices, bits, *rest)
    return found


def _run(name: str, is_large: bool, *arguments: Any) -> Any:
    """Compiled code may fail (a broken installation, a damaged cache): then numpy does the work from now on."""
    global _is_broken
    if _is_broken or not (is_large or KERNELS in sys.modules):
        return getattr(plain, name)(*arguments)
    try:
        return getattr(importlib.import_module(KERNELS), name)(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is; if the arguments are wrong, numpy will say so
        result = getattr(plain, name)(*arguments)
        _is_broken = True
        warnings.warn(f"numba does not work here ({error}); proofs are computed with numpy, slower", stacklevel=3)
        return result
