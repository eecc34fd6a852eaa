"""Losses by hand, per token and per sequence, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kit.loss import differentiated, tokens
from shoal.algorithms.losses import (
    LossParameters,
    LossTokens,
    cispo,
    cross_entropy,
    decoupled,
    dppo,
    geometric_mask,
    gspo,
    plain,
    ppo_clip,
    ratio,
    sequence_mean,
    tis,
    two_sided_clip,
)
from shoal.algorithms.registry import LOSSES, NEEDS_RECOMPUTED

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


def test_the_base_of_the_ratio_is_chosen() -> None:
    given = LossTokens(
        logprobs_N=torch.tensor([-1.0]),
        behaviour_N=torch.tensor([-1.5]),
        advantages_N=torch.tensor([1.0]),
        recomputed_N=torch.tensor([-1.1]),
    )
    assert float(ratio(given, LossParameters())) == pytest.approx(1.6487213)  # e^0.5
    assert float(ratio(given, LossParameters(recomputed_base=True))) == pytest.approx(1.1051709)  # e^0.1
    with pytest.raises(ValueError, match="recomputed_N"):
        ratio(replace(given, recomputed_N=None), LossParameters(recomputed_base=True))


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


CAPPED = LossParameters(epsilon=0.2, ratio_cap=2.0)


def logprob(ratio: float) -> float:
    return math.log(ratio) - 1


def test_plain_looks_at_no_ratio() -> None:
    output, gradient = differentiated(plain, tokens([1.0, 10.0, 0.1], [2.0, 1.0, -1.0]), CAPPED)
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
    output, gradient = differentiated(cross_entropy, given, CAPPED)
    assert output.loss_N.tolist() == [0.5, 1.0]
    assert gradient == [-1.0, -0.5]
    assert not output.mean
    assert not output.peak


def test_tis_caps_the_weight_and_keeps_the_gradient() -> None:
    output, gradient = differentiated(tis, tokens([1.5, 10.0, 0.1, 10.0], [1.0, 1.0, -1.0, -2.0]), CAPPED)
    assert gradient == pytest.approx([-1.5, -2.0, 0.1, 4.0])  # −min(r, 2)·A
    assert output.loss_N.tolist() == pytest.approx(
        [-1.5 * logprob(1.5), -2 * logprob(10), 0.1 * logprob(0.1), 4 * logprob(10)]
    )
    assert output.mean["clip_fraction"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert output.mean["ratio_mean"].tolist() == pytest.approx([1.5, 10.0, 0.1, 10.0])


def test_cispo_has_its_own_cap() -> None:
    given = tokens([1.5, 10.0, 0.1], [1.0, 1.0, -1.0])
    output, gradient = differentiated(cispo, given, replace(CAPPED, epsilon_high=3.0))
    assert gradient == pytest.approx([-1.5, -4.0, 0.1])  # −min(r, 1 + 3)·A, no floor
    assert output.mean["clip_fraction"].tolist() == [0.0, 1.0, 0.0]
    assert differentiated(cispo, given, CAPPED)[1] == pytest.approx([-1.5, -2.0, 0.1])


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
        output, gradient = differentiated(decoupled, given, replace(CAPPED, recomputed_base=recomputed_base))
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


NAMES = sorted(LOSSES)
REPORTED = {"ratio_mean", "clip_fraction"}
WITHOUT_RATIO = {"cross_entropy"}
WHOLE_COMPLETIONS = {"gspo", "geometric_mask"}

ANY_RATIO = st.floats(0.05, 20.0)
COMPLETIONS = st.lists(
    st.tuples(st.lists(st.tuples(ANY_RATIO, ANY_RATIO), min_size=1, max_size=4), st.floats(-2, 2)),
    min_size=1,
    max_size=4,
)


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
                exploding = LossTokens(
                    logprobs_N, behaviour_N, advantages_N, recomputed_N=recomputed_N, sequence_N=sequence_N
                )
                output, gradient = differentiated(LOSSES[name], exploding, LossParameters())
                assert torch.isfinite(torch.tensor(gradient)).all()
                assert torch.isfinite(output.loss_N).all()
                reported = [*output.mean.values(), *output.peak.values()]
                assert all(torch.isfinite(values_N).all() for values_N in reported)


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


@pytest.mark.parametrize("name", sorted(set(NAMES) - WHOLE_COMPLETIONS))
def test_other_losses_do_not_look_at_completions(name: str) -> None:
    given_N = tokens([1.5, 0.3, 1.1], [1.0, -1.0, 0.5], sequence=[0, 1, 1])
    whole, apart = (LOSSES[name](replace(given_N, sequence_N=s), LossParameters()) for s in (None, given_N.sequence_N))
    assert torch.equal(whole.loss_N, apart.loss_N)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_reported_has_its_names_and_no_gradient(name: str) -> None:
    output = LOSSES[name](tokens([1.5, 3.0], [1.0, -1.0]), LossParameters())
    assert not any(values_N.requires_grad for values_N in [*output.mean.values(), *output.peak.values()])
    assert all(len(values_N) == 2 for values_N in [*output.mean.values(), *output.peak.values()])
    if name in WITHOUT_RATIO:
        assert not output.mean
        assert not output.peak
    else:
        assert set(output.mean) >= REPORTED
        assert set(output.peak) == {"ratio_max"}


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_that_need_the_trainers_own_logprobs_are_named(name: str) -> None:
    without = replace(tokens([1.5], [1.0]), recomputed_N=None)
    if name in NEEDS_RECOMPUTED:
        with pytest.raises(ValueError, match="recomputed_N"):
            LOSSES[name](without, LossParameters())
    else:
        LOSSES[name](without, LossParameters())
