"""Terms beside the loss, mismatch and normalisation, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.algorithms.losses import LossOutput, LossParameters, LossTokens
from shoal.algorithms.terms import (
    NORMALISATIONS,
    StepCount,
    TermWeights,
    absolute_difference,
    divergence,
    effective_share,
    entropy_of,
    kl_estimate,
    kl_term,
    ratio_sums,
    token_weight,
    with_terms,
)
from shoal.errors import ConfigError
from shoal.trainer.settings import ObjectiveSettings

LOGITS_V = torch.tensor([0.5, -1.0, 2.0, 0.1, -0.3], dtype=torch.float64)
REFERENCE_V = torch.tensor([1.0, 0.3, -0.5, 0.2, -1.0], dtype=torch.float64).log_softmax(0)
BEHAVIOUR_V = torch.tensor([0.2, -0.6, 1.6, 0.3, -0.5], dtype=torch.float64).log_softmax(0)
UNCAPPED = LossParameters(ratio_cap=100.0)


def every_token(logits_V: Tensor, behaviour_V: Tensor | None = None) -> LossTokens:
    """One token of each kind: what is drawn with probability exp(behaviour). On policy, unless that is given."""
    logprobs_V = logits_V.log_softmax(0)
    entropy = -(logprobs_V.exp() * logprobs_V).sum()
    behaviour_V = logprobs_V.detach() if behaviour_V is None else behaviour_V
    return LossTokens(
        logprobs_V, behaviour_V, torch.zeros(5), reference_N=REFERENCE_V, entropy_N=entropy.expand_as(logprobs_V)
    )


def expected(values_V: Tensor, tokens: LossTokens) -> Tensor:
    return (tokens.behaviour_N.exp() * values_V).sum()


def gradient(quantity: Tensor, logits_V: Tensor) -> list[float]:
    values: list[float] = torch.autograd.grad(quantity, logits_V, retain_graph=True)[0].tolist()
    return values


def exact_kl(left_V: Tensor, right_V: Tensor) -> Tensor:
    """KL(left ‖ right), exactly."""
    return (left_V.exp() * (left_V - right_V)).sum()


@pytest.mark.parametrize("behaviour_V", [None, BEHAVIOUR_V], ids=["on policy", "off policy"])
def test_the_kl_term_has_the_gradient_of_the_exact_divergence(behaviour_V: Tensor | None) -> None:
    logits_V = LOGITS_V.clone().requires_grad_()
    tokens = every_token(logits_V, behaviour_V)
    exact = gradient(exact_kl(logits_V.log_softmax(0), REFERENCE_V), logits_V)
    assert max(abs(value) for value in exact) > 0.1
    assert gradient(expected(kl_term(tokens, UNCAPPED), tokens), logits_V) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("behaviour_V", [None, BEHAVIOUR_V], ids=["on policy", "off policy"])
def test_what_is_reported_is_the_exact_divergence_on_average(behaviour_V: Tensor | None) -> None:
    tokens = every_token(LOGITS_V, behaviour_V)
    exact = float(exact_kl(LOGITS_V.log_softmax(0), REFERENCE_V))
    assert float(expected(kl_estimate(tokens, UNCAPPED), tokens)) == pytest.approx(exact)
    assert (kl_estimate(tokens, UNCAPPED) >= 0).all()
    assert not kl_estimate(every_token(LOGITS_V.clone().requires_grad_()), UNCAPPED).requires_grad


def test_a_token_that_the_policy_has_left_does_not_rule_what_is_reported() -> None:
    """Drawn by the reference, (0.75, 0.25); π is (0.125, 0.875). KL(π ‖ reference) = ln(1/6) / 8 + 7 ln(3.5) / 8."""
    drawn_V, policy_V = torch.tensor([0.75, 0.25]), torch.tensor([0.125, 0.875])
    tokens = LossTokens(policy_V.log(), drawn_V.log(), torch.zeros(2), reference_N=drawn_V.log())
    # weights r = 1/6 and 7/2; e^−d − 1 + d = 6 − 1 − ln 6 and 2/7 − 1 + ln 3.5
    left, grown = 5 - math.log(6), 2 / 7 - 1 + math.log(3.5)
    assert kl_estimate(tokens, UNCAPPED).tolist() == pytest.approx([left / 6, 3.5 * grown])
    exact = math.log(1 / 6) / 8 + 7 * math.log(3.5) / 8
    assert float(expected(kl_estimate(tokens, UNCAPPED), tokens)) == pytest.approx(exact)
    capped = float(expected(kl_estimate(tokens, LossParameters(ratio_cap=2.0)), tokens))
    assert capped == pytest.approx(0.75 * left / 6 + 0.25 * 2 * grown)
    assert capped < exact, "what is cut off is missing"


def test_the_trap_the_reported_estimate_as_a_loss_follows_another_divergence() -> None:
    """Why `kl_estimate` is not what is differentiated."""
    logits_V = LOGITS_V.clone().requires_grad_()
    tokens = every_token(logits_V)
    difference_V = tokens.logprobs_N - REFERENCE_V
    as_a_loss = gradient(expected((-difference_V).exp() - 1 + difference_V, tokens), logits_V)
    logprobs_V = logits_V.log_softmax(0)
    assert as_a_loss == pytest.approx(gradient(exact_kl(REFERENCE_V, logprobs_V), logits_V), abs=1e-12)
    assert as_a_loss != pytest.approx(gradient(exact_kl(logits_V.log_softmax(0), REFERENCE_V), logits_V), abs=0.05)


def test_the_kl_term_at_a_token_by_hand() -> None:
    # π 0.5, reference 0.25, drawn with 0.1: d = ln 2, ratio 5 cut off at 2
    logprobs_N = torch.tensor([0.5]).log().requires_grad_()
    tokens = LossTokens(logprobs_N, torch.tensor([0.1]).log(), torch.zeros(1), reference_N=torch.tensor([0.25]).log())
    term_N = kl_term(tokens, LossParameters(ratio_cap=2.0))
    assert float(term_N.detach()) == pytest.approx(math.log(2) ** 2)
    assert gradient(term_N.sum(), logprobs_N) == pytest.approx([2 * math.log(2)])
    assert float(kl_estimate(tokens, LossParameters(ratio_cap=2.0))) == pytest.approx(2 * (0.5 - 1 + math.log(2)))


def test_the_entropy_term_has_the_gradient_of_the_entropy() -> None:
    logits_V = LOGITS_V.clone().requires_grad_()
    tokens = every_token(logits_V)
    logprobs_V = logits_V.log_softmax(0)
    exact = gradient(-(logprobs_V.exp() * logprobs_V).sum(), logits_V)
    assert gradient(expected(entropy_of(tokens), tokens), logits_V) == pytest.approx(exact, abs=1e-12)
    nothing = LossOutput(loss_N=tokens.logprobs_N * 0)
    rewarded = with_terms(nothing, tokens, UNCAPPED, TermWeights(entropy=0.5))
    assert gradient(expected(rewarded.loss_N, tokens), logits_V) == pytest.approx([-0.5 * value for value in exact])


@pytest.mark.parametrize("weights", [TermWeights(kl=0.1), TermWeights(entropy=0.1)], ids=["kl", "entropy"])
def test_a_detached_term_has_no_gradient_left(weights: TermWeights) -> None:
    """The mistake that is not repeated: a term of detached numbers changes the loss's value, and nothing else."""
    logits_V = LOGITS_V.clone().requires_grad_()
    attached = every_token(logits_V)
    detached = every_token(LOGITS_V)
    base = LossOutput(loss_N=attached.logprobs_N * 0)
    with_gradient = with_terms(base, attached, UNCAPPED, weights)
    without = with_terms(base, detached, UNCAPPED, weights)
    assert with_gradient.loss_N.tolist() == pytest.approx(without.loss_N.tolist())
    assert any(gradient(with_gradient.loss_N.sum(), logits_V))
    assert not any(gradient(without.loss_N.sum(), logits_V))


def test_terms_are_added_with_their_weights_and_reported() -> None:
    tokens = every_token(LOGITS_V)
    base = LossOutput(loss_N=torch.ones(5, dtype=torch.float64), mean={"ratio_mean": torch.ones(5)}, peak={})
    both = with_terms(base, tokens, UNCAPPED, TermWeights(kl=0.25, entropy=0.5))
    by_hand_N = 1 + 0.25 * kl_term(tokens, UNCAPPED) - 0.5 * entropy_of(tokens)
    assert both.loss_N.tolist() == pytest.approx(by_hand_N.tolist())
    assert both.mean["reference_kl"].tolist() == kl_estimate(tokens, UNCAPPED).tolist()
    assert set(both.mean) == {"ratio_mean", "reference_kl"}
    assert base.mean.keys() == {"ratio_mean"}
    none = with_terms(base, replace(tokens, reference_N=None, entropy_N=None), UNCAPPED, TermWeights())
    assert none == base


def test_far_from_the_reference_there_are_still_numbers() -> None:
    logprobs_N = torch.tensor([0.0, -1000.0], requires_grad=True)
    tokens = LossTokens(
        logprobs_N, torch.tensor([-1000.0, 0.0]), torch.zeros(2), reference_N=torch.tensor([-1000.0, 0.0])
    )
    term_N = kl_term(tokens, LossParameters())
    assert torch.isfinite(term_N).all()
    assert torch.isfinite(kl_estimate(tokens, LossParameters())).all()
    assert all(math.isfinite(value) for value in gradient(term_N.sum(), logprobs_N))


def test_a_term_without_its_numbers_is_an_error() -> None:
    bare = LossTokens(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="reference_N"):
        kl_term(bare, UNCAPPED)
    with pytest.raises(ValueError, match="entropy_N"):
        entropy_of(bare)


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
