"""Numbers of settings that end in arithmetic with float32: finite, and no larger than that type holds."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

LARGEST = 3.4028234663852886e38


def holds(value: float) -> bool:
    """
    >>> [holds(value) for value in (1e-6, 1e39, float("inf"), float("nan"))]
    [True, False, False, False]
    """
    return -LARGEST <= value <= LARGEST


def _check(value: float) -> float:
    if not holds(value):
        raise ValueError(f"{value} is not a finite number that float32 holds (at most {LARGEST:.3g})")
    return value


Real = Annotated[float, AfterValidator(_check)]
