"""Packed and padded micro-batches, and shares of several processes: the same gradient, whoever computes it together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_stubs import SETTINGS, gradients, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shoal.models.packed import supports_packing
from shoal.protocol import TrainingGroup
from shoal.trainer.learner import Learner, cost_of, new_learner
from shoal.trainer.ranks import Ranks
from shoal.trainer.samples import lay, score
from shoal.trainer.settings import MemorySettings, ObjectiveSettings
from shoal.trainer.step import DUMMY, StepWork, train_step

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
    assert seen["loss"] == pytest.approx(padded["loss"], abs=1e-6)
    assert seen["padding_fraction"] == 0
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
    laid = lay([DUMMY], torch.device("cpu"), packed=True)
    scored = score(model, laid, 1.0)
    torch.autograd.backward((scored.logprobs * torch.zeros(1)).sum())
    assert all(value.grad is not None and not value.grad.any() for value in model.parameters())


@pytest.mark.parametrize(("flash", "packed", "compiled"), [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_packs_are_compiled_only_where_one_program_serves_them_all(
    groups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flash: bool, packed: bool, compiled: int
) -> None:
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
