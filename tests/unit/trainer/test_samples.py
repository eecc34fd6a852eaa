"""From groups to samples: what is trained on, and that whatever is left out is counted. From samples to micro-batches,
packed and padded, and shares of several processes: the same gradient, whoever computes it together."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_stubs import SETTINGS, gradients, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shoal.algorithms.advantages import OwnAdvantage, RolloutGroup
from shoal.algorithms.registry import ADVANTAGES
from shoal.errors import ProtocolError
from shoal.hub.state.audits import has_equal_rewards
from shoal.models.packed import supports_packing
from shoal.protocol import RolloutReward, TrainingGroup, TrainingRollout, pack_logprobs, pack_spans, pack_tokens
from shoal.trainer.learner import Learner, cost_of, new_learner
from shoal.trainer.ranks import Ranks
from shoal.trainer.samples import Prepared, check_groups, prepare, score, to_tensors
from shoal.trainer.settings import MemorySettings, ObjectiveSettings
from shoal.trainer.step import DUMMY, StepWork, train_step


def rollout(
    reward: float, *, tokens: int = 3, finish: str = "eos", logprobs: list[float] | None = None, given: bytes = b""
) -> TrainingRollout:
    recorded = [-0.5] * tokens if logprobs is None else logprobs
    return TrainingRollout(pack_tokens(np.arange(3, 3 + tokens)), pack_logprobs(recorded), finish, reward, given)


def group(*rollouts: TrainingRollout, unit: int = 0, version: int = 0) -> TrainingGroup:
    return TrainingGroup(unit, f"task-{unit}", version, pack_tokens(np.array([7, 8])), list(rollouts))


def of(*groups: TrainingGroup, advantage: str = "group_mean", mask_truncated: bool = False) -> Prepared:
    return prepare(groups, ADVANTAGES[advantage], mask_truncated)


def test_samples_carry_the_advantages_of_their_rollouts() -> None:
    made = of(group(rollout(1.0, tokens=2), rollout(0.0, tokens=5)), group(rollout(0.5), rollout(0.0), unit=1))
    assert [[sample.advantage for sample in samples] for samples in made.groups] == [[0.5, -0.5], [0.25, -0.25]]
    assert (made.tokens, sum(map(len, made.groups)), made.rollouts) == (13, 4, 4)
    assert (made.without_signal, made.truncated, made.unscored) == (0, 0, 0)
    empty = of(group(rollout(1.0, tokens=0), rollout(0.0)))
    assert [[sample.advantage for sample in samples] for samples in empty.groups] == [[-0.5]], "no completion"
    large = of(group(rollout(43691.4765625), rollout(43691.4765625), rollout(43691.48)), advantage="group_mean_std")
    found = [sample.advantage for sample in large.groups[0]]
    assert found == pytest.approx([-0.7069, -0.7069, 1.4138], abs=1e-3), "not rounded into advantages"


def test_an_own_advantage_sees_rewards_lengths_tokens_finishes_and_columns_and_equal_rewards() -> None:
    seen: list[RolloutGroup] = []

    def shorter(group: RolloutGroup) -> Tensor:
        seen.append(group)
        return (group.lengths.max() - group.lengths) * group.columns["weight"]

    equal = group(rollout(1.0, tokens=4, given=pack_spans([(1, 2)])), rollout(1.0, tokens=3, finish="length"))
    made = prepare([msgspec.structs.replace(equal, columns={"weight": 0.5})], OwnAdvantage(shorter), False)
    assert [[sample.advantage for sample in samples] for samples in made.groups] == [[0.5, 0.0]]
    assert (seen[0].lengths.tolist(), seen[0].finishes, seen[0].task) == ([2, 3], ["eos", "length"], "task-0")
    assert [ids.tolist() for ids in seen[0].tokens] == [[3, 4, 5, 6], [3, 4, 5]]
    assert seen[0].drawn[0].tolist() == [True, False, False, True]
    assert prepare([group(rollout(1.0), rollout(math.nan))], OwnAdvantage(shorter), False).groups == []
    with pytest.raises(ValueError, match="not one finite number for each of 2 rollouts"):
        prepare([equal], OwnAdvantage(lambda _group: [math.inf, 0.0]), False)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1.0])
def test_a_group_with_a_reward_that_is_nan_or_infinite_or_with_equal_ones_is_counted(reward: float) -> None:
    made = of(group(rollout(1.0), rollout(reward)), group(rollout(1.0), rollout(0.0), unit=1))
    assert (len(made.groups), made.without_signal, made.unscored) == (1, 1, int(reward != 1.0))


def test_a_rollout_whose_log_probability_is_nan_is_unscored_and_counted() -> None:
    broken = rollout(1.0, logprobs=[-0.5, math.nan, -0.5])
    made = of(group(broken, rollout(0.0), rollout(0.0)))
    # its reward is a real outcome, and stays in the mean
    assert [sample.advantage for sample in made.groups[0]] == pytest.approx([-1 / 3, -1 / 3])
    assert (made.unscored, made.without_signal, sum(map(len, made.groups))) == (1, 0, 2)
    assert of(group(broken, rollout(0.0, logprobs=[-math.inf] * 3))).unscored == 2


def test_a_group_that_the_advantage_makes_nothing_of_does_not_dilute_the_step() -> None:
    failures = group(rollout(-0.25), rollout(-0.5))  # nobody solved it; only their lengths differ
    assert of(failures, advantage="max_rl").without_signal == 1
    assert of(failures, advantage="group_mean").without_signal == 0


@pytest.mark.parametrize(("parts", "values", "dropped"), [
    ([{"task": 1.0, "judge.style": 0.4}, {"task": 1.0, "judge.style": 0.2}], (0.9, 0.7), False),
    ([{"task": 1.0, "length": -0.1}, {"task": 0.0, "length": -0.2}], (0.9, -0.2), False),
    ([{"task": 1.0, "length": -0.1}, {"task": 1.0, "length": -0.3}], (0.9, 0.7), True),  # never comes here
])  # fmt: skip
def test_all_groups_with_different_rewards_are_trained_on(parts, values, dropped: bool) -> None:
    """Also where only a judge makes the difference: its rule for task rewards is not applied a second time."""
    rewards = [RolloutReward(value=value, parts=part) for value, part in zip(values, parts, strict=True)]
    assert has_equal_rewards(rewards) == dropped
    assert sum(map(len, of(group(*map(rollout, values))).groups)) == 2


def test_truncated_samples_are_masked_if_so_wanted_and_always_counted() -> None:
    cut = group(rollout(1.0), rollout(0.0, finish="length"), rollout(0.5))
    assert (sum(map(len, of(cut).groups)), of(cut).truncated) == (3, 1)
    masked = of(cut, mask_truncated=True)
    assert [sample.advantage for sample in masked.groups[0]] == [0.5, 0.0]  # the mean is still over all three
    assert (masked.truncated, masked.without_signal) == (1, 0)
    wholly = of(group(rollout(1.0, finish="length"), rollout(0.0, finish="length")), mask_truncated=True)
    assert (wholly.groups, wholly.without_signal, wholly.truncated) == ([], 1, 2)


@pytest.mark.parametrize(("version", "fits"), [(2, False), (3, True), (5, True), (6, False)])
def test_groups_that_are_too_old_or_not_yet_possible_are_refused(version: int, fits: bool) -> None:
    groups = [group(rollout(1.0), rollout(0.0), unit=9, version=version)]
    if fits:
        check_groups(groups, 5, 2, 90)
    else:
        with pytest.raises(ProtocolError, match=f"unit 9 of version {version}, outside versions 3…5"):
            check_groups(groups, 5, 2, 90)


STILL = SETTINGS.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0, "grad_clip": 1e9, "minibatches": 1})


def llama() -> Any:
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def gpt2() -> Any:
    """Learned positions: a token at the wrong one gets another gradient."""
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="sdpa")
    return GPT2LMHeadModel(config)


MODELS = {"qwen3": tiny_model, "tied": lambda: tiny_model(tie_word_embeddings=True), "llama": llama, "gpt2": gpt2}


def model_called(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def gradient(made: Learner, groups: list[TrainingGroup]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What the (only) optimizer step of a training step sees."""
    (only,), metrics = gradients(made, StepWork(0, groups, temperature=0.8, max_staleness=0))
    return only, metrics


@pytest.mark.parametrize(
    ("name", "budget"), [("qwen3", 16_384), ("qwen3", 24), ("tied", 24), ("llama", 24), ("gpt2", 16_384)]
)
def test_packed_and_padded_rows_give_the_same_gradient(groups, name: str, budget: int) -> None:
    settings = STILL.model_copy(update={"micro_batch_tokens": budget})
    packed = new_learner(model_called(name), settings)
    assert packed.packed
    assert supports_packing(packed.model)
    rows = replace(new_learner(model_called(name), settings), packed=False)
    (left, seen), (right, padded) = gradient(packed, groups), gradient(rows, groups)
    for weight, expected in right.items():
        torch.testing.assert_close(left[weight], expected, rtol=1e-4, atol=1e-6)
    assert (seen["loss"], seen["padding_fraction"]) == (pytest.approx(padded["loss"], abs=1e-6), 0)
    assert padded["padding_fraction"] > 0.05 or budget == 24


class OneOf(Ranks):
    """One of several processes, whose numbers nobody adds up."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world


@pytest.mark.parametrize(
    ("world", "budget", "packed"), [(2, 16_384, False), (3, 24, True), (6, 16_384, True), (6, 16_384, False)]
)
def test_the_shares_of_all_processes_add_up_to_the_gradient_of_one(groups, world: int, budget: int, packed) -> None:
    groups = groups[: 1 if world == 6 else 2]  # four completions for six processes: two have nothing but dummies
    terms = ObjectiveSettings(entropy=0.1)  # a dummy has no advantage, but it has entropy
    settings = STILL.model_copy(update={"micro_batch_tokens": budget, "objective": terms})
    model = model_called("llama")  # not the tiny one, whose token 0 is a row of zeros and has no gradient anyway
    one = replace(new_learner(model, settings), packed=packed)
    whole, _metrics = gradient(one, groups)
    ranks = [replace(one, ranks=OneOf(rank, world)) for rank in range(world)]
    found = [_own_gradient(each, groups) for each in ranks]
    for weight, expected in whole.items():
        torch.testing.assert_close(sum(own[weight] for own in found), expected, rtol=1e-4, atol=1e-6)
    idle = [own for own in found if not any(value.any() for value in own.values())]
    assert len(idle) == (2 if world == 6 else 0)


def _own_gradient(made: Learner, groups: list[TrainingGroup]) -> dict[str, Tensor]:
    """Of a process that may hold dummies only: its own numbers have no tokens then, so that it is stopped before."""
    taken: dict[str, Tensor] = {}

    class Taken(Exception):
        pass

    class Recording(OneOf):
        def norm(self, gradients: Any) -> Tensor:
            taken.update({name: value.grad.clone() for name, value in made.trained().items()})
            raise Taken

    ranks = Recording(made.ranks.rank, made.ranks.world)
    with pytest.raises(Taken):
        train_step(replace(made, ranks=ranks), StepWork(0, groups, temperature=0.8, max_staleness=0))
    return taken


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_dummy_is_computed_and_adds_exactly_nothing(name: str) -> None:
    model = model_called(name)
    laid = to_tensors([DUMMY], torch.device("cpu"), packed=True)
    scored = score(model, laid, 1.0)
    torch.autograd.backward((scored.logprobs * torch.zeros(1)).sum())
    assert all(value.grad is not None and not value.grad.any() for value in model.parameters())


@pytest.mark.parametrize(("flash", "packed", "compiled"), [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_packs_are_compiled_only_where_one_program_serves_all(groups, monkeypatch, caplog, flash, packed, compiled):
    """Packs as rows of similar lengths are a program for every number of them, until torch compiles no more."""
    calls: list[object] = []
    for name, made in (("attends_by_flash", flash), ("supports_packing", packed)):
        monkeypatch.setattr(f"shoal.trainer.learner.{name}", lambda _model, made=made: made)
    monkeypatch.setattr("shoal.trainer.learner.compile_layers", calls.append)
    learner = new_learner(tiny_model(), STILL.model_copy(update={"memory": MemorySettings(compile=True)}))
    assert len(calls) == compiled
    assert len([message for message in caplog.messages if "trainer.memory.compile" in message]) == 1 - compiled
    metrics = train_step(learner, StepWork(0, groups, temperature=1.0, max_staleness=0))
    assert (metrics["padding_fraction"] > 0) == (not packed), "what cannot be packed is trained in rows"
    assert learner.cost.linear == sum(value.numel() for value in learner.model.parameters())
    assert learner.cost.quadratic == 2 * 2 * 16  # layers × heads × head size
    assert cost_of(gpt2()).quadratic == 2 * 4 * 8
