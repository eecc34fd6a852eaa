"""One training step: against a plain loop, against its own splits, and against bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from trainer_stubs import SETTINGS, learner, make_group, same, tiny_model, weights

from shoal.algorithms.losses import LossOutput
from shoal.errors import ConfigError, ProtocolError, TrainingDiverged
from shoal.protocol import TrainingGroup, TrainingRollout, pack_logprobs, pack_tokens
from shoal.trainer.learner import Learner, choose_device, learning_rate
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, Stopped, train_step

STILL = SETTINGS.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0, "grad_clip": 1e9})


def work(groups: list[TrainingGroup], step: int = 0, **changes: object) -> StepWork:
    return replace(StepWork(step, groups, temperature=1.0, max_staleness=0), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def groups() -> list[TrainingGroup]:
    behaviour = tiny_model(seed=5)  # not the model that is trained: ratios differ from 1
    return [make_group(unit, 0, behaviour) for unit in range(4)]


def gradients_of(settings: TrainerSettings, groups: list[TrainingGroup], **changes: object) -> list[dict]:
    """The gradient of every optimizer step, seen at the optimizer."""
    made, seen = learner(settings), []
    named = list(made.model.named_parameters())
    made.optimizer.register_step_pre_hook(lambda *_: seen.append({n: p.grad.clone() for n, p in named}))
    train_step(made, work(groups, **changes))
    return seen


def plain_gradient(groups: list[TrainingGroup], temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """The same by a loop that anyone can check: one sequence at a time, full logits, the formula written out."""
    model = tiny_model()
    count = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    for group in groups:
        mean = sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
        for rollout in group.rollouts:
            ids = torch.tensor([[*group.prompt_ids, *rollout.token_ids]])
            logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1] / temperature
            logp = logits.log_softmax(-1)[range(len(rollout.token_ids)), rollout.token_ids]
            r, a = (logp - torch.from_numpy(rollout.logprob_values)).exp(), rollout.reward - mean
            objective = torch.minimum(r.clamp(max=4.0) * a, r.clamp(0.8, 1.2) * a)
            (-objective.sum() / count).backward()
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_a_plain_loop(groups, temperature: float) -> None:
    (seen,) = gradients_of(STILL.model_copy(update={"minibatches": 1}), groups, temperature=temperature)
    for name, expected in plain_gradient(groups, temperature).items():
        torch.testing.assert_close(seen[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("budget", [1, 12, 25])
def test_the_split_into_micro_batches_does_not_change_the_gradient(groups, budget: int) -> None:
    whole = gradients_of(STILL, groups)
    split = gradients_of(STILL.model_copy(update={"micro_batch_tokens": budget}), groups)
    assert len(whole) == len(split) == 2
    for left, right in zip(whole, split, strict=True):
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-7)


def test_every_token_of_a_step_weighs_the_same_in_whatever_minibatch(groups) -> None:
    (whole,) = gradients_of(STILL.model_copy(update={"minibatches": 1}), groups)
    parts = gradients_of(STILL.model_copy(update={"minibatches": 3}), groups)
    for name, expected in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts) / 3, expected, rtol=1e-4, atol=1e-7)


def test_an_update_is_adamw_on_the_clipped_gradient(groups) -> None:
    settings = SETTINGS.model_copy(update={"minibatches": 1, "grad_clip": 0.01})
    made = learner(settings)
    metrics = train_step(made, work(groups))
    reference = tiny_model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    gradient = plain_gradient(groups)
    norm = math.sqrt(sum(float(value.double().pow(2).sum()) for value in gradient.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, value in reference.named_parameters():
        value.grad = gradient[name] * 0.01 / norm
    optimizer.step()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(dict(made.model.named_parameters())[name], value, rtol=1e-3, atol=2e-5)


def test_the_same_work_gives_the_same_weights_bit_for_bit(groups) -> None:
    left, right = learner(), learner()
    assert train_step(left, work(groups)) == train_step(right, work(groups))
    assert same(weights(left), weights(right))
    other = learner()
    train_step(other, work(groups, seed=1))
    assert not same(weights(left), weights(other))


def test_metrics_by_hand() -> None:
    model = tiny_model()
    groups = [make_group(0, 3, model, [1.0, 0.0]), make_group(1, 2, model, [0.5, 0.5], ["length", "eos"])]
    metrics = train_step(learner(), work(groups, step=3, max_staleness=1))
    assert metrics["reward_mean"] == 0.5
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.125))
    assert (metrics["groups"], metrics["dropped_groups"]) == (1, 1)
    assert metrics["truncated_fraction"] == 0.25
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (0.5, 1)
    assert (metrics["staleness_0"], metrics["staleness_1"]) == (0.5, 0.5)
    assert metrics["tokens"] == sum(len(rollout.token_ids) for rollout in groups[0].rollouts)
    # on policy, before any update: ratio 1, no mismatch, nothing clipped
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert 0 < metrics["entropy"] <= math.log(96) + 1e-3
    assert metrics["learning_rate"] == SETTINGS.learning_rate
    assert metrics["grad_norm_max"] >= metrics["grad_norm"] > 0


def test_the_mismatch_is_measured_before_the_first_update(groups) -> None:
    model = tiny_model()
    shifted = [
        TrainingGroup(g.unit, g.task, 0, g.prompt, [_shifted(rollout, 0.25) for rollout in g.rollouts])
        for g in [make_group(unit, 0, model) for unit in range(4)]
    ]
    settings = SETTINGS.model_copy(update={"minibatches": 4, "learning_rate": 0.05})
    assert train_step(learner(settings), work(shifted))["mismatch"] == pytest.approx(0.25, abs=1e-4)


def _shifted(rollout: TrainingRollout, by: float) -> TrainingRollout:
    return TrainingRollout(rollout.tokens, pack_logprobs(rollout.logprob_values - by), rollout.finish, rollout.reward)


def test_a_step_without_signal_changes_nothing_and_says_so() -> None:
    made = learner()
    before = weights(made)
    metrics = train_step(made, work([make_group(0, 0, made.model, [1.0, 1.0])]))
    assert same(before, weights(made))  # not even by weight decay
    assert (metrics["tokens"], metrics["groups"], metrics["dropped_groups"]) == (0, 0, 1)
    assert train_step(made, work([]))["tokens"] == 0


def test_truncated_samples_are_masked_but_stay_in_the_groups_mean() -> None:
    model = tiny_model()
    group = make_group(0, 0, model, [1.0, 0.0, 0.0], ["eos", "length", "eos"])
    settings = STILL.model_copy(update={"mask_truncated": True, "minibatches": 1})
    masked = train_step(learner(settings), work([group]))
    unmasked = train_step(learner(STILL.model_copy(update={"mask_truncated": False})), work([group]))
    lengths = [len(rollout.token_ids) for rollout in group.rollouts]
    assert unmasked["tokens"] == sum(lengths)
    assert masked["tokens"] == lengths[0] + lengths[2]
    assert masked["truncated_fraction"] == unmasked["truncated_fraction"] == pytest.approx(1 / 3)
    # on policy each token's loss is −A: 2/3 for the first, −1/3 for the third
    expected = (-2 / 3 * lengths[0] + 1 / 3 * lengths[2]) / (lengths[0] + lengths[2])
    assert masked["loss"] == pytest.approx(expected, abs=1e-5)


def test_weights_that_are_no_numbers_are_refused_before_any_update() -> None:
    made = learner(SETTINGS.model_copy(update={"minibatches": 1}))
    group = make_group(0, 0, made.model)
    with torch.no_grad():
        made.model.lm_head.weight[5, 0] = math.inf
    before = weights(made)
    with pytest.raises(TrainingDiverged, match=r"step 0 diverged: loss nan, gradient norm"):
        train_step(made, work([group]))
    assert same(before, weights(made))
    assert not made.optimizer.state


def test_a_step_can_be_stopped_between_micro_batches(groups) -> None:
    made = learner(SETTINGS.model_copy(update={"micro_batch_tokens": 1, "minibatches": 1}))
    before, calls = weights(made), iter([False, False, True])
    with pytest.raises(Stopped):
        train_step(made, work(groups), lambda: next(calls))
    assert same(before, weights(made))


def test_tokens_and_logprobs_of_different_length_are_refused() -> None:
    made = learner()
    group = make_group(0, 0, made.model)
    broken = TrainingRollout(group.rollouts[0].tokens, pack_logprobs([0.0] * 9), "eos", 1.0)
    with pytest.raises(ProtocolError, match="9 logprobs"):
        train_step(made, work([TrainingGroup(3, "t", 0, group.prompt, [broken, *group.rollouts[1:]])]))


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [1.0, 1.0]])
@pytest.mark.parametrize("where", ["prompt", "completion", "empty prompt"])
def test_tokens_that_the_policy_does_not_have_are_refused_in_words(rewards: list[float], where: str) -> None:
    """Also in a group without signal, which only the closing look would compute."""
    made, group = learner(), make_group(7, 0, tiny_model(), rewards)
    foreign = pack_tokens([3, 4_000_000_000])
    if where == "completion":
        rollout = msgspec.structs.replace(group.rollouts[0], tokens=foreign, logprobs=pack_logprobs([-1.0, -1.0]))
        group = msgspec.structs.replace(group, rollouts=[rollout, group.rollouts[1]])
    else:
        group = msgspec.structs.replace(group, prompt=foreign if where == "prompt" else b"")
    said = "unit 7 has an empty prompt" if where == "empty prompt" else "unit 7 holds token 4000000000; the policy"
    with pytest.raises(ProtocolError, match=said):
        train_step(made, StepWork(0, [group], 1.0, 0))


def test_the_step_knows_no_algorithm(groups) -> None:
    """A loss that nobody has heard of is trained with, and its numbers are reported under its own names."""

    def odd(tokens, parameters) -> LossOutput:
        return LossOutput(tokens.logprobs_N * 0 + 3.0, {"odd": tokens.advantages_N * 0 + 7.0}, {})

    made: Learner = replace(learner(), loss=odd)
    metrics = train_step(made, work(groups))
    assert (metrics["odd"], metrics["loss"]) == (7.0, 3.0)
    assert "ratio_mean" not in metrics


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    settings = SETTINGS.model_copy(update={"learning_rate": 8.0, "warmup_steps": 4})
    one = settings.model_copy(update={"minibatches": 1})
    assert [learning_rate(one, step) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert learning_rate(settings.model_copy(update={"warmup_steps": 0}), 0) == 8.0


def test_a_missing_gpu_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        choose_device("cuda")
