"""Every word of the recipe trains, and the trainer does not know which one it is."""

from __future__ import annotations

import pytest
import torch
from trainer_stubs import SETTINGS, learner, make_group, same, tiny_model, weights

from shoal.algorithms.registry import ADVANTAGES, LOSSES
from shoal.trainer.settings import ObjectiveSettings, TrainerSettings
from shoal.trainer.step import StepWork, train_step


def trained(**changes: object) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The numbers and the weights after one step on policy, in one optimizer step unless said otherwise."""
    settings = TrainerSettings.model_validate({**SETTINGS.model_dump(), "minibatches": 1, **changes})
    made = learner(settings)
    groups = [make_group(unit, 0, tiny_model()) for unit in range(3)]
    return train_step(made, StepWork(0, groups, 1.0, 0, max_new_tokens=6)), weights(made)


@pytest.fixture(scope="module")
def usual() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return trained()


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("ratio_base", ["behaviour", "recomputed"])
def test_on_policy_every_loss_makes_the_same_step(usual, loss: str, ratio_base: str) -> None:
    numbers, after = trained(loss=loss, objective={"ratio_base": ratio_base, "normalisation": "tokens"})
    assert numbers["grad_norm"] == pytest.approx(usual[0]["grad_norm"], rel=1e-4)
    assert all(torch.allclose(after[name], usual[1][name], atol=2e-4) for name in after)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"plain", "cross_entropy"}))
def test_off_policy_every_loss_trains_and_reports(loss: str) -> None:
    """Four optimizer steps at a high rate: the later ones are no longer on policy."""
    numbers, after = trained(loss=loss, minibatches=4, learning_rate=0.02)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert numbers["ratio_max"] > 1.01


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_every_advantage_trains(advantage: str) -> None:
    assert trained(advantage=advantage)[0]["grad_norm"] > 0


def test_the_terms_reach_the_weights(usual) -> None:
    assert not same(trained(objective={"entropy": 0.5})[1], usual[1])
    # Only at the reference itself has the divergence no gradient: it is felt from the second optimizer step on.
    numbers, after = trained(objective={"kl": 10.0}, minibatches=2, learning_rate=0.02)
    assert numbers["reference_kl"] > 0
    assert not same(after, trained(minibatches=2, learning_rate=0.02)[1])


@pytest.mark.parametrize("normalisation", ["samples", "constant"])
def test_the_normalisation_reaches_the_gradient(usual, normalisation: str) -> None:
    assert ObjectiveSettings().normalisation == "tokens"
    other = trained(objective={"normalisation": normalisation})[0]["grad_norm"]
    assert other != pytest.approx(usual[0]["grad_norm"], rel=1e-3)
