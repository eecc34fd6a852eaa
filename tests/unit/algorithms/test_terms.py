"""Terms beside the loss, mismatch and normalisation, by hand."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.algorithms.losses import LossOutput, LossParameters, LossTokens
from shoal.algorithms.terms import divergence, effective_share, normalised, ratio_sums, with_terms
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


def kl_of(tokens: LossTokens, ratio_cap: float = 100.0) -> tuple[Tensor, Tensor]:
    """The KL term: what is differentiated, and what is reported."""
    nothing = LossOutput(loss_N=tokens.logprobs_N * 0)
    output = with_terms(nothing, tokens, LossParameters(ratio_cap=ratio_cap), kl=1.0)
    return output.loss_N, output.mean["reference_kl"]


def expected(values_V: Tensor, tokens: LossTokens) -> Tensor:
    return (tokens.behaviour_N.exp() * values_V).sum()


def gradient(quantity: Tensor, logits_V: Tensor) -> list[float]:
    values: list[float] = torch.autograd.grad(quantity, logits_V, retain_graph=True)[0].tolist()
    return values


def exact_kl(left_V: Tensor, right_V: Tensor) -> Tensor:
    """KL(left ‖ right), exactly."""
    return (left_V.exp() * (left_V - right_V)).sum()


@pytest.mark.parametrize("behaviour_V", [None, BEHAVIOUR_V], ids=["on policy", "off policy"])
def test_the_kl_term_has_the_exact_gradient_and_reports_the_exact_value(behaviour_V: Tensor | None) -> None:
    logits_V = LOGITS_V.clone().requires_grad_()
    tokens = every_token(logits_V, behaviour_V)
    term_V, reported_V = kl_of(tokens)
    exact = exact_kl(logits_V.log_softmax(0), REFERENCE_V)
    slopes = gradient(exact, logits_V)
    assert max(abs(value) for value in slopes) > 0.1
    assert gradient(expected(term_V, tokens), logits_V) == pytest.approx(slopes, abs=1e-12)
    assert float(expected(reported_V, tokens).detach()) == pytest.approx(float(exact.detach()))
    assert (reported_V >= 0).all()
    assert not reported_V.requires_grad
    if behaviour_V is None:  # why what is reported is not what is differentiated: it follows another divergence
        difference_V = tokens.logprobs_N - REFERENCE_V
        as_a_loss = gradient(expected((-difference_V).exp() - 1 + difference_V, tokens), logits_V)
        other = exact_kl(REFERENCE_V, logits_V.log_softmax(0))
        assert as_a_loss == pytest.approx(gradient(other, logits_V), abs=1e-12)
        assert as_a_loss != pytest.approx(slopes, abs=0.05)


def test_reported_kl_is_bounded_for_tokens_that_the_policy_has_left() -> None:
    """Drawn by the reference, (0.75, 0.25); π is (0.125, 0.875). KL(π ‖ reference) = ln(1/6) / 8 + 7 ln(3.5) / 8."""
    drawn_V, policy_V = torch.tensor([0.75, 0.25]), torch.tensor([0.125, 0.875])
    tokens = LossTokens(policy_V.log(), drawn_V.log(), torch.zeros(2), reference_N=drawn_V.log())
    # weights r = 1/6 and 7/2; e^−d − 1 + d = 6 − 1 − ln 6 and 2/7 − 1 + ln 3.5
    left, grown = 5 - math.log(6), 2 / 7 - 1 + math.log(3.5)
    assert kl_of(tokens)[1].tolist() == pytest.approx([left / 6, 3.5 * grown])
    exact = math.log(1 / 6) / 8 + 7 * math.log(3.5) / 8
    assert float(expected(kl_of(tokens)[1], tokens)) == pytest.approx(exact)
    capped = float(expected(kl_of(tokens, ratio_cap=2.0)[1], tokens))
    assert capped == pytest.approx(0.75 * left / 6 + 0.25 * 2 * grown)
    assert capped < exact, "what is cut off is missing"


def test_the_entropy_term_has_the_gradient_of_the_entropy() -> None:
    logits_V = LOGITS_V.clone().requires_grad_()
    tokens = every_token(logits_V)
    logprobs_V = logits_V.log_softmax(0)
    exact = gradient(-(logprobs_V.exp() * logprobs_V).sum(), logits_V)
    rewarded = with_terms(LossOutput(loss_N=tokens.logprobs_N * 0), tokens, UNCAPPED, entropy=0.5)
    assert gradient(expected(rewarded.loss_N, tokens), logits_V) == pytest.approx([-0.5 * value for value in exact])


def test_terms_are_added_with_their_weights_and_reported() -> None:
    tokens = every_token(LOGITS_V)
    base = LossOutput(loss_N=torch.ones(5, dtype=torch.float64), mean={"ratio_mean": torch.ones(5)}, peak={})
    both = with_terms(base, tokens, UNCAPPED, kl=0.25, entropy=0.5)
    assert tokens.entropy_N is not None
    assert both.loss_N.tolist() == pytest.approx((1 + 0.25 * kl_of(tokens)[0] - 0.5 * tokens.entropy_N).tolist())
    assert set(both.mean) == {"ratio_mean", "reference_kl"}
    assert base.mean.keys() == {"ratio_mean"}
    bare = replace(tokens, reference_N=None, entropy_N=None)
    assert with_terms(base, bare, UNCAPPED) == base
    for weights, lacking in (({"kl": 0.1}, "reference_N"), ({"entropy": 0.1}, "entropy_N")):
        with pytest.raises(ValueError, match=lacking):
            with_terms(base, bare, UNCAPPED, **weights)


def test_far_away_there_are_still_numbers() -> None:
    logprobs_N, other_N = torch.tensor([0.0, -1000.0], requires_grad=True), torch.tensor([-1000.0, 0.0])
    term_N, reported_N = kl_of(LossTokens(logprobs_N, other_N, torch.zeros(2), reference_N=other_N), ratio_cap=2.0)
    assert torch.isfinite(term_N).all()
    assert all(math.isfinite(value) for value in gradient(term_N.sum(), logprobs_N))
    for values in (reported_N, divergence(logprobs_N - other_N), *ratio_sums(logprobs_N - other_N)):
        assert torch.isfinite(values).all()
        assert not values.requires_grad


def test_the_mean_of_the_divergence_is_that_of_the_distributions() -> None:
    recorded_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    now_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    exact = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6)  # KL(recorded ‖ now)
    assert float((recorded_V.exp() * divergence(now_V - recorded_V)).sum()) == pytest.approx(exact)
    by_hand = [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0]
    assert divergence(torch.tensor([0.5, 2.0, 1.0]).log()).tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("ratios", "share"),
    [([1.0, 1.0, 1.0, 1.0], 1.0), ([0.5, 0.5], 1.0), ([1.0, 3.0], 0.8), ([1000.0, 1e-3, 1e-3, 1e-3], 0.25)],
)
def test_the_effective_share_by_hand(ratios: list[float], share: float) -> None:
    total, squares = ratio_sums(torch.tensor(ratios).log())
    assert effective_share(float(total), float(squares), len(ratios)) == pytest.approx(share, rel=1e-4)


@given(logs=st.lists(st.floats(-30, 30), min_size=1, max_size=20), cut=st.integers(0, 20))
def test_the_share_is_bounded_and_sums_may_be_taken_apart(logs: list[float], cut: int) -> None:
    now_N = torch.tensor(logs)
    sums = [float(value) for value in ratio_sums(now_N)]
    share = effective_share(sums[0], sums[1], len(logs))
    assert 1 / len(logs) - 1e-9 <= share <= 1 + 1e-9
    parts = [ratio_sums(part) for part in (now_N[:cut], now_N[cut:])]
    assert [float(left + right) for left, right in zip(*parts, strict=True)] == pytest.approx(sums)
    assert effective_share(0.0, 0.0, 0) == 1.0


@pytest.mark.parametrize(("word", "short", "long"), [
    ("tokens", 1 / 8, 1 / 8),
    ("samples", 1 / 4, 1 / 12),  # a mean of 2, a mean of 6, then their mean
    ("constant", 1 / 20, 1 / 20),  # as if both were 10 long
])  # fmt: skip
def test_weights_of_completions_of_2_and_6_tokens_by_hand(word: str, short: float, long: float) -> None:
    weight = normalised(word, [2, 6], 10)
    assert (weight(2), weight(6)) == pytest.approx((short, long))
    assert (normalised(word, [2, 7998], 10)(2) == weight(2)) == (word != "tokens"), "who gains by others' lengths"
    assert word in get_args(ObjectiveSettings.model_fields["normalisation"].annotation)


def test_a_constant_without_a_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="completions have no limit"):
        normalised("constant", [2, 6], None)
