"""How judges' words count, and what is refused before anything is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.environments import EnvironmentSettings
from shoal.environments.settings import JudgeSettings
from shoal.errors import EnvironmentSetupError
from shoal.rewards.chat import ChatJudge
from shoal.rewards.classifier import Classifier
from shoal.rewards.panel import Panel, panel_of, ranks
from shoal.runtime.stop import StopToken

FAR = JudgeSettings(label="far", url="http://judge.test/v1", model="m")
NEAR = JudgeSettings(label="near", path=Path("nowhere"))


@given(st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=20))
def test_ranks_are_in_order_share_ties_and_do_not_depend_on_the_scale(numbers: list[float]) -> None:
    found = ranks(numbers)
    assert all(0 <= rank <= 1 for rank in found)
    assert sum(found) == pytest.approx(len(numbers) / 2)
    for one, first in zip(numbers, found, strict=True):
        for other, second in zip(numbers, found, strict=True):
            assert (one < other) == (first < second)
    assert ranks([3 * number + 1 for number in numbers]) == found


def test_one_alone_is_in_the_middle() -> None:
    assert ranks([7.0]) == [0.5]


def test_the_kinds_of_judges_and_what_cannot_be_computed_again() -> None:
    panel = panel_of([FAR, NEAR], StopToken(), "cpu")
    assert [type(seat.judge) for seat in panel.seats] == [ChatJudge, Classifier]
    assert panel.unreproducible == ("judge.far",)
    assert Panel().add([[], []]) == [[], []]
    panel.close()


def test_a_classifier_that_is_not_there_is_found_before_anything_is_judged() -> None:
    with pytest.raises(EnvironmentSetupError, match="nowhere does not load"):
        panel_of([NEAR], StopToken(), "cpu").prepare()


def test_judges_of_one_label_are_refused() -> None:
    with pytest.raises(ValueError, match="same label"):
        EnvironmentSettings(judges=(FAR, NEAR.model_copy(update={"label": "far"})))
