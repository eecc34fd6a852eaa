"""Which sequences each step is trained on, and at which rate: functions of the settings alone, so that a resume has
nothing to restore but the number of the step.

    corpus ─► validation, by question ─┐
           └► the others: epoch 0, an order by (seed, 0), cut into batches; epoch 1, …
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.trainer.demonstrations.corpus import Corpus
from shoal.trainer.demonstrations.settings import Course, Decay

Numbers = npt.NDArray[np.int64]
VALIDATION_SHARE, MOST_VALIDATION = 20, 256
LARGE_SHARE = 4  # what shares questions with a quarter of everything is put aside only if it is asked for


@dataclass(frozen=True)
class Timetable:
    """The batches of every step, and what is kept for validation."""

    batches: tuple[Numbers, ...]
    validation: Numbers

    @classmethod
    def of(cls, course: Course, corpus: Corpus) -> Timetable:
        validation = _aside(course, corpus.questions)
        others = np.setdiff1d(np.arange(len(corpus)), validation)
        if not len(others):
            raise ConfigError(
                f"all {len(corpus)} sequences are kept for validation, so that none is left to train on: "
                "lower --validation, or give more demonstrations"
            )
        epochs = range(course.epochs) if course.steps is None else iter(int, 1)  # the latter never ends
        every = (batch for number, _ in enumerate(epochs) for batch in _epoch(course, corpus.lengths, others, number))
        return cls(tuple(islice(every, course.steps)), validation)


def _aside(course: Course, questions: npt.NDArray[np.uint64]) -> Numbers:
    """Sequences for validation: those of the lowest questions, each with all its answers, until they are enough.

    Questions with more answers than are wanted come last, the fewest first.
    """
    count = len(questions)
    wanted = min(count // VALIDATION_SHARE, MOST_VALIDATION) if course.validation is None else course.validation
    if wanted <= 0:
        return np.zeros(0, np.int64)
    asked, answers = np.unique(questions, return_counts=True)
    order = np.lexsort((asked, np.where(answers > wanted, answers, 0)))
    if course.validation is None:
        order = order[answers[order] <= max(wanted, count // LARGE_SHARE)]
    enough = int(np.searchsorted(np.cumsum(answers[order]), wanted)) + 1
    return np.flatnonzero(np.isin(questions, asked[order[:enough]])).astype(np.int64)


def _epoch(course: Course, lengths: Numbers, others: Numbers, epoch: int) -> Iterator[Numbers]:
    order = others[np.argsort(_dice(course.seed, epoch, len(others)), kind="stable")]
    if course.batch_tokens is None:
        # As even as can be: a last batch of one sequence would weigh as much as one of many.
        yield from np.array_split(order, math.ceil(len(order) / course.batch))
        return
    filled = np.cumsum(lengths[order])
    start = 0
    while start < len(order):
        before = 0 if start == 0 else int(filled[start - 1])
        end = int(np.searchsorted(filled, before + course.batch_tokens, side="right"))
        end = max(end, start + 1)  # one that is longer than a batch is a batch
        yield order[start:end]
        start = end


def _dice(seed: int, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    """The raw bits of a counter-based generator: the same on every machine and in every version."""
    found: npt.NDArray[np.uint64] = np.random.Philox(key=[seed, epoch]).random_raw(count)
    return found


def decay_factor(decay: Decay, step: int, steps: int, warmup: int) -> float:
    """What the rate of a step is multiplied by: 1 while it warms up, then less and less, a little above 0 at the end.

    >>> [round(decay_factor("linear", step, 6, 2), 2) for step in range(6)]
    [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if decay == "none" or step < warmup:
        return 1.0
    done = (step - warmup) / max(1, steps - warmup)
    return 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
