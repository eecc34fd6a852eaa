"""Losses that clip, against numbers computed by hand: ε = 0.2, δ = 4."""

from __future__ import annotations

import pytest
import torch

from kit.loss import differentiated, tokens
from shoal.algorithms.losses import LossParameters, LossTokens, ppo_clip, ratio, two_sided_clip

PARAMETERS = LossParameters(epsilon=0.2, delta=4.0)

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
    output, gradient = differentiated(loss, tokens(ratios, advantages), PARAMETERS)
    assert output.loss_N.tolist() == pytest.approx(losses)
    assert gradient == pytest.approx(gradients)
    assert output.mean["clip_fraction"].tolist() == [float(value) for value in clipped]
    assert output.mean["ratio_mean"].tolist() == pytest.approx(ratios)
    assert float(output.peak["ratio_max"].max()) == pytest.approx(10.0)


@pytest.mark.parametrize("loss", [two_sided_clip, ppo_clip])
def test_clip_higher_moves_the_upper_side_only(loss) -> None:
    higher = LossParameters(epsilon=0.2, epsilon_high=0.28, delta=4.0)
    given = tokens([1.25, 1.3, 0.75, 0.85], [1.0, 1.0, -1.0, -1.0])
    output, gradient = differentiated(loss, given, higher)
    assert output.loss_N.tolist() == pytest.approx([-1.25, -1.28, 0.8, 0.85])
    assert gradient == pytest.approx([-1.25, 0.0, 0.0, 0.85])
    assert output.mean["clip_fraction"].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_the_parameters_are_used() -> None:
    given = tokens([1.4, 1.4, 3.0], [1.0, -1.0, -1.0])
    wide = LossParameters(epsilon=0.5, delta=2.0)
    assert two_sided_clip(given, wide).loss_N.tolist() == pytest.approx([-1.4, 1.4, 2.0])
    assert ppo_clip(given, wide).loss_N.tolist() == pytest.approx([-1.4, 1.4, 3.0])


def test_the_base_of_the_ratio_is_chosen() -> None:
    given = LossTokens(
        logprobs_N=torch.tensor([-1.0]),
        behaviour_N=torch.tensor([-1.5]),
        advantages_N=torch.tensor([1.0]),
        recomputed_N=torch.tensor([-1.1]),
    )
    assert float(ratio(given, LossParameters())) == pytest.approx(1.6487213)  # e^0.5
    assert float(ratio(given, LossParameters(recomputed_base=True))) == pytest.approx(1.1051709)  # e^0.1
    assert float(ratio(given)) == pytest.approx(1.6487213)


def test_a_base_that_was_not_computed_is_an_error() -> None:
    given = LossTokens(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="recomputed_N"):
        two_sided_clip(given, LossParameters(recomputed_base=True))
