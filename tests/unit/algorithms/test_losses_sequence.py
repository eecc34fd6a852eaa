"""Losses that look at whole completions, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kit.loss import differentiated, tokens
from shoal.algorithms.losses import LossParameters, geometric_mask, gspo, sequence_mean

# Completions of 2, 1 and 3 tokens. Geometric means: √(1.21 · 1) = 1.1, 1.5, ∛(0.5 · 1 · 0.25) = 0.5.
RATIOS = [1.21, 1.0, 1.5, 0.5, 1.0, 0.25]
SEQUENCE = [0, 0, 1, 2, 2, 2]


def test_gspo_by_hand() -> None:
    advantages = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    given = tokens(RATIOS, advantages, sequence=SEQUENCE)
    output, gradient = differentiated(gspo, given, LossParameters(epsilon=0.2))
    assert output.loss_N.tolist() == pytest.approx([-1.1, -1.1, -2.4, -0.5, -0.5, -0.5])
    # −A·s at every token, though their own ratios differ; the second completion is clipped
    assert gradient == pytest.approx([-1.1, -1.1, 0.0, -0.5, -0.5, -0.5])
    assert output.mean["ratio_mean"].tolist() == pytest.approx([1.1, 1.1, 1.5, 0.5, 0.5, 0.5])
    assert output.mean["clip_fraction"].tolist() == [0, 0, 1, 0, 0, 0]


def test_gspo_with_negative_advantages_by_hand() -> None:
    output, gradient = differentiated(gspo, tokens(RATIOS, [-1.0] * 6, sequence=SEQUENCE), LossParameters(epsilon=0.2))
    assert output.loss_N.tolist() == pytest.approx([1.1, 1.1, 1.5, 0.8, 0.8, 0.8])
    assert gradient == pytest.approx([1.1, 1.1, 1.5, 0.0, 0.0, 0.0])


def test_gspo_clips_as_narrowly_as_its_authors_do() -> None:
    ratios = [math.exp(0.00035), math.exp(0.00045), math.exp(-0.00035)]
    narrow = LossParameters(epsilon=3e-4, epsilon_high=4e-4)
    output, _ = differentiated(gspo, tokens(ratios, [1.0, 1.0, -1.0]), narrow)
    assert output.mean["clip_fraction"].tolist() == [0, 1, 1]


def test_the_geometric_mask_by_hand() -> None:
    # √(1.01 · 1.005) = 1.0075 stays; ⁵√1.1 = 1.0192 goes; √(3 · 1/3) = 1 stays, and 3 is capped; 0.985 goes
    ratios = [1.01, 1.005, 1.1, 1.0, 1.0, 1.0, 1.0, 3.0, 1 / 3, 0.985]
    sequence = [0, 0, 1, 1, 1, 1, 1, 2, 2, 3]
    advantages = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0]
    given = tokens(ratios, advantages, sequence=sequence)
    parameters = LossParameters(mask_low=0.99, mask_high=1.01, ratio_cap=2.0)
    output, gradient = differentiated(geometric_mask, given, parameters)
    assert gradient == pytest.approx([-1.01, -1.005, 0, 0, 0, 0, 0, 2.0, 1 / 3, 0])
    weights = [1.01, 1.005, 0, 0, 0, 0, 0, 2.0, 1 / 3, 0]
    logprobs = [math.log(r) - 1 for r in ratios]
    expected = [-w * a * p for w, a, p in zip(weights, advantages, logprobs, strict=True)]
    assert output.loss_N.tolist() == pytest.approx(expected)
    assert output.mean["masked_fraction"].tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 1]
    assert output.mean["clip_fraction"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 1]


def test_the_mask_has_the_bounds_that_are_given() -> None:
    given = tokens([1.05, 0.9], [1.0, 1.0])
    masked = [
        geometric_mask(given, LossParameters(mask_low=low, mask_high=high)).mean["masked_fraction"].tolist()
        for low, high in ((0.99, 1.01), (0.89, 1.01), (0.99, 1.06), (0.89, 1.06))
    ]
    assert masked == [[1, 1], [1, 0], [0, 1], [0, 0]]


def test_means_stay_within_their_completion() -> None:
    values_N = torch.tensor([1.0, 3.0, 7.0, 2.0, 2.0, 5.0])
    assert sequence_mean(values_N, torch.tensor([0, 0, 1, 2, 2, 2])).tolist() == [2, 2, 7, 3, 3, 3]
    assert sequence_mean(values_N, None).tolist() == pytest.approx([20 / 6] * 6)
    assert sequence_mean(torch.tensor([]), torch.tensor([], dtype=torch.long)).tolist() == []
