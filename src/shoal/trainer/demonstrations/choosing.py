"""Rows through the filters, in one pass, into a corpus.

    rows ─read─► demonstrations ─encode─► candidates ─filter, filter, …─► corpus ─rank, if asked─► trained on
      └ cannot be read: counted             └ left out: by which filter, and why

Memory goes with the number of rows, not with their length: tokens are written as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from shoal.errors import ConfigError, UnusableTask
from shoal.trainer.demonstrations.corpus import Corpus, CorpusWriter
from shoal.trainer.demonstrations.encoding import Encoder
from shoal.trainer.demonstrations.filters import Candidate, Filter
from shoal.trainer.demonstrations.judged import Ranked
from shoal.trainer.demonstrations.reading import Demonstration, Demonstrations
from shoal.trainer.demonstrations.report import READABLE, Outcome
from shoal.trainer.demonstrations.settings import Interrupted

TOGETHER = 256  # candidates that a filter is asked about at a time
"""A process that is told to stop does so within this many rows."""


@dataclass(frozen=True)
class Choosing:
    """What is needed to choose. `ranked` is asked last, if at all; `cut_at` shortens sequences instead of refusing."""

    demonstrations: Demonstrations
    encoder: Encoder
    filters: Sequence[Filter]
    ranked: Ranked | None = None
    cut_at: int | None = None
    progress: Callable[[int, int], None] = field(default=lambda _done, _total: None)
    interrupted: Callable[[], bool] = field(default=lambda: False)

    @property
    def _all(self) -> tuple[Filter, ...]:
        return (*self.filters, *([self.ranked] if self.ranked else []))

    def run(self, folder: Path) -> tuple[Corpus, Outcome]:
        """Choose, and write the corpus. If nothing is left, that is an error which says what left it out."""
        outcome = Outcome((READABLE, *(each.name for each in self._all)))
        with CorpusWriter(folder) as writer:
            candidates = self._candidates(outcome)
            while some := list(islice(candidates, TOGETHER)):
                for candidate in self._through(some, outcome):
                    writer.add(candidate.row, candidate.turns, candidate.sequences)
            dropped = frozenset(self.ranked.worst()) if self.ranked else frozenset()
            for row in dropped:
                outcome.leave_out(row, "rank", "others are ranked higher")
            self._refuse_nothing(outcome)
            return writer.finish(dropped), outcome

    def _candidates(self, outcome: Outcome) -> Iterator[Candidate]:
        for number, found in enumerate(self.demonstrations.read()):
            if number % TOGETHER == 0:
                self.progress(number, self.demonstrations.rows)
                if self.interrupted():
                    raise Interrupted
            if not isinstance(found, Demonstration):
                outcome.leave_out(found[0], READABLE, found[1])
                continue
            try:
                sequences = self.encoder.encode(found)
            except UnusableTask as error:
                outcome.leave_out(found.row, READABLE, str(error))
                continue
            cut = sequences if self.cut_at is None else tuple(each.cut(self.cut_at) for each in sequences)
            yield Candidate(found, tuple(each for each in cut if each.tokens_learnt))

    def _through(self, candidates: Sequence[Candidate], outcome: Outcome) -> list[Candidate]:
        """Those that no filter leaves out."""
        left = list(candidates)
        for each in self._all:
            reasons = each.reasons(left) if left else []
            for candidate, reason in zip(left, reasons, strict=True):
                if reason:
                    outcome.leave_out(candidate.row, each.name, reason)
            left = [candidate for candidate, reason in zip(left, reasons, strict=True) if not reason]
        for candidate in candidates:
            outcome.saw(candidate)
        return left

    def _refuse_nothing(self, outcome: Outcome) -> None:
        if outcome.kept:
            return
        counts = ", ".join(f"{name} {count:,}" for name, count in outcome.counts.items() if count)
        row, (by, reason) = next(iter(outcome.left_out.items()))
        raise ConfigError(
            f"no demonstration is left of {self.demonstrations.rows:,} (left out by: {counts}); the first, row {row} "
            f"({self.demonstrations.where(row)}), by {by}: {reason}"
        )
