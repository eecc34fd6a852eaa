"""What holds for every loss in the registry, whatever it is given."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kit.loss import differentiated, tokens
from shoal.algorithms.losses import LossParameters, LossTokens
from shoal.algorithms.registry import LOSSES, NEEDS_RECOMPUTED

NAMES = sorted(LOSSES)
REPORTED = {"ratio_mean", "clip_fraction"}
WITHOUT_RATIO = {"cross_entropy"}
WHOLE_COMPLETIONS = {"gspo", "geometric_mask"}

RATIOS = st.floats(0.05, 20.0)
COMPLETIONS = st.lists(
    st.tuples(st.lists(st.tuples(RATIOS, RATIOS), min_size=1, max_size=4), st.floats(-2, 2)), min_size=1, max_size=4
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
