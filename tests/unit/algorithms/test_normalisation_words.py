"""What a token weighs in its step, by hand: completions of 2 and 6 tokens that may be 10 long."""

from __future__ import annotations

from typing import get_args

import pytest

from shoal.algorithms.normalisation import NORMALISATIONS, StepCount, token_weight
from shoal.errors import ConfigError
from shoal.trainer.settings import ObjectiveSettings

STEP = StepCount(tokens=8, completions=2, max_new_tokens=10)


@pytest.mark.parametrize(
    ("word", "short", "long", "sum_"),
    [
        ("tokens", 1 / 8, 1 / 8, 1.0),
        ("samples", 1 / 4, 1 / 12, 1.0),  # a mean of 2, a mean of 6, then their mean
        ("constant", 1 / 20, 1 / 20, 0.4),  # as if both were 10 long
    ],
)
def test_weights_by_hand(word: str, short: float, long: float, sum_: float) -> None:
    assert token_weight(word, 2, STEP) == pytest.approx(short)
    assert token_weight(word, 6, STEP) == pytest.approx(long)
    assert 2 * token_weight(word, 2, STEP) + 6 * token_weight(word, 6, STEP) == pytest.approx(sum_)


def test_with_a_constant_nobody_gains_by_the_length_of_others() -> None:
    longer = StepCount(tokens=8000, completions=2, max_new_tokens=10)
    assert token_weight("constant", 2, longer) == token_weight("constant", 2, STEP)
    assert token_weight("tokens", 2, longer) < token_weight("tokens", 2, STEP)


def test_the_words_are_those_of_the_recipe() -> None:
    assert set(get_args(ObjectiveSettings.model_fields["normalisation"].annotation)) == set(NORMALISATIONS)
    with pytest.raises(ConfigError, match="no normalisation called 'length'; choose: tokens, samples, constant"):
        token_weight("length", 1, STEP)
