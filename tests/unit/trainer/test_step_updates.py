"""One optimizer step: who may refuse it, what it is normalised by, and the terms beside the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stubs import SETTINGS, learner, logprobs_of, make_group, same, tiny_model, weights

from shoal.algorithms.losses import LossOutput, LossTokens
from shoal.errors import ConfigError, TrainingDiverged
from shoal.protocol import TrainingGroup
from shoal.trainer.learner import Learner
from shoal.trainer.samples import Prepared, Sample
from shoal.trainer.settings import ObjectiveSettings, TrainerSettings
from shoal.trainer.step import StepPlan, StepWork, train_samples, train_step

ONE = SETTINGS.model_copy(update={"minibatches": 1})
STILL = ONE.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0, "grad_clip": 1e9})


def aiming(settings: TrainerSettings = STILL, **objective: Any) -> TrainerSettings:
    return settings.model_copy(update={"objective": ObjectiveSettings(**objective)})


def work(groups: list[TrainingGroup], **changes: Any) -> StepWork:
    return replace(StepWork(0, groups, temperature=1.0, max_staleness=0), **changes)


@pytest.fixture(scope="module")
def groups() -> list[TrainingGroup]:
    behaviour = tiny_model(seed=5)
    return [make_group(unit, 0, behaviour) for unit in range(4)]


# -- the veto ----------------------------------------------------------------------------------------------------------


def test_a_veto_sees_each_updates_numbers_and_skips_it(groups) -> None:
    made, seen = learner(SETTINGS), []
    before = weights(made)
    metrics = train_step(made, work(groups), veto=lambda numbers: seen.append(dict(numbers)) or "no")
    assert same(before, weights(made))
    assert not made.optimizer.state
    assert metrics["skipped_updates"] == len(seen) == 2
    names = {"loss", "grad_norm", "entropy", "clip_fraction", "ratio_mean", "ratio_max", "effective_samples"}
    assert all(names <= numbers.keys() for numbers in seen)
    measured = {"mismatch", "mismatch_max", "mismatch_kl"}  # before anything was learnt, and only then
    assert measured <= seen[0].keys()
    assert not measured & seen[1].keys()
    assert metrics["grad_norm"] == pytest.approx(np.mean([numbers["grad_norm"] for numbers in seen]))


def test_only_the_vetoed_update_is_left_out(groups) -> None:
    answers = iter(["no", None])
    made = learner(SETTINGS)
    norms: list[float] = []
    metrics = train_step(made, work(groups), veto=lambda seen: norms.append(seen["grad_norm"]) or next(answers))
    assert metrics["skipped_updates"] == 1
    assert metrics["grad_norm"] == norms[1], "what was not made is no part of how far steps go"
    assert metrics["grad_norm_max"] == max(norms)
    assert {float(slots["step"]) for slots in made.optimizer.state.values()} == {1.0}
    free = learner(SETTINGS)
    assert train_step(free, work(groups))["skipped_updates"] == 0
    assert {float(slots["step"]) for slots in free.optimizer.state.values()} == {2.0}


def test_a_veto_may_skip_what_is_no_number_and_the_row_stays_finite(groups) -> None:
    made, seen = learner(ONE), []
    with torch.no_grad():
        made.model.lm_head.weight[5, 0] = math.inf
    before = weights(made)

    def refuse(numbers: Mapping[str, float]) -> str | None:
        seen.append(numbers["loss"])
        return None if math.isfinite(numbers["loss"]) else "not finite"

    metrics = train_step(made, work(groups), veto=refuse)
    assert same(before, weights(made))
    assert math.isnan(seen[0])
    assert metrics["skipped_updates"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    with pytest.raises(TrainingDiverged):
        train_step(made, work(groups), veto=lambda _numbers: None)


def test_the_rate_factor_multiplies_the_rate(groups) -> None:
    """A first AdamW step moves every weight by the rate, whatever the gradient's size."""
    moved = {}
    for factor in (1.0, 0.25):
        made = learner(ONE.model_copy(update={"weight_decay": 0.0, "learning_rate": 1e-3}))
        before = weights(made)
        metrics = train_step(made, work(groups, rate_factor=factor))
        assert metrics["learning_rate"] == 1e-3 * factor
        moved[factor] = float((weights(made)["lm_head.weight"] - before["lm_head.weight"]).abs().max())
    assert moved[0.25] == pytest.approx(moved[1.0] / 4, rel=1e-2)


# -- normalisation -----------------------------------------------------------------------------------------------------


def gradients(made: Learner, groups: list[TrainingGroup], **changes: Any) -> list[dict[str, torch.Tensor]]:
    seen: list[dict[str, torch.Tensor]] = []
    made.optimizer.register_step_pre_hook(
        lambda *_: seen.append({n: p.grad.clone() for n, p in made.trained().items()})
    )
    train_step(made, work(groups, **changes))
    return seen


@pytest.mark.parametrize("word", ["tokens", "samples", "constant"])
def test_normalisation_by_a_plain_loop(groups, word: str) -> None:
    """Each token's gradient by the formula, one sequence at a time; and in three minibatches the same on average."""
    model, rollouts = tiny_model(), [(group, each) for group in groups for each in group.rollouts]
    tokens = sum(len(each.token_ids) for _, each in rollouts)
    for group, each in rollouts:
        own = {"tokens": 1 / tokens, "samples": 1 / (len(rollouts) * len(each.token_ids)), "constant": 1 / (16 * 7)}
        ids = torch.tensor([[*group.prompt_ids, *each.token_ids]])
        logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
        logp = logits.log_softmax(-1)[range(len(each.token_ids)), each.token_ids]
        advantage = each.reward - np.mean([other.reward for other in group.rollouts])
        (-advantage * own[word] * logp.sum()).backward()
    settings = aiming(normalisation=word).model_copy(update={"loss": "plain"})
    (whole,) = gradients(learner(settings), groups, max_new_tokens=7)
    parts = gradients(learner(settings.model_copy(update={"minibatches": 3})), groups, max_new_tokens=7)
    for name, value in model.named_parameters():
        torch.testing.assert_close(whole[name], value.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(sum(part[name] for part in parts) / 3, value.grad, rtol=1e-4, atol=1e-7)


def test_a_constant_that_nobody_gave_is_refused(groups) -> None:
    with pytest.raises(ConfigError, match="no limit to completions"):
        train_step(learner(aiming(normalisation="constant")), work(groups))


# -- both log-probabilities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("asked", [{"loss": "decoupled"}, {"objective": ObjectiveSettings(ratio_base="recomputed")}])
def test_recomputed_logprobs_are_those_of_the_steps_beginning(groups, minibatches: int, asked) -> None:
    seen: list[LossTokens] = []

    def watching(tokens: LossTokens, _parameters: Any) -> LossOutput:
        seen.append(tokens)
        return LossOutput(-tokens.logprobs_N * tokens.advantages_N)

    settings = SETTINGS.model_copy(update={"minibatches": minibatches, "learning_rate": 0.05, **asked})
    metrics = train_step(replace(learner(settings), loss=watching), work(groups))
    found = torch.cat([tokens.recomputed_N for tokens in seen])
    start, expected = tiny_model(), []
    for group in groups:
        expected += [logprobs_of(start, group.prompt_ids, each.token_ids) for each in group.rollouts]
    flat = torch.from_numpy(np.concatenate(expected))
    torch.testing.assert_close(found.sort().values, flat.sort().values, rtol=0, atol=1e-5)
    moved = [float((tokens.logprobs_N - tokens.recomputed_N).detach().abs().max()) for tokens in seen]
    assert moved[0] == 0
    assert minibatches == 1 or min(moved[1:]) > 0.01  # later minibatches meet another policy
    behaviour = torch.from_numpy(np.concatenate([each.logprob_values for group in groups for each in group.rollouts]))
    assert metrics["mismatch"] == pytest.approx(float((flat - behaviour).abs().mean()), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(float((flat - behaviour).abs().max()), rel=1e-4)


def test_logprobs_are_not_recomputed_unless_asked_for(groups) -> None:
    seen: list[LossTokens] = []

    def watching(tokens: LossTokens, _parameters: Any) -> LossOutput:
        seen.append(tokens)
        return LossOutput(-tokens.logprobs_N * tokens.advantages_N)

    train_step(replace(learner(SETTINGS), loss=watching), work(groups))
    assert seen[-1].recomputed_N is None


def test_mismatch_and_effective_samples_by_hand() -> None:
    """Recorded with a quarter less log-probability: every ratio is e^¼, so that no sample is lost, and k3 is known."""
    model = tiny_model()
    prompt, tokens = np.array([5, 6, 7]), np.array([8, 9, 10, 11])
    recorded = logprobs_of(model, prompt, tokens)
    shift = np.array([0.25, 0.25, 0.25, 0.25], np.float32)
    apart = np.array([1.0, -1.0, 0.0, 0.0], np.float32)
    for gap, effective in ((shift, 1.0), (apart, None)):
        sample = Sample(prompt, tokens, recorded - gap, 1.0, np.ones(4, np.bool_))
        metrics = train_samples(learner(STILL), Prepared([[sample]], 0, 1, 0), StepPlan(0, 1.0))
        ratio = np.exp(gap.astype(float))
        assert metrics["mismatch"] == pytest.approx(np.abs(gap).mean(), abs=1e-5)
        assert metrics["mismatch_max"] == pytest.approx(np.abs(gap).max(), abs=1e-5)
        assert metrics["mismatch_kl"] == pytest.approx((ratio - 1 - gap).mean(), abs=1e-5)
        expected = effective or ratio.sum() ** 2 / (4 * (ratio**2).sum())
        assert metrics["effective_samples"] == pytest.approx(expected, abs=1e-5)


# -- demonstrations, terms, samples without tokens ---------------------------------------------------------------------


def demonstration(drawn: list[bool]) -> Sample:
    count = len(drawn)
    return Sample(np.array([4]), np.arange(3, 3 + count), np.zeros(count, np.float32), 1.0, np.array(drawn))


def test_demonstrations_are_learnt_and_say_nothing_of_a_mismatch() -> None:
    made = learner(ONE.model_copy(update={"loss": "cross_entropy", "learning_rate": 0.01}))
    prepared = Prepared([[demonstration([True] * 6)], [demonstration([False, True, True])]], 0, 2, 0)
    rows = [train_samples(made, prepared, StepPlan(step, 1.0, recorded=False)) for step in range(5)]
    assert rows[0]["loss"] == pytest.approx(math.log(96), abs=0.2)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert rows[0]["tokens"] == 8
    assert not {"mismatch", "mismatch_kl", "effective_samples"} & rows[0].keys()


def test_samples_without_a_token_to_learn_from_change_nothing() -> None:
    made = learner(SETTINGS)
    before = weights(made)
    metrics = train_samples(made, Prepared([[demonstration([False, False])]], 0, 1, 0), StepPlan(0, 1.0))
    assert same(before, weights(made))
    assert metrics["tokens"] == 0
    # Beside others they form no minibatch of their own, which weight decay and momentum would move alone.
    mixed = Prepared([[demonstration([False])], [demonstration([True])]], 0, 2, 0)
    train_samples(made, mixed, StepPlan(0, 1.0))
    assert {float(slots["step"]) for slots in made.optimizer.state.values()} == {1.0}


def test_the_kl_term_pulls_towards_the_policy_that_training_began_with(groups) -> None:
    """No advantage at all: without the term nothing moves, with it the learner goes back where it came from."""
    start = tiny_model()
    flat = replace(learner(aiming(ONE, kl=1.0)), loss=lambda tokens, _p: LossOutput(tokens.logprobs_N * 0))
    with torch.no_grad():
        flat.model.lm_head.weight += 0.3 * torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    rows = [train_step(flat, work(groups, step=step, max_staleness=99)) for step in range(8)]
    assert rows[0]["reference_kl"] > 0.05
    assert rows[-1]["reference_kl"] < 0.9 * rows[0]["reference_kl"]
    assert same(dict(start.named_parameters()), dict(flat.reference.named_parameters()))  # the reference stays
    assert learner(ONE).reference is None


def test_the_entropy_term_raises_entropy(groups) -> None:
    made = replace(learner(aiming(ONE, entropy=1.0)), loss=lambda tokens, _p: LossOutput(tokens.logprobs_N * 0))
    with torch.no_grad():
        made.model.lm_head.weight *= 20
    rows = [train_step(made, work(groups, step=step, max_staleness=99)) for step in range(4)]
    assert rows[-1]["entropy"] > rows[0]["entropy"] + 0.01
