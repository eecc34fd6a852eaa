"""Hundreds of pairs of a gold answer and what was answered, in `tests/data/math_pairs.txt`."""

from __future__ import annotations

import pytest
from mathkit import pairs

from shoal.environments.graders.mathematics import MathematicsGrader

PAIRS = pairs()
CATEGORIES = sorted({pair.category for pair in PAIRS})
GRADER = MathematicsGrader()


@pytest.mark.parametrize("category", CATEGORIES)
def test_answers_are_worth_what_the_table_says(category: str) -> None:
    mine = [pair for pair in PAIRS if pair.category == category]
    scores = {pair: GRADER.score(pair.gold, pair.completion) for pair in mine}
    assert [str(pair) for pair, score in scores.items() if score.value != float(pair.right)] == []
    assert all(score.parts == {"correct": score.value} for score in scores.values())


def test_every_gold_answer_is_usable_and_right_against_itself() -> None:
    for gold in {pair.gold for pair in PAIRS}:
        assert GRADER.problem(gold) == "", gold
        assert GRADER.score(gold, f"\\boxed{{{gold}}}").value == 1.0, gold
        assert GRADER.score(gold, f"<think>Hm.</think>\nThus\n$$\\boxed{{{gold}}}$$").value == 1.0, gold


def test_the_table_is_as_large_as_it_should_be() -> None:
    assert len(PAIRS) >= 600
    assert len(CATEGORIES) >= 25
    right = sum(pair.right for pair in PAIRS)
    assert 0.4 < right / len(PAIRS) < 0.7
    assert len({(pair.gold, pair.completion) for pair in PAIRS}) == len(PAIRS)
