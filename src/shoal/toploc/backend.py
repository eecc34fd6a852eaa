"""Which arithmetic runs: the compiled one for large work if numba is installed, else numpy. The numbers are the same.

Small work is not worth the import of numba (a second) or, the first time ever, its compilation (some ten seconds; the
result is kept on disk). Nothing is imported before it is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy.typing as npt

from shoal.toploc import plain
from shoal.toploc.field import Bits, Ints

LARGE_VALUES = 2**21  # activations in one call: 16 chunks of 32 rows of 4096
LARGE_POINTS = 2**11  # 16 chunks of 128
KERNELS = "shoal.toploc.kernels"  # once imported, for large work, it is the faster one for small work too


@cache
def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def select(flat: npt.NDArray[Any], starts: Ints, sizes: Ints, counts: Ints) -> tuple[Ints, Bits]:
    """See `plain.select`."""
    selected: tuple[Ints, Bits] = _arithmetic(len(flat) >= LARGE_VALUES).select(flat, starts, sizes, counts)
    return selected


def interpolate(indices: Ints, bits: Bits, counts: Ints) -> tuple[Ints, Bits]:
    """See `plain.interpolate`."""
    interpolated: tuple[Ints, Bits] = _arithmetic(len(bits) >= LARGE_POINTS).interpolate(indices, bits, counts)
    return interpolated


def measure(
    indices: Ints, bits: Bits, counts: Ints, sizes: Ints, moduli: Ints, coefficients: Bits, outside: int
) -> Ints:
    """See `plain.measure`."""
    arithmetic = _arithmetic(len(bits) >= LARGE_POINTS)
    measured: Ints = arithmetic.measure(indices, bits, counts, sizes, moduli, coefficients, outside)
    return measured


def _arithmetic(is_large: bool) -> ModuleType:
    if not (is_large or KERNELS in sys.modules) or not has_numba():
        return plain
    from shoal.toploc import kernels

    return kernels
