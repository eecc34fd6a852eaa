"""The state copied in front of training: its own memory, used again, and all that a checkpoint needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from trainer_stubs import RUN, SETTINGS, learner, make_group, same, tiny_loaded, weights

from shoal.trainer.checkpoint import MODEL, MOMENTS, TRAINING, CheckpointStore, Copies, Transfer, restore
from shoal.trainer.folder import Progress
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.ranks import Ranks
from shoal.trainer.settings import LoraSettings
from shoal.trainer.shards import ShardedCopies
from shoal.trainer.step import StepWork, train_step


def train(made: Learner, step: int) -> None:
    groups = [make_group(unit, 0, made.model) for unit in range(2)]
    train_step(made, StepWork(step, groups, temperature=1.0, max_staleness=99))


def test_a_copy_does_not_follow_the_model(tmp_path: Path) -> None:
    made = learner()
    train(made, 0)
    copied = Copies().take(made, with_training=True)
    assert copied.captured is not None
    copied.captured[TRAINING](tmp_path / "before")
    before = {name: value.clone() for name, value in copied.weights.items()}
    train(made, 1)
    torch.rand(1)
    copied.captured[TRAINING](tmp_path / "after")
    assert same(copied.weights, before)
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
    assert not same(copied.weights, weights(made))


def test_the_next_copy_uses_the_same_memory() -> None:
    made, copies = learner(), Copies()
    first = copies.take(made, with_training=False)
    train(made, 0)
    second = copies.take(made, with_training=True)
    assert {value.data_ptr() for value in first.weights.values()} == {
        value.data_ptr() for value in second.weights.values()
    }
    assert same(second.weights, weights(made))


def test_weights_are_copied_as_they_are_published_and_as_they_are_saved(tmp_path: Path) -> None:
    made, copies = learner(settings=SETTINGS.model_copy(update={"publish_dtype": "bfloat16"})), Copies()
    train(made, 0)
    exact = weights(made)
    for with_training in (False, True):
        copied = copies.take(made, with_training)
        assert same(copied.weights, {name: value.bfloat16() for name, value in exact.items()})
    assert copied.captured is not None
    copied.captured[MODEL](tmp_path / MODEL)
    assert same(load_file(tmp_path / MODEL), exact)


def test_adapters_are_copied_exactly_since_they_are_merged_when_they_are_exported() -> None:
    lora = LoraSettings(rank=2, targets=("q_proj",))
    settings = SETTINGS.model_copy(update={"publish_dtype": "bfloat16", "lora": lora})
    copied = Copies().take(new_learner(tiny_loaded(settings).model, settings), with_training=False)
    assert {value.dtype for value in copied.weights.values()} == {torch.float32}


class Late(Transfer):
    """A device whose copies arrive as late as they may: when somebody waits for them."""

    def __init__(self) -> None:
        self.begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.begun.append((target.zero_(), source))

    def wait(self) -> None:
        for target, source in self.begun:
            target.copy_(source)
        self.begun.clear()

    before_update = wait


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    transfer = Late()
    monkeypatch.setattr(Copies, "_new_transfer", lambda *_: transfer)
    return transfer


@pytest.mark.parametrize("sharded", [False, True])
def test_taking_a_copy_waits_for_nothing(late: Late, tmp_path: Path, sharded: bool) -> None:
    copies = ShardedCopies(cast(Any, Ranks()), tmp_path) if sharded else Copies()
    copied = copies.take(made := learner(), with_training=False)
    assert len(late.begun) == len(copied.weights)
    copied.arrived()
    assert same(copied.weights, weights(made))


def test_an_update_does_not_change_a_copy_that_is_on_its_way(late: Late, tmp_path: Path) -> None:
    made, copies = learner(), Copies()
    train(made, 0)
    before = weights(made)
    moments = {f"{MOMENTS}{name}": value.clone() for name, value in made.moments().items()}
    copied = copies.take(made, with_training=True)
    train(made, 1)
    assert not late.begun
    assert not same(weights(made), before)
    assert same(copied.weights, before)
    assert copied.captured is not None
    copied.captured[TRAINING](tmp_path / TRAINING)
    saved = load_file(tmp_path / TRAINING)
    assert same({name: value for name, value in saved.items() if name.startswith(MOMENTS)}, moments)


def test_the_memory_of_a_checkpoint_is_there_before_there_are_moments() -> None:
    made, copies = learner(), Copies()
    copies.take(made, with_training=True)
    copies._reserve(made)
    reserved = {name: value.data_ptr() for (name, _), value in copies._memory.items()}
    train(made, 0)
    copies.take(made, with_training=True)
    later = {name: value.data_ptr() for (name, _), value in copies._memory.items()}
    assert {name for name in later if name not in reserved} == {name for name in later if name.endswith("/step")}
    assert all(later[name] == where for name, where in reserved.items())


def test_moments_are_copied_only_for_a_checkpoint() -> None:
    assert Copies().take(learner(), with_training=False).captured is None


def test_weights_that_are_not_trained_are_copied_once() -> None:
    made, copies = learner(), Copies()
    made.model.lm_head.weight.requires_grad_(False)
    first = copies.take(made, with_training=False).weights["lm_head.weight"].clone()
    with torch.no_grad():
        made.model.lm_head.weight.add_(1)  # nobody does this; it shows who looks
        made.model.model.norm.weight.add_(1)
    second = copies.take(made, with_training=False).weights
    assert torch.equal(second["lm_head.weight"], first)
    assert torch.equal(second["model.norm.weight"], made.model.model.norm.weight)


def test_a_checkpoint_of_a_copy_is_one_of_the_moment_it_was_taken(tmp_path: Path) -> None:
    made, store = learner(), CheckpointStore(tmp_path, 1)
    train(made, 0)
    captured = Copies().take(made, with_training=True).captured
    assert captured is not None
    train(made, 1)
    expected = weights(made)
    store.write(captured, Progress(RUN, 1), {})
    stored, resumed = store.newest(), learner(seed=9)
    assert stored is not None
    restore(resumed, stored)
    train(resumed, 1)
    assert same(weights(resumed), expected)


def test_a_model_of_half_precision_is_copied_as_its_masters() -> None:
    memory = SETTINGS.memory.model_copy(update={"precision": "bfloat16"})
    made = learner(SETTINGS.model_copy(update={"memory": memory}))
    train(made, 0)
    copied = Copies().take(made, with_training=True)
    assert {value.dtype for value in copied.weights.values()} == {torch.float32}
    name = "model.norm.weight"
    assert torch.equal(copied.weights[name].to(torch.bfloat16), made.model.get_parameter(name))
