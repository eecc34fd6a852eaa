"""Advantages and losses by hand, per token and per sequence, and what holds for all of them."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.algorithms.advantages import carries_signal
from shoal.algorithms.losses import Loss, LossParameters, LossTokens, dppo, geometric_mask, ratio, sequence_mean
from shoal.algorithms.registry import ADVANTAGES, LOSSES, NEEDS_RECOMPUTED
from shoal.protocol.verdict import MAX_REWARD

GROUPS = st.lists(st.floats(-MAX_REWARD, MAX_REWARD, width=32), min_size=1, max_size=12)


def of(name: str, rewards: list[float]) -> list[float]:
    values: list[float] = ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64)).tolist()
    return values


@pytest.mark.parametrize(("name", "rewards", "expected"), [
    ("group_mean", [1.0, 0.0, 0.5, 0.5], [0.5, -0.5, 0.0, 0.0]),
    # mean 1, population variance (1 + 1 + 0 + 0) / 4 = 0.5, std 0.70710678; 1 / 0.70710778
    ("group_mean_std", [2.0, 0.0, 1.0, 1.0], [1.4142116, -1.4142116, 0.0, 0.0]),
    # mean 1, sample variance (1 + 1 + 0 + 0) / 3, std 0.81649658; 1 / 0.81649758
    ("group_mean_sample_std", [2.0, 0.0, 1.0, 1.0], [1.2247434, -1.2247434, 0.0, 0.0]),
    ("group_mean_sample_std", [3.0], [0.0]),  # a group of one has no deviation
    # the others of the first have the mean 1/3, those of the second and third 4/3, of the last 1
    ("rloo", [3.0, 0.0, 0.0, 1.0], [8 / 3, -4 / 3, -4 / 3, 0.0]),
    ("dr_grpo", [1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
    ("max_rl", [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),  # one success of four weighs 1 / (1/4) − 1
    ("max_rl", [1.0, 1.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3, -1.0]),
    ("max_rl", [0.0, 0.0], [0.0, 0.0]),  # no success, nothing to learn
    ("max_rl", [-0.5, -1.0], [0.0, 0.0]),  # what is below 0 is no success, and no two failures differ
    ("max_rl", [0.9, -0.1], [1.0, -1.0]),
    ("max_rl", [0.5, 0.25, 0.0, 0.25], [1.0, 0.0, -1.0, 0.0]),  # parts of a success: mean 1/4
])  # fmt: skip
def test_advantages_by_hand(name: str, rewards: list[float], expected: list[float]) -> None:
    assert of(name, rewards) == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_carry_no_advantage_and_others_keep_their_order(name: str) -> None:
    assert [of(name, rewards) for rewards in ([0.25] * 3, [7.0], [-7.0])] == [[0.0] * 3, [0.0], [0.0]]
    rewards = torch.tensor([0.1, 0.9, 0.3, 0.3, 1.0])
    assert torch.equal(ADVANTAGES[name](rewards).argsort(stable=True), rewards.argsort(stable=True))


@given(rewards=GROUPS)
def test_advantages_are_finite_and_sum_to_zero(rewards: list[float]) -> None:
    for name in sorted(ADVANTAGES):
        values = of(name, rewards)
        assert all(math.isfinite(value) for value in values)
        assert abs(math.fsum(values)) <= 1e-5 * len(values) * max(1.0, *(abs(value) for value in [*values, *rewards]))
    values, size = of("max_rl", rewards), len(rewards)
    assert -1 - 1e-5 <= min(values) <= max(values) <= (size - 1) * (1 + 1e-5), "bounded by the size of the group"


@pytest.mark.parametrize(("rewards", "expected"), [
    ([0.0, 1.0], True), ([0.5, 0.5, 0.5000001], True), ([1.0, 1.0, 1.0], False), ([0.0], False), ([], False),
    ([0.0, math.nan], False), ([0.0, math.inf], False),
])  # fmt: skip
def test_groups_that_teach(rewards: list[float], expected: bool) -> None:
    assert carries_signal(rewards) is expected


def logprob(ratio: float) -> float:
    return math.log(ratio) - 1


def tokens(
    ratios: Sequence[float], advantages: Sequence[float], *, sequence: Sequence[int] | None = None
) -> LossTokens:
    """Tokens with these ratios. The trainer's own log-probabilities of the step's beginning are the recorded ones."""
    base_N = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    return LossTokens(
        logprobs_N=torch.tensor([logprob(r) for r in ratios], dtype=torch.float64, requires_grad=True),
        behaviour_N=base_N, advantages_N=torch.tensor(advantages, dtype=torch.float64), recomputed_N=base_N.clone(),
        sequence_N=torch.arange(len(ratios)) if sequence is None else torch.tensor(sequence),
    )  # fmt: skip


def differentiated(loss: Loss, given: LossTokens, parameters: LossParameters) -> tuple[Any, list[float]]:
    """What the loss gives, and the gradient of its sum by each token's log-probability."""
    output = loss(given, parameters)
    gradient: Tensor
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), given.logprobs_N)
    return output, gradient.tolist()


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


def columns(table: list[tuple[float, float, float, float, bool]]) -> tuple[Any, ...]:
    ratios, advantages, losses, gradients, clipped = (list(column) for column in zip(*table, strict=True))
    return (ratios, advantages, None), losses, gradients, clipped


def test_the_base_of_the_ratio_is_chosen() -> None:
    one = torch.ones(1)
    given = LossTokens(logprobs_N=-one, behaviour_N=-1.5 * one, advantages_N=one, recomputed_N=-1.1 * one)
    assert float(ratio(given, LossParameters())) == pytest.approx(1.6487213)  # e^0.5
    assert float(ratio(given, LossParameters(recomputed_base=True))) == pytest.approx(1.1051709)  # e^0.1
    with pytest.raises(ValueError, match="recomputed_N"):
        ratio(replace(given, recomputed_N=None), LossParameters(recomputed_base=True))


def weighted(weights: list[float], advantages: list[float], ratios: list[float]) -> list[float]:
    """−w·A·log π."""
    return [-w * a * logprob(r) for w, a, r in zip(weights, advantages, ratios, strict=True)]


CAPPED, HIGHER = LossParameters(epsilon=0.2, ratio_cap=2.0), LossParameters(epsilon=0.2, epsilon_high=0.28, delta=4.0)
MOVED = ([1.25, 1.3, 0.75, 0.85], [1.0, 1.0, -1.0, -1.0], None)
CAP_AT_2 = ([1.5, 10.0, 0.1, 10.0], [1.0, 1.0, -1.0, -2.0], None)
CAP_AT_4 = ([1.5, 10.0, 0.1], [1.0, 1.0, -1.0], None)
PLAIN = ([1.0, 10.0, 0.1], [2.0, 1.0, -1.0], None)
# Completions of 2, 1 and 3 tokens. Geometric means: √(1.21 · 1) = 1.1, 1.5, ∛(0.5 · 1 · 0.25) = 0.5.
RATIOS, SEQUENCE = [1.21, 1.0, 1.5, 0.5, 1.0, 0.25], [0, 0, 1, 2, 2, 2]
# √(1.01 · 1.005) = 1.0075 stays; ⁵√1.1 = 1.0192 goes; √(3 · 1/3) = 1 stays, and 3 is capped; 0.985 goes
MASKED = [1.01, 1.005, 1.1, 1.0, 1.0, 1.0, 1.0, 3.0, 1 / 3, 0.985]
OF_MASKED, KEPT = [1.0] * 7 + [-1.0, -1.0, 1.0], [1.01, 1.005, 0, 0, 0, 0, 0, 2.0, 1 / 3, 0]
NARROW = ([math.exp(0.00035), math.exp(0.00045), math.exp(-0.00035)], [1.0, 1.0, -1.0], None)

# loss, parameters, (ratios, advantages, completions), losses, gradients, which are stopped
BY_HAND = [
    ("two_sided_clip", PARAMETERS, *columns(TWO_SIDED)),
    ("ppo_clip", PARAMETERS, *columns(PPO)),
    *((loss, HIGHER, MOVED, [-1.25, -1.28, 0.8, 0.85], [-1.25, 0.0, 0.0, 0.85], [0, 1, 1, 0])
      for loss in ("two_sided_clip", "ppo_clip")),  # clip-higher moves the upper side only
    ("plain", CAPPED, PLAIN, [2.0, -logprob(10), logprob(0.1)], [-2.0, -1.0, 1.0], [0, 0, 0]),
    ("tis", CAPPED, CAP_AT_2, weighted([1.5, 2, 0.1, 2], *CAP_AT_2[1::-1]), [-1.5, -2.0, 0.1, 4.0], [0, 1, 0, 1]),
    ("cispo", replace(CAPPED, epsilon_high=3.0), CAP_AT_4, weighted([1.5, 4, 0.1], *CAP_AT_4[1::-1]), [-1.5, -4.0, 0.1],
     [0, 1, 0]),  # −min(r, 1 + 3)·A, no floor
    ("cispo", CAPPED, CAP_AT_4, weighted([1.5, 2, 0.1], *CAP_AT_4[1::-1]), [-1.5, -2.0, 0.1], [0, 1, 0]),
    # −A·s at every token, though their own ratios differ; the second completion is clipped
    ("gspo", CAPPED, (RATIOS, [1.0, 1.0, 2.0, 1.0, 1.0, 1.0], SEQUENCE), [-1.1, -1.1, -2.4, -0.5, -0.5, -0.5],
     [-1.1, -1.1, 0.0, -0.5, -0.5, -0.5], [0, 0, 1, 0, 0, 0]),
    ("gspo", CAPPED, (RATIOS, [-1.0] * 6, SEQUENCE), [1.1, 1.1, 1.5, 0.8, 0.8, 0.8], [1.1, 1.1, 1.5, 0.0, 0.0, 0.0],
     [0, 0, 0, 1, 1, 1]),
    ("gspo", LossParameters(epsilon=3e-4, epsilon_high=4e-4), NARROW, [-math.exp(0.00035), -1.0004, 0.9997],
     [-math.exp(0.00035), 0.0, 0.0], [0, 1, 1]),  # as narrowly as its authors do
    ("geometric_mask", CAPPED, (MASKED, OF_MASKED, [0, 0, 1, 1, 1, 1, 1, 2, 2, 3]), weighted(KEPT, OF_MASKED, MASKED),
     [-1.01, -1.005, 0, 0, 0, 0, 0, 2.0, 1 / 3, 0], [0, 0, 1, 1, 1, 1, 1, 1, 0, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "parameters", "given", "losses", "gradients", "stopped"), BY_HAND)
def test_losses_by_hand(loss, parameters, given, losses, gradients, stopped) -> None:
    ratios, advantages, sequence = given
    output, gradient = differentiated(LOSSES[loss], tokens(ratios, advantages, sequence=sequence), parameters)
    assert output.loss_N.tolist() == pytest.approx(losses)
    assert gradient == pytest.approx(gradients)
    assert output.mean["clip_fraction"].tolist() == stopped
    means = [1.1, 1.1, 1.5, 0.5, 0.5, 0.5] if ratios is RATIOS else ratios  # of gspo those of whole completions
    assert output.mean["ratio_mean"].tolist() == pytest.approx(means)
    if loss == "geometric_mask":
        assert output.mean["masked_fraction"].tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 1]


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


def test_cross_entropy_needs_nothing_recorded() -> None:
    logprobs_N = torch.tensor([-0.5, -2.0], requires_grad=True)
    given = LossTokens(logprobs_N, torch.full((2,), math.nan), torch.tensor([1.0, 0.5]))
    output, gradient = differentiated(LOSSES["cross_entropy"], given, CAPPED)
    assert (output.loss_N.tolist(), gradient) == ([0.5, 1.0], [-1.0, -0.5])
    assert not {**output.mean, **output.peak}


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


def test_decoupled_clips_against_proximal_and_weights_by_staleness() -> None:
    before, moved, advantages, losses, gradients, stopped = (list(column) for column in zip(*DECOUPLED, strict=True))
    recomputed_N = torch.tensor([logprob(w) for w in before], dtype=torch.float64)
    logprobs_N = (recomputed_N + torch.tensor([math.log(u) for u in moved])).requires_grad_()
    behaviour_N, advantages_N = torch.full((7,), -1.0, dtype=torch.float64), torch.tensor(advantages)
    given = LossTokens(logprobs_N, behaviour_N, advantages_N, recomputed_N)
    for recomputed_base in (False, True):  # it takes both, whatever the base is
        output, gradient = differentiated(LOSSES["decoupled"], given, replace(CAPPED, recomputed_base=recomputed_base))
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


def test_dppo_masks_by_probability_from_its_base_and_pulls_back_by_ratio() -> None:
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
    now, drawn, before = (torch.tensor([p]).log() for p in (0.75, 0.5, 0.7))
    given = LossTokens(now.requires_grad_(), drawn, torch.ones(1), recomputed_N=before)
    masked = [dppo(given, LossParameters(recomputed_base=base)).mean["masked_fraction"] for base in (False, True)]
    assert masked == [1.0, 0.0]


NAMES = sorted(LOSSES)
REPORTED = {"ratio_mean", "clip_fraction"}

ANY_RATIO = st.floats(0.05, 20.0)
DRAWN = st.lists(st.tuples(ANY_RATIO, ANY_RATIO), min_size=1, max_size=4)
COMPLETIONS = st.lists(st.tuples(DRAWN, st.floats(-2, 2)), min_size=1, max_size=4)


def laid_out(completions: list[tuple[list[tuple[float, float]], float]]) -> LossTokens:
    """Completions end to end; a token is (π / behaviour, recomputed / behaviour)."""
    ratios = [ratio for drawn, _ in completions for ratio, _ in drawn]
    before = [proximal for drawn, _ in completions for _, proximal in drawn]
    advantages = [advantage for drawn, advantage in completions for _ in drawn]
    sequence = [number for number, (drawn, _) in enumerate(completions) for _ in drawn]
    made = tokens(ratios, advantages, sequence=sequence)
    return replace(made, recomputed_N=made.behaviour_N + torch.tensor(before, dtype=torch.float64).log())


@pytest.mark.parametrize("recomputed_base", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(name: str, recomputed_base: bool) -> None:
    on_policy = tokens([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, -0.25, 0.0], sequence=[0, 0, 1, 2])
    output, gradient = differentiated(LOSSES[name], on_policy, LossParameters(recomputed_base=recomputed_base))
    assert gradient == pytest.approx([-0.5, -0.5, 0.25, 0.0])
    assert all(not values_N.any() for key, values_N in output.mean.items() if key.endswith("_fraction"))


@pytest.mark.parametrize("name", NAMES)
def test_exploding_ratios_give_numbers(name: str) -> None:
    logprobs_N = torch.tensor([0.0, 0.0, -1000.0, -1000.0], requires_grad=True)
    behaviour_N = torch.tensor([-1000.0, -1000.0, 0.0, 0.0])
    for recomputed_N in (behaviour_N, logprobs_N.detach(), torch.tensor([-3.0, -1000.0, -1000.0, 0.0])):
        for sequence_N in (torch.arange(4), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0])):
            for advantages_N in (torch.ones(4), -torch.ones(4), torch.tensor([1.0, -1.0, 1.0, -1.0])):
                given = LossTokens(logprobs_N, behaviour_N, advantages_N, recomputed_N, sequence_N=sequence_N)
                output, gradient = differentiated(LOSSES[name], given, LossParameters())
                found = [torch.tensor(gradient), output.loss_N, *output.mean.values(), *output.peak.values()]
                assert all(torch.isfinite(values_N).all() for values_N in found)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(completions=COMPLETIONS)
def test_without_advantage_there_is_no_gradient(name: str, completions) -> None:
    worthless = laid_out([(drawn, 0.0) for drawn, _ in completions])
    # dppo pulls every token back towards its base, and says so: that part is not the advantage's
    _, gradient = differentiated(LOSSES[name], worthless, LossParameters(log_ratio_penalty=0.0))
    assert not any(gradient)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(completions=COMPLETIONS, order=st.randoms())
def test_a_completion_does_not_care_what_it_is_computed_with(name: str, completions, order: Random) -> None:
    """In whatever order they come, together or one by one: the same numbers, bit for bit."""
    apart = [_numbers(name, [completion]) for completion in completions]
    turned = list(range(len(completions)))
    order.shuffle(turned)
    together = _numbers(name, [completions[index] for index in turned])
    for key, values_N in together.items():
        assert torch.equal(values_N, torch.cat([apart[index][key] for index in turned])), key


def _numbers(name: str, completions) -> dict[str, Tensor]:
    output, gradient = differentiated(LOSSES[name], laid_out(completions), LossParameters())
    return {"loss": output.loss_N, "gradient": torch.tensor(gradient), **output.mean, **output.peak}


@pytest.mark.parametrize("name", NAMES)
def test_reported_values_have_names_and_no_gradient(name: str) -> None:
    output = LOSSES[name](tokens([1.5, 3.0], [1.0, -1.0]), LossParameters())
    reported = [*output.mean.values(), *output.peak.values()]
    assert all(len(values_N) == 2 and not values_N.requires_grad for values_N in reported)
    names = set() if name == "cross_entropy" else REPORTED
    assert set(output.mean) >= names
    assert set(output.peak) == ({"ratio_max"} if names else set())


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_that_need_the_trainers_own_logprobs_are_named(name: str) -> None:
    without = replace(tokens([1.5], [1.0]), recomputed_N=None)
    with pytest.raises(ValueError, match="recomputed_N") if name in NEEDS_RECOMPUTED else nullcontext():
        LOSSES[name](without, LossParameters())
