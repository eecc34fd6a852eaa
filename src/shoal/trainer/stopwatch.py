"""Where a trainer's time goes between two rows of its metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.runtime.clock import Clock

ALWAYS = ("wait_s", "train_s", "copy_s", "publish_wait_s")


class Stopwatch:
    """Laps by name, added up until `row` begins anew.

    `idle_fraction` is the part of the time in which the trainer waited for rollouts. `overhead_fraction` is the part
    in which it neither trained nor evaluated nor waited for them: copying, waiting for a version to be out, files, the
    hub. With rollouts that suffice, it is all the time that training loses.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._laps: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        began_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self._laps[name] += self._clock.monotonic_s() - began_s

    def row(self) -> dict[str, float]:
        """How the time since the last row was spent."""
        now_s = self._clock.monotonic_s()
        step_s, self._began_s = now_s - self._began_s, now_s
        laps = {**dict.fromkeys(ALWAYS, 0.0), **self._laps}
        self._laps.clear()
        lost_s = step_s - laps["train_s"] - laps["wait_s"] - laps.get("evaluate_s", 0.0)
        parts = {"idle_fraction": laps["wait_s"], "overhead_fraction": max(0.0, lost_s)}
        fractions = {name: spent_s / step_s if step_s else 0.0 for name, spent_s in parts.items()}
        return {**laps, "step_s": step_s, **fractions}
