"""Losses, against numbers computed by hand: ε = 0.2, δ = 4."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.algorithms.losses import LossParameters, LossTokens, ppo_clip, ratio, two_sided_clip
from shoal.algorithms.registry import LOSSES

PARAMETERS = LossParameters(epsilon=0.2, delta=4.0)


def tokens(ratios: list[float], advantages: list[float]) -> LossTokens:
    """Tokens whose ratio is given: the behaviour log-probability is −1 throughout."""
    logprobs = torch.tensor([math.log(r) - 1.0 for r in ratios], dtype=torch.float64, requires_grad=True)
    behaviour = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    return LossTokens(logprobs, behaviour, torch.tensor(advantages, dtype=torch.float64))


# ratio, advantage, loss, gradient of the loss by the log-probability (= −A·r where nothing clips), clipped?
TWO_SIDED = [
    (1.0, 2.0, -2.0, -2.0, False),
    (1.1, 1.0, -1.1, -1.1, False),
    (1.5, 1.0, -1.2, 0.0, True),  # moved enough: (1 + ε)·A
    (0.5, 1.0, -0.5, -0.5, False),  # moved the wrong way: keeps its gradient
    (0.5, -1.0, 0.8, 0.0, True),  # moved enough downwards: (1 − ε)·|A|
    (1.5, -1.0, 1.5, 1.5, False),
    (3.9, -1.0, 3.9, 3.9, False),
    (10.0, -1.0, 4.0, 0.0, True),  # the second side: δ·|A|
    (10.0, 1.0, -1.2, 0.0, True),
    (1.7, 0.0, 0.0, 0.0, False),
]
PPO = [row if row[0] < 4 or row[1] > 0 else (10.0, -1.0, 10.0, 10.0, False) for row in TWO_SIDED]


@pytest.mark.parametrize(("loss", "table"), [(two_sided_clip, TWO_SIDED), (ppo_clip, PPO)])
def test_loss_gradient_and_clipping_by_hand(loss, table) -> None:
    ratios, advantages, losses, gradients, clipped = (list(column) for column in zip(*table, strict=True))
    given = tokens(ratios, advantages)
    output = loss(given, PARAMETERS)
    output.loss_N.sum().backward()
    assert output.loss_N.tolist() == pytest.approx(losses)
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx(gradients)
    assert output.mean["clip_fraction"].tolist() == [float(value) for value in clipped]
    assert output.mean["ratio_mean"].tolist() == pytest.approx(ratios)
    assert float(output.peak["ratio_max"].max()) == pytest.approx(10.0)


def test_the_parameters_are_used() -> None:
    given = tokens([1.4, 1.4, 3.0], [1.0, -1.0, -1.0])
    wide = LossParameters(epsilon=0.5, delta=2.0)
    assert two_sided_clip(given, wide).loss_N.tolist() == pytest.approx([-1.4, 1.4, 2.0])
    assert ppo_clip(given, wide).loss_N.tolist() == pytest.approx([-1.4, 1.4, 3.0])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_exploding_ratio_gives_numbers_not_nan(name: str) -> None:
    logprobs = torch.tensor([0.0, 0.0, -900.0, -900.0], requires_grad=True)
    behaviour = torch.tensor([-900.0, -900.0, 0.0, 0.0])
    given = LossTokens(logprobs, behaviour, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    output = LOSSES[name](given, PARAMETERS)
    output.loss_N.sum().backward()
    assert torch.isfinite(output.loss_N).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(ratio(given)).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(name: str) -> None:
    given = tokens([1.0, 1.0, 1.0], [0.5, -0.25, 0.0])
    LOSSES[name](given, PARAMETERS).loss_N.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx([-0.5, 0.25, 0.0])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_what_is_reported_carries_no_gradient(name: str) -> None:
    output = LOSSES[name](tokens([1.5], [1.0]), PARAMETERS)
    assert not any(value.requires_grad for value in [*output.mean.values(), *output.peak.values()])
