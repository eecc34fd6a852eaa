"""Pass rates of tasks, and the band of them that is worth training on.

A task that is always solved, or never, teaches nothing: all rewards of its group are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.evaluation.records import TaskRecord

NEAR = 1e-9
BINS = 10
BAR = 40


@dataclass(frozen=True)
class RateBand:
    """Pass rates to keep, both ends included.

    >>> RateBand.parse("0.125:0.5").holds(0.5), RateBand.parse("0.125:0.5").holds(0.625)
    (True, False)
    """

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> RateBand:
        low, colon, high = text.partition(":")
        try:
            band = cls(float(low), float(high))
        except ValueError:
            band = cls(math.nan, math.nan)
        if not colon or not 0 <= band.low <= band.high <= 1:
            raise ConfigError(f"--keep {text}: give two rates from 0 to 1, the lower first, for example 0.125:0.5")
        return band

    def holds(self, rate: float) -> bool:
        return self.low - NEAR <= rate <= self.high + NEAR

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"


@dataclass(frozen=True)
class Rate:
    """How often a task was solved, of so many samples that could be scored."""

    passes: int
    samples: int

    @property
    def value(self) -> float:
        return self.passes / self.samples


def rates(records: Iterable[TaskRecord]) -> Iterator[tuple[TaskRecord, Rate]]:
    """The rate of every task that could be measured."""
    for record in records:
        samples = len(record.scores)
        if samples:
            yield record, Rate(record.passes, samples)


def histogram_lines(values: Sequence[float], samples: int, band: RateBand) -> Iterator[str]:
    """How many tasks have which rate; those in the band are marked.

    0.125 ▏████████ 312 ◂
    """
    steps = samples if samples <= BINS else BINS
    counts = Counter(min(steps, round(value * steps)) for value in values)
    largest = max(counts.values(), default=1)
    for step in range(steps + 1):
        count = counts.get(step, 0)
        bar = "█" * round(BAR * count / largest)
        marked = " ◂" if band.holds(step / steps) else ""
        yield f"  {step / steps:5.3f} ▏{bar:<{BAR}} {count:,}{marked}"
