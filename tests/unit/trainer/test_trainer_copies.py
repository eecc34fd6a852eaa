"""The state copied in front of training: its own memory, used again, and all that a checkpoint needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from trainer_stubs import RUN, SETTINGS, learner, make_group, same, tiny_loaded, weights

from shoal.trainer.checkpoint import TRAINING, CheckpointStore, Copies, restore
from shoal.trainer.folder import Progress
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.publisher import views_of
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


def test_without_a_checkpoint_weights_are_copied_as_they_are_published() -> None:
    made, copies = learner(settings=SETTINGS.model_copy(update={"publish_dtype": "bfloat16"})), Copies()
    train(made, 0)
    narrow = copies.take(made, with_training=False).weights
    exact = copies.take(made, with_training=True).weights
    assert {value.dtype for value in narrow.values()} == {torch.bfloat16}
    assert same(exact, weights(made))
    published = [[bytes(view.data) for view in views_of(each, "bfloat16")] for each in (narrow, exact)]
    assert published[0] == published[1]


def test_adapters_are_copied_exactly_since_they_are_merged_when_they_are_exported() -> None:
    lora = LoraSettings(rank=2, targets=("q_proj",))
    settings = SETTINGS.model_copy(update={"publish_dtype": "bfloat16", "lora": lora})
    copied = Copies().take(new_learner(tiny_loaded(settings).model, settings), with_training=False)
    assert {value.dtype for value in copied.weights.values()} == {torch.float32}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("with_training", [False, True])
def test_copies_from_a_gpu_have_arrived_before_anybody_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: bool, with_training: bool
) -> None:
    """They are only begun one by one: the device is waited for once, after the last of them."""
    events: list[str] = []
    copy_one = Copies._copy_one
    monkeypatch.setattr(Copies, "_copy_one", lambda *given: (events.append("copy"), copy_one(*given))[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"wait for {device}"))
    monkeypatch.setattr(Learner, "device", torch.device("cuda:3"))
    copies = ShardedCopies(cast(Any, Ranks()), tmp_path) if shared else Copies()
    copies.take(learner(), with_training)
    assert events[-1] == "wait for cuda:3"
    assert events.count("wait for cuda:3") == 1
    assert events.count("copy") > 10


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
