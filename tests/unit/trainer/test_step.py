"""One training step: against a plain loop, its own splits, bad input; every word of the recipe; tool tokens."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trainer_stubs
from trainer_stubs import SETTINGS, learner, logprobs_of, make_group, same, tiny_model, weights

from shoal.algorithms.losses import LossOutput, LossTokens
from shoal.algorithms.registry import LOSSES
from shoal.errors import ConfigError, ProtocolError, TrainingDiverged
from shoal.protocol import TrainingGroup, TrainingRollout, drawn_mask, pack_logprobs, pack_spans, pack_tokens
from shoal.trainer.learner import choose_device, learning_rate
from shoal.trainer.samples import Prepared, Sample
from shoal.trainer.settings import ObjectiveSettings, TrainerSettings
from shoal.trainer.step import StepWork, Stopped, train_samples, train_step

STILL = SETTINGS.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0, "grad_clip": 1e9})
ONE = SETTINGS.model_copy(update={"minibatches": 1})
FIXED = STILL.model_copy(update={"minibatches": 1})


def work(groups: list[TrainingGroup], step: int = 0, **changes: object) -> StepWork:
    return replace(StepWork(step, groups, temperature=1.0, max_staleness=0), **changes)  # type: ignore[arg-type]


def gradients(settings: TrainerSettings, groups: list[TrainingGroup], **changes: object) -> list[dict]:
    return trainer_stubs.gradients(learner(settings), work(groups, **changes))[0]


def plain_gradient(groups: list[TrainingGroup], temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """The same by a loop that anyone can check: one sequence at a time, full logits, the formula written out. Tokens
    that were given are in the context only."""
    model = tiny_model()
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    drawn = [drawn_mask(rollout.given, len(rollout.token_ids)) for _, rollout in rollouts]
    for (group, rollout), mask in zip(rollouts, drawn, strict=True):
        a = rollout.reward - sum(each.reward for each in group.rollouts) / len(group.rollouts)
        ids = torch.tensor([[*group.prompt_ids, *rollout.token_ids]])
        logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1] / temperature
        logp = logits.log_softmax(-1)[range(len(rollout.token_ids)), rollout.token_ids]
        r = (logp - torch.from_numpy(rollout.logprob_values)).exp()[mask]
        objective = torch.minimum(r.clamp(max=4.0) * a, r.clamp(0.8, 1.2) * a)
        (-objective.sum() / sum(each.sum() for each in drawn)).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, expected in right.items():
        torch.testing.assert_close(left[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("budget", [1, 12, 25, 16_384])
def test_the_gradient_is_that_of_a_plain_loop_however_it_is_split_into_micro_batches(groups, dialogues, budget) -> None:
    cut = {"micro_batch_tokens": budget}
    for given, temperature in ((groups, 1.0), (groups, 0.7), (dialogues, 1.0)):
        (seen,) = gradients(FIXED.model_copy(update=cut), given, temperature=temperature)
        close(seen, plain_gradient(given, temperature))
    whole, split = gradients(STILL, groups), gradients(STILL.model_copy(update=cut), groups)
    assert len(whole) == len(split) == 2
    for left, right in zip(whole, split, strict=True):
        close(left, right)


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
    groups = [make_group(0, 3, tiny_model(), [1.0, 0.0]), make_group(1, 2, tiny_model(), [0.5, 0.5], ["length", "eos"])]
    metrics = train_step(learner(), work(groups, step=3, max_staleness=1))
    expected = {
        "reward_mean": 0.5, "reward_std": math.sqrt(0.125), "groups": 1, "dropped_groups": 1,
        "truncated_fraction": 0.25, "staleness_mean": 0.5, "staleness_max": 1, "staleness_0": 0.5, "staleness_1": 0.5,
        "tokens": sum(len(rollout.token_ids) for rollout in groups[0].rollouts), "clip_fraction": 0.0,
        # on policy, before any update: ratio 1, no mismatch, nothing clipped
        "ratio_mean": 1.0, "ratio_max": 1.0, "mismatch": 0.0, "learning_rate": SETTINGS.learning_rate,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert 0 < metrics["entropy"] <= math.log(96) + 1e-3
    assert metrics["grad_norm_max"] >= metrics["grad_norm"] > 0


def test_a_step_without_signal_changes_nothing_and_says_so() -> None:
    made = learner()
    before = weights(made)
    metrics = train_step(made, work([make_group(0, 0, made.model, [1.0, 1.0])]))
    assert (metrics["tokens"], metrics["groups"], metrics["dropped_groups"]) == (0, 0, 1)
    assert train_step(made, work([]))["tokens"] == 0
    nothing = Prepared([[demonstration([False, False])]], 0, 1, 0)
    assert train_samples(made, nothing, StepWork(0))["tokens"] == 0
    assert same(before, weights(made))  # not even by weight decay
    # Beside others they form no minibatch of their own, which weight decay and momentum would move alone.
    train_samples(made, Prepared([[demonstration([False])], [demonstration([True])]], 0, 2, 0), StepWork(0))
    assert {float(slots["step"]) for slots in made.optimizer.state.values()} == {1.0}


def test_weights_that_are_infinite_are_refused_before_any_update() -> None:
    made = learner(ONE)
    group = make_group(0, 0, made.model)
    with torch.no_grad():
        made.model.lm_head.weight[5, 0] = math.inf
    before = weights(made)
    with pytest.raises(TrainingDiverged, match=r"step 0 diverged \(loss nan, gradient norm"):
        train_step(made, work([group]))
    assert same(before, weights(made))
    assert not made.optimizer.state
    metrics = train_step(made, work([group]), veto=lambda seen: None if math.isfinite(seen["loss"]) else "not finite")
    assert metrics["skipped_updates"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_can_be_stopped_between_micro_batches(groups) -> None:
    made = learner(SETTINGS.model_copy(update={"micro_batch_tokens": 1, "minibatches": 1}))
    before, calls = weights(made), iter([False, False, True])
    with pytest.raises(Stopped):
        train_step(made, work(groups), lambda: next(calls))
    assert same(before, weights(made))


FOREIGN = pack_tokens([3, 4_000_000_000])


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [1.0, 1.0]])
@pytest.mark.parametrize(("of_group", "of_rollout", "said"), [
    ({"prompt": FOREIGN}, {}, "unit 7 holds token 4000000000; the policy"),
    ({}, {"tokens": FOREIGN, "logprobs": pack_logprobs([-1.0, -1.0])}, "unit 7 holds token 4000000000; the policy"),
    ({"prompt": b""}, {}, "unit 7 has an empty prompt"),
    ({}, {"logprobs": pack_logprobs([0.0] * 9)}, "unit 7: a rollout has . tokens but 9 logprobs"),
    ({}, {"given": pack_spans([(8, 9)])}, "unit 7: the spans of a rollout cannot be read"),
])  # fmt: skip
def test_invalid_batches_are_refused_with_a_reason(rewards, of_group, of_rollout, said: str) -> None:
    """Tokens also in a group without signal, which only the closing look would compute."""
    group = make_group(7, 0, tiny_model(), rewards)
    first = msgspec.structs.replace(group.rollouts[0], **of_rollout)
    group = msgspec.structs.replace(group, rollouts=[first, group.rollouts[1]], **of_group)
    refused = said.startswith("unit 7 h") or rewards[1] == 0
    with pytest.raises(ProtocolError, match=said) if refused else nullcontext():
        train_step(learner(), work([group]))


def test_the_step_knows_no_algorithm(groups) -> None:
    """A loss that nobody has heard of is trained with, and its numbers are reported under its own names."""

    odd = {"loss": lambda of, _: LossOutput(of.logprobs_N * 0 + 3.0, {"odd": of.advantages_N * 0 + 7.0}, {})}
    metrics = train_step(replace(learner(), **odd), work(groups))
    assert (metrics["odd"], metrics["loss"]) == (7.0, 3.0)
    assert "ratio_mean" not in metrics


def test_the_learning_rate_is_a_function_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ONE.model_copy(update={"learning_rate": 8.0, "warmup_steps": 4})
    assert [learning_rate(one, step) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert learning_rate(one.model_copy(update={"warmup_steps": 0}), 0) == 8.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        choose_device("cuda")


def aiming(settings: TrainerSettings = FIXED, **objective: Any) -> TrainerSettings:
    return settings.model_copy(update={"objective": ObjectiveSettings(**objective)})


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
    assert [measured & numbers.keys() for numbers in seen] == [measured, set()]
    assert metrics["grad_norm"] == pytest.approx(np.mean([numbers["grad_norm"] for numbers in seen]))
    norms: list[float] = []

    def first_only(numbers: Any) -> str | None:
        norms.append(numbers["grad_norm"])
        return "no" if len(norms) == 1 else None

    metrics = train_step(made, work(groups), veto=first_only)
    assert metrics["skipped_updates"] == 1
    assert metrics["grad_norm"] == norms[1], "what was not made is no part of how far steps go"
    assert metrics["grad_norm_max"] == max(norms)
    assert {float(slots["step"]) for slots in made.optimizer.state.values()} == {1.0}


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
    (whole,) = gradients(settings, groups, max_new_tokens=7)
    parts = gradients(settings.model_copy(update={"minibatches": 3}), groups, max_new_tokens=7)
    for name, value in model.named_parameters():
        torch.testing.assert_close(whole[name], value.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(sum(part[name] for part in parts) / 3, value.grad, rtol=1e-4, atol=1e-7)


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
    train_step(replace(learner(), loss=watching), work(groups))
    assert seen[-1].recomputed_N is None, "nobody has asked for them"
    assert minibatches == 1 or min(moved[1:]) > 0.01  # later minibatches meet another policy
    behaviour = torch.from_numpy(np.concatenate([each.logprob_values for group in groups for each in group.rollouts]))
    assert metrics["mismatch"] == pytest.approx(float((flat - behaviour).abs().mean()), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(float((flat - behaviour).abs().max()), rel=1e-4)


def test_mismatch_and_effective_samples_by_hand() -> None:
    """Recorded with a quarter less log-probability: every ratio is e^¼, so that no sample is lost, and k3 is known."""
    model = tiny_model()
    prompt, tokens = np.array([5, 6, 7]), np.array([8, 9, 10, 11])
    recorded = logprobs_of(model, prompt, tokens)
    shift = np.array([0.25, 0.25, 0.25, 0.25], np.float32)
    apart = np.array([1.0, -1.0, 0.0, 0.0], np.float32)
    for gap, effective in ((shift, 1.0), (apart, None)):
        sample = Sample(prompt, tokens, recorded - gap, 1.0, np.ones(4, np.bool_))
        metrics = train_samples(learner(FIXED), Prepared([[sample]], 0, 1, 0), StepWork(0))
        ratio = np.exp(gap.astype(float))
        assert metrics["mismatch"] == pytest.approx(np.abs(gap).mean(), abs=1e-5)
        assert metrics["mismatch_max"] == pytest.approx(np.abs(gap).max(), abs=1e-5)
        assert metrics["mismatch_kl"] == pytest.approx((ratio - 1 - gap).mean(), abs=1e-5)
        expected = effective or ratio.sum() ** 2 / (4 * (ratio**2).sum())
        assert metrics["effective_samples"] == pytest.approx(expected, abs=1e-5)


def demonstration(drawn: list[bool]) -> Sample:
    count = len(drawn)
    return Sample(np.array([4]), np.arange(3, 3 + count), np.zeros(count, np.float32), 1.0, np.array(drawn))


def pulled(groups: list[TrainingGroup], steps: int, spoil: Callable[[torch.Tensor], Any], **objective: Any) -> Any:
    """A learner of no advantage at all, whose head is spoilt: only the terms move it. And the rows of its steps."""
    made = replace(learner(aiming(ONE, **objective)), loss=lambda tokens, _p: LossOutput(tokens.logprobs_N * 0))
    with torch.no_grad():
        spoil(made.model.lm_head.weight)
    return made, [train_step(made, work(groups, step=step, max_staleness=99)) for step in range(steps)]


def test_the_kl_term_pulls_towards_the_policy_that_training_began_with_and_the_entropy_term_raises_it(groups) -> None:
    shift = 0.3 * torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    held, rows = pulled(groups, 8, lambda weight: weight.add_(shift), kl=1.0)
    assert rows[0]["reference_kl"] > 0.05
    assert rows[-1]["reference_kl"] < 0.9 * rows[0]["reference_kl"]
    assert same(dict(tiny_model().named_parameters()), dict(held.reference.named_parameters()))  # the reference stays
    free, rows = pulled(groups, 4, lambda weight: weight.mul_(20), entropy=1.0)
    assert rows[-1]["entropy"] > rows[0]["entropy"] + 0.01
    assert free.reference is None


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"plain", "cross_entropy"}))
def test_off_policy_every_loss_trains_and_reports(loss: str) -> None:
    """Four optimizer steps at a high rate: the later ones are no longer on policy."""
    made = learner(trainer_stubs.changed(loss=loss, minibatches=4, learning_rate=0.02))
    groups = [make_group(unit, 0, tiny_model()) for unit in range(3)]
    assert train_step(made, work(groups, max_new_tokens=6))["ratio_max"] > 1.01
    assert all(torch.isfinite(value).all() for value in weights(made).values())


SPANS = ([(2, 3)], [(1, 2), (5, 3)], [], [(4, 1)])


def dialogue_group(unit: int, behaviour: Any) -> TrainingGroup:
    random = np.random.default_rng(unit)
    prompt = random.integers(3, 90, size=4)
    rollouts = []
    for spans, reward in zip(SPANS, (1.0, 0.0, 0.5, 0.0), strict=True):
        tokens = random.integers(3, 90, size=10)
        logprobs = logprobs_of(behaviour, prompt, tokens)
        given = pack_spans(spans)
        logprobs = np.where(drawn_mask(given, 10), logprobs, 0.0)
        rollouts.append(TrainingRollout(pack_tokens(tokens), pack_logprobs(logprobs), "eos", reward, given))
    return TrainingGroup(unit, f"task/{unit}", 0, pack_tokens(prompt), rollouts)


@pytest.fixture(scope="module")
def dialogues() -> list[TrainingGroup]:
    behaviour = tiny_model(seed=5)  # not the model that is trained: ratios differ from 1
    return [dialogue_group(unit, behaviour) for unit in range(2)]


def test_logprob_of_a_tool_token_is_ignored_but_the_token_counts(dialogues: list[TrainingGroup]) -> None:
    """Its log-probability, then and now, has no influence; that the model reads it has."""

    def with_first(**changes: Any) -> list[TrainingGroup]:
        first = msgspec.structs.replace(dialogues[0].rollouts[0], **changes)
        return [msgspec.structs.replace(dialogues[0], rollouts=[first, *dialogues[0].rollouts[1:]]), dialogues[1]]

    rollout = dialogues[0].rollouts[0]
    logprobs, tokens = rollout.logprob_values, rollout.token_ids
    logprobs[2:5] = -7.0
    (before,), (after,) = gradients(FIXED, dialogues), gradients(FIXED, with_first(logprobs=pack_logprobs(logprobs)))
    assert same(before, after)
    tokens[3] = (tokens[3] + 1) % 90
    assert train_step(learner(FIXED), work(dialogues))["tokens"] == 2 * (40 - 3 - 5 - 1), "only drawn ones are counted"
    (other,) = gradients(FIXED, with_first(tokens=pack_tokens(tokens)))
    assert not same(before, other)
    (unmasked,) = gradients(FIXED, with_first(given=b""))
    assert not all(torch.allclose(before[name], unmasked[name], rtol=1e-3) for name in before)
