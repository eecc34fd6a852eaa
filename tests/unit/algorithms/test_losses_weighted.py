"""Losses with weights and masks per token, against numbers computed by hand. Log-probabilities are log r − 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kit.loss import differentiated, tokens
from shoal.algorithms.losses import LossParameters, LossTokens, cispo, cross_entropy, decoupled, dppo, plain, tis

PARAMETERS = LossParameters(epsilon=0.2, ratio_cap=2.0)


def logprob(ratio: float) -> float:
    return math.log(ratio) - 1


def test_plain_looks_at_no_ratio() -> None:
    output, gradient = differentiated(plain, tokens([1.0, 10.0, 0.1], [2.0, 1.0, -1.0]), PARAMETERS)
    assert output.loss_N.tolist() == pytest.approx([2.0, -logprob(10), logprob(0.1)])
    assert gradient == pytest.approx([-2.0, -1.0, 1.0])
    assert output.mean["ratio_mean"].tolist() == pytest.approx([1.0, 10.0, 0.1])
    assert output.mean["clip_fraction"].tolist() == [0.0, 0.0, 0.0]


def test_cross_entropy_needs_nothing_recorded() -> None:
    given = LossTokens(
        logprobs_N=torch.tensor([-0.5, -2.0], requires_grad=True),
        behaviour_N=torch.full((2,), math.nan),
        advantages_N=torch.tensor([1.0, 0.5]),
    )
    output, gradient = differentiated(cross_entropy, given, PARAMETERS)
    assert output.loss_N.tolist() == [0.5, 1.0]
    assert gradient == [-1.0, -0.5]
    assert not output.mean
    assert not output.peak


def test_tis_caps_the_weight_and_keeps_the_gradient() -> None:
    output, gradient = differentiated(tis, tokens([1.5, 10.0, 0.1, 10.0], [1.0, 1.0, -1.0, -2.0]), PARAMETERS)
    assert gradient == pytest.approx([-1.5, -2.0, 0.1, 4.0])  # −min(r, 2)·A
    assert output.loss_N.tolist() == pytest.approx(
        [-1.5 * logprob(1.5), -2 * logprob(10), 0.1 * logprob(0.1), 4 * logprob(10)]
    )
    assert output.mean["clip_fraction"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert output.mean["ratio_mean"].tolist() == pytest.approx([1.5, 10.0, 0.1, 10.0])


def test_cispo_has_its_own_cap() -> None:
    given = tokens([1.5, 10.0, 0.1], [1.0, 1.0, -1.0])
    output, gradient = differentiated(cispo, given, replace(PARAMETERS, epsilon_high=3.0))
    assert gradient == pytest.approx([-1.5, -4.0, 0.1])  # −min(r, 1 + 3)·A, no floor
    assert output.mean["clip_fraction"].tolist() == [0.0, 1.0, 0.0]
    assert differentiated(cispo, given, PARAMETERS)[1] == pytest.approx([-1.5, -2.0, 0.1])


# trainer's at the beginning / recorded, policy / trainer's at the beginning, advantage, loss, gradient, stopped?
DECOUPLED = [
    (1.0, 1.0, 1.0, -1.0, -1.0, False),
    (1.5, 1.1, 1.0, -1.65, -1.65, False),  # w = 1.5, u = 1.1: 1.5 · 1.1
    (0.5, 1.1, -1.0, 0.55, 0.55, False),
    (1.5, 1.5, 1.0, -1.8, 0.0, True),  # u is clipped: 1.5 · 1.2
    (10.0, 1.1, 1.0, -2.2, -2.2, True),  # w is capped: 2 · 1.1
    (10.0, 0.5, -1.0, 1.6, 0.0, True),  # both: 2 · 0.8
    (0.5, 2.0, 0.0, 0.0, 0.0, False),
]


def test_decoupled_clips_around_the_steps_beginning_and_weighs_what_came_before() -> None:
    before, moved, advantages, losses, gradients, stopped = (list(column) for column in zip(*DECOUPLED, strict=True))
    recomputed_N = torch.tensor([logprob(w) for w in before], dtype=torch.float64)
    logprobs_N = (recomputed_N + torch.tensor([math.log(u) for u in moved])).requires_grad_()
    behaviour_N, advantages_N = torch.full((7,), -1.0, dtype=torch.float64), torch.tensor(advantages)
    given = LossTokens(logprobs_N, behaviour_N, advantages_N, recomputed_N)
    for recomputed_base in (False, True):  # it takes both, whatever the base is
        output, gradient = differentiated(decoupled, given, replace(PARAMETERS, recomputed_base=recomputed_base))
        assert output.loss_N.tolist() == pytest.approx(losses)
        assert gradient == pytest.approx(gradients)
        assert output.mean["clip_fraction"].tolist() == [float(value) for value in stopped]
        assert output.mean["ratio_mean"].tolist() == pytest.approx(moved)
        assert output.mean["weight_mean"].tolist() == pytest.approx([min(w, 2.0) for w in before])


# recorded probability, probability now, advantage, masked?
DPPO = [
    (0.5, 0.5, 1.0, False),
    (0.5, 0.69, 1.0, False),
    (0.5, 0.71, 1.0, True),  # went up by 0.21, and is to go up
    (0.5, 0.71, -1.0, False),  # went up, and is to go down: keeps its gradient
    (0.9, 0.6, -1.0, True),  # its ratio is only 0.67
    (0.001, 0.003, 1.0, False),  # its ratio is 3, but it hardly moved
    (0.5, 0.9, 0.0, False),  # no advantage has no direction
]


def test_dppo_masks_by_probability_and_pulls_back_by_ratio() -> None:
    base, now, advantages, masked = (list(column) for column in zip(*DPPO, strict=True))
    given = LossTokens(
        logprobs_N=torch.tensor(now, dtype=torch.float64).log().requires_grad_(),
        behaviour_N=torch.tensor(base, dtype=torch.float64).log(),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
    )
    output, gradient = differentiated(dppo, given, LossParameters(move_limit=0.2, log_ratio_penalty=0.001))
    ratios = [p / b for p, b in zip(now, base, strict=True)]
    policy = [0.0 if m else -r * a for r, a, m in zip(ratios, advantages, masked, strict=True)]
    logs = [math.log(r) for r in ratios]
    assert output.loss_N.tolist() == pytest.approx([p + 0.001 * d * d for p, d in zip(policy, logs, strict=True)])
    assert gradient == pytest.approx([p + 0.002 * d for p, d in zip(policy, logs, strict=True)])
    assert output.mean["masked_fraction"].tolist() == [float(value) for value in masked]
    assert output.mean["clip_fraction"].tolist() == [float(value) for value in masked]
    unmasked, _ = differentiated(dppo, given, LossParameters(move_limit=0.5, log_ratio_penalty=0.0))
    assert unmasked.loss_N.tolist() == pytest.approx([-r * a for r, a in zip(ratios, advantages, strict=True)])


def test_dppo_is_anchored_on_the_base() -> None:
    given = LossTokens(
        logprobs_N=torch.tensor([0.75]).log().requires_grad_(),
        behaviour_N=torch.tensor([0.5]).log(),
        advantages_N=torch.tensor([1.0]),
        recomputed_N=torch.tensor([0.7]).log(),
    )
    assert dppo(given, LossParameters()).mean["masked_fraction"].tolist() == [1.0]
    assert dppo(given, LossParameters(recomputed_base=True)).mean["masked_fraction"].tolist() == [0.0]
