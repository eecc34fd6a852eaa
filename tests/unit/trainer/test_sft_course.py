"""Which sequences each step has: all of them once an epoch, in an order of the seed's, validation apart by question."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.trainer.demonstrations.course import Course


def table(course: Course, questions: list[int]) -> tuple[list[list[int]], list[int]]:
    """The batches, and what is kept for validation."""
    found, aside = course.timetable(np.array(questions, np.int64))
    return [batch.tolist() for batch in found], aside.tolist()


def batches(course: Course, count: int) -> list[list[int]]:
    return table(course, list(range(count)))[0]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 5))
def test_every_epoch_has_every_sequence_once(count: int, size: int, epochs: int, seed: int) -> None:
    found = batches(Course(epochs=epochs, batch=size, seed=seed, validation=0), count)
    per_epoch = -(-count // size)
    assert len(found) == epochs * per_epoch
    for epoch in range(epochs):
        seen = [number for batch in found[epoch * per_epoch : (epoch + 1) * per_epoch] for number in batch]
        assert sorted(seen) == list(range(count))
    sizes = [len(batch) for batch in found]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


def test_the_order_is_the_seeds_and_the_epochs() -> None:
    course = Course(epochs=2, batch=4, validation=0)
    first = batches(course, 8)
    assert first == batches(course, 8)
    assert first[:2] != first[2:]
    assert first != batches(replace(course, seed=1), 8)
    assert first[0] == PINNED  # the same on every machine and in every version


PINNED = [0, 2, 1, 5]


def test_steps_end_it_or_let_it_go_on() -> None:
    course = Course(epochs=1, batch=4, validation=0)
    assert len(batches(replace(course, steps=1), 8)) == 1
    longer = batches(replace(course, steps=5), 8)
    assert len(longer) == 5
    assert longer[:2] == batches(course, 8)


def test_validation_takes_whole_questions_and_is_never_trained_on() -> None:
    questions = [5, 1, 5, 2, 1, 9, 9, 7]
    assert table(Course(validation=2), questions)[1] == [1, 4]
    found, aside = table(Course(validation=4), questions)
    assert aside == [0, 1, 2, 3, 4]  # five: both answers to question 5
    assert {number for batch in found for number in batch} == {5, 6, 7}
    assert [len(table(Course(), list(range(count)))[1]) for count in (100, 10_000, 19)] == [5, 256, 0]


def test_nothing_left_to_train_on() -> None:
    with pytest.raises(ConfigError, match="all 3 sequences are kept for validation"):
        table(Course(validation=3), [0, 1, 2])


def test_decay_by_hand() -> None:
    assert [Course(decay="none").rate_factor(step, 4, 0) for step in range(4)] == [1, 1, 1, 1]
    assert [Course(decay="linear").rate_factor(step, 4, 0) for step in range(4)] == [1, 0.75, 0.5, 0.25]
    assert [round(Course().rate_factor(step, 6, 2), 4) for step in range(6)] == [1, 1, 1, 0.8536, 0.5, 0.1464]
    assert Course().rate_factor(0, 1, 5) == 1
