"""The numbers of a step: summed over tokens, micro-batches, ranks and updates, in that order.

    micro-batch ─add─► Tally (tensors, so that a GPU is not waited for) ─reduced─► Numbers (floats, the same in every
    rank) ─veto, then add─► Totals ─► the row of metrics

Legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.mismatch import effective_share
from shoal.trainer.crew import Crew

# Sums that become something else than a mean over tokens.
TOKENS, POSITIONS, INPUTS = "_tokens", "_positions", "_inputs"
RATIO, RATIO_SQUARED = "_ratio", "_ratio_squared"


@dataclass
class Tally:
    """One update's sums in this process, by name. Every process adds the same names in the same order."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], peaks: Mapping[str, Tensor], *, counted: bool = True) -> None:
        """Sum per-token values, keep the largest of `peaks`. What does not count adds its names and nothing else."""
        for name, values_N in values.items():
            values_N = values_N.detach().double()
            total = values_N.sum() if counted else values_N.new_zeros(())
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, values_N in peaks.items():
            values_N = values_N.detach().double()
            peak = values_N.max() if counted else values_N.new_full((), -torch.inf)
            self.peaks[name] = torch.maximum(self.peaks[name], peak) if name in self.peaks else peak

    def reduced(self, crew: Crew) -> Numbers:
        """Over all processes. This is where a GPU is waited for: once an update."""
        sums = crew.total(torch.stack(list(self.sums.values()))).tolist()
        peaks = crew.peak(torch.stack(list(self.peaks.values()))).tolist() if self.peaks else []
        return Numbers(dict(zip(self.sums, sums, strict=True)), dict(zip(self.peaks, peaks, strict=True)))


@dataclass(frozen=True)
class Numbers:
    """One update's sums and peaks, over all processes."""

    sums: Mapping[str, float]
    peaks: Mapping[str, float]

    def means(self) -> dict[str, float]:
        """For example `{"loss": 0.2, "effective_samples": 0.98, "ratio_max": 1.4, …}`."""
        return _means(self.sums, dict.fromkeys(self.sums, self.sums[TOKENS])) | dict(self.peaks)


@dataclass
class Totals:
    """A step's numbers: what an update did not measure does not count in the mean of those that did.

    `grad_norm` is the mean of the updates that were made, if any was; `grad_norm_max` is of the skipped ones, too.
    """

    sums: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    made_norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def add(self, numbers: Numbers, grad_norm: float, *, made: bool = True) -> None:
        for name, value in numbers.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.tokens[name] = self.tokens.get(name, 0.0) + numbers.sums[TOKENS]
        for name, value in numbers.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, value), value)
        self.grad_norms.append(grad_norm)
        if made:
            self.made_norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        """The row's numbers; of a step in which nothing was measured only how many updates were skipped."""
        if not self.grad_norms:
            return {"skipped_updates": float(self.skipped)}
        norms = {"grad_norm": float(np.mean(self.made_norms or self.grad_norms)), "grad_norm_max": max(self.grad_norms)}
        return {**_means(self.sums, self.tokens), **self.peaks, **norms, "skipped_updates": float(self.skipped)}


def _means(sums: Mapping[str, float], tokens: Mapping[str, float]) -> dict[str, float]:
    means = {name: total / tokens[name] for name, total in sums.items() if not name.startswith("_")}
    if INPUTS in sums:
        means["padding_fraction"] = 1 - sums[INPUTS] / sums[POSITIONS]
    if RATIO in sums:
        means["effective_samples"] = effective_share(sums[RATIO], sums[RATIO_SQUARED], int(tokens[RATIO]))
    return means
