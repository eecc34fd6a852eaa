"""How far two policies are apart, by hand and against the exact quantity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.algorithms.mismatch import absolute_difference, divergence, effective_share, ratio_sums


def test_differences_by_hand() -> None:
    now_N, recorded_N = torch.tensor([0.25, 0.5, 0.5]).log(), torch.tensor([0.5, 0.25, 0.5]).log()
    assert absolute_difference(now_N, recorded_N).tolist() == pytest.approx([math.log(2), math.log(2), 0.0])
    assert divergence(now_N, recorded_N).tolist() == pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0])


def test_the_mean_of_the_divergence_is_that_of_the_distributions() -> None:
    recorded_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    now_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    exact = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6)  # KL(recorded ‖ now)
    assert float((recorded_V.exp() * divergence(now_V, recorded_V)).sum()) == pytest.approx(exact)


def test_they_are_numbers_without_gradient_also_far_away() -> None:
    now_N, recorded_N = torch.tensor([-1000.0, 0.0], requires_grad=True), torch.tensor([0.0, -1000.0])
    for values in (
        absolute_difference(now_N, recorded_N),
        divergence(now_N, recorded_N),
        *ratio_sums(now_N, recorded_N),
    ):
        assert torch.isfinite(values).all()
        assert not values.requires_grad


@pytest.mark.parametrize(
    ("ratios", "share"),
    [([1.0, 1.0, 1.0, 1.0], 1.0), ([0.5, 0.5], 1.0), ([1.0, 3.0], 0.8), ([1000.0, 1e-3, 1e-3, 1e-3], 0.25)],
)
def test_the_effective_share_by_hand(ratios: list[float], share: float) -> None:
    total, squares = ratio_sums(torch.tensor(ratios).log(), torch.zeros(len(ratios)))
    assert effective_share(float(total), float(squares), len(ratios)) == pytest.approx(share, rel=1e-4)


def test_the_effective_share_of_nothing_is_whole() -> None:
    assert effective_share(0.0, 0.0, 0) == 1.0


@settings(max_examples=40)
@given(logs=st.lists(st.floats(-30, 30), min_size=1, max_size=20), cut=st.integers(0, 20))
def test_the_share_is_bounded_and_sums_may_be_taken_apart(logs: list[float], cut: int) -> None:
    now_N, zeros_N = torch.tensor(logs), torch.zeros(len(logs))
    sums = [float(value) for value in ratio_sums(now_N, zeros_N)]
    share = effective_share(sums[0], sums[1], len(logs))
    assert 1 / len(logs) - 1e-9 <= share <= 1 + 1e-9
    parts = [ratio_sums(part, torch.zeros(len(part))) for part in (now_N[:cut], now_N[cut:])]
    assert [float(left + right) for left, right in zip(*parts, strict=True)] == pytest.approx(sums)
