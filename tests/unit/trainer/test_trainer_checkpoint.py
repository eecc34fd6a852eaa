"""Checkpoints: exact, atomic, bounded, never believed when damaged; the copies that they are made of."""

import errno
import json
import logging
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from trainer_stubs import RUN, changed, learner, same, stored_in, tiny_files, weights
from transformers import AutoModelForCausalLM

from shoal.errors import CheckpointError, ResourceError
from shoal.protocol import TrainingGroup
from shoal.trainer import checkpoint
from shoal.trainer.checkpoint import MODEL, MOMENTS, TRAINING, CheckpointStore, Copies, CopyStream, restore
from shoal.trainer.folder import TrainerProgress
from shoal.trainer.learner import Learner
from shoal.trainer.step import StepWork, train_step


def train(made: Learner, groups: list[TrainingGroup], steps: range = range(1)) -> list[dict[str, float]]:
    return [train_step(made, StepWork(step, groups, temperature=1.0, max_staleness=99)) for step in steps]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_restored_learner_continues_bit_for_bit(tmp_path, groups, monkeypatch, tied, precision):
    """Also if its moments are in parts: where weights are tied."""
    settings = changed(memory={"precision": precision}, micro_batch_tokens=24)
    whole = learner(settings, tie_word_embeddings=tied)
    train(whole, groups, range(2))
    monkeypatch.setattr(checkpoint, "PART_BYTES", 20_000 if tied else 2**30)
    folder = CheckpointStore(tmp_path, keep=2).save(whole, TrainerProgress(RUN, 2), tiny_files(whole.model))
    parts = sorted(path.name for path in folder.glob("training*"))
    if tied:
        assert len(parts) > 2
        assert parts == [checkpoint.part_name(TRAINING, number, len(parts)) for number in range(len(parts))]
    drawn = torch.rand(4)

    resumed = learner(settings, 9, tie_word_embeddings=tied)  # other weights: everything must come from the checkpoint
    assert stored_in(tmp_path).progress == TrainerProgress(RUN, 2, 0)
    restore(resumed, stored_in(tmp_path).folder)
    assert torch.equal(torch.rand(4), drawn), "generators are restored"
    assert same(weights(whole), weights(resumed)), "also those that are computed with"
    assert train(whole, groups, range(2, 4)) == train(resumed, groups, range(2, 4))
    assert same(whole.state(), resumed.state())
    assert same(whole.moments(), resumed.moments())
    flip(folder / parts[-1])
    with pytest.raises(CheckpointError, match=parts[-1]):
        CheckpointStore(tmp_path, 1).newest()


def test_a_checkpoint_is_a_hugging_face_folder_without_pickle(tmp_path: Path, groups: list[TrainingGroup]) -> None:
    made = learner()
    train(made, groups)
    folder = CheckpointStore(tmp_path, 1).save(made, TrainerProgress(RUN, 1), tiny_files(made.model))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 9, 30]])
    assert torch.equal(loaded(ids).logits, made.model(ids).logits)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


FILES = ["checkpoint.json", "model.safetensors", "training.safetensors", "tokenizer.json"]


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, folder = learner(), tmp_path_factory.mktemp("two")
    for version in (1, 2):
        CheckpointStore(folder, 2).save(made, TrainerProgress(RUN, version), tiny_files(made.model))
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(two_saved, tmp_path, name, damage, caplog):
    folder = shutil.copytree(two_saved, tmp_path / "checkpoints")
    damage(folder / "2.0" / name)
    with caplog.at_level(logging.WARNING):
        assert stored_in(folder).progress.version == 1
    assert "2.0 is damaged" in caplog.text
    assert name in caplog.text
    assert "falling back" in caplog.text


def test_when_all_are_damaged_it_says_what_to_do(two_saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_saved, tmp_path / "checkpoints")
    for version in ("1.0", "2.0"):
        flip(folder / version / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* restore one from a backup"):
        CheckpointStore(folder, 2).newest()


def test_a_renamed_or_newer_checkpoint_is_refused(two_saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_saved, tmp_path / "checkpoints")
    (folder / "2.0").rename(folder / "7.0")
    assert stored_in(folder).progress.version == 1
    content = json.loads((folder / "1.0" / "checkpoint.json").read_text())
    content = {key: value for key, value in content.items() if key != "hash"} | {"format": 99}
    content["hash"] = checkpoint._content_hash(content)
    (folder / "1.0" / "checkpoint.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        CheckpointStore(folder, 2).newest()


def test_old_ones_are_removed_and_the_order_is_by_number_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    made, store = learner(), CheckpointStore(tmp_path, keep=2)
    for version, incarnation in [(8, 0), (9, 0), (10, 0), (10, 1)]:
        last = store.save(made, TrainerProgress(RUN, version, incarnation), {})
    flip(last / MODEL)
    store.save(made, TrainerProgress(RUN, 10, 1), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10.0", "10.1"]
    assert stored_in(tmp_path).progress == TrainerProgress(RUN, 10, 1)


def test_a_crash_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, store = learner(), CheckpointStore(tmp_path, keep=1)
    store.save(made, TrainerProgress(RUN, 1), {})
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_atomically", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(ResourceError, match="the disk is full"):
            store.save(made, TrainerProgress(RUN, 2), {})
    assert stored_in(tmp_path).progress.version == 1
    store.save(made, TrainerProgress(RUN, 2), {})  # what was left half-written is swept away
    assert [path.name for path in tmp_path.iterdir()] == ["2.0"]


def test_damaged_checkpoint_and_stray_files_do_not_count_towards_retention(tmp_path: Path) -> None:
    """A folder with a higher number, in which there is nothing: the newest good ones stay, whatever it is called."""
    made, store = learner(), CheckpointStore(tmp_path, keep=1)
    for name in (".saving-note", "5.0", "4000.0", "notes.txt"):
        (tmp_path / name).write_text("mine")
    assert store.newest() is None
    (tmp_path / "999.0").mkdir()
    store.save(made, TrainerProgress(RUN, 3), {})
    assert (3, 0) in store.places(), "also where nobody has read the stray one yet"
    again = CheckpointStore(tmp_path, keep=1)
    stored = again.newest()
    assert stored.progress.version == 3
    for version in (4, 5):
        again.save(made, TrainerProgress(RUN, version), {})
        assert again.places() == [(999, 0), (version, 0)]
    assert again.sound() == [(5, 0)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_does_not_follow_the_model_and_the_next_one_uses_its_memory(groups, dtype: str) -> None:
    """As it is published, and as it is saved."""
    made, copies = learner(settings=changed(publish_dtype=dtype)), Copies()
    train(made, groups)
    exact, copied = weights(made), copies.take(made, with_training=True)
    assert same(copied.weights, {name: value.to(getattr(torch, dtype)) for name, value in exact.items()})
    moments = {name: value.clone() for name, value in copied.captured[TRAINING].items()}
    places = {value.data_ptr() for value in copied.weights.values()}
    train(made, groups, range(1, 2))
    torch.rand(1)
    assert same(copied.captured[MODEL], exact)
    assert same(copied.captured[TRAINING], moments)
    later = copies.take(made, with_training=False).weights
    assert {value.data_ptr() for value in later.values()} == places
    assert same(later, {name: value.to(getattr(torch, dtype)) for name, value in weights(made).items()})


class Late(CopyStream):
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


def test_taking_a_copy_waits_for_nothing_and_no_update_changes_it_on_its_way(groups, monkeypatch) -> None:
    made, copies, late = learner(), Copies(), Late()
    monkeypatch.setattr(Copies, "_new_stream", lambda *_: late)
    train(made, groups)
    before = weights(made)
    moments = {f"{MOMENTS}{name}": value.clone() for name, value in made.moments().items()}
    copied = copies.take(made, with_training=True)
    assert len(late.begun) == len(copied.weights) + sum(map(len, copied.captured.values()))
    train(made, groups, range(1, 2))
    assert not late.begun
    assert not same(weights(made), before)
    assert same(copied.weights, before)
    saved = copied.captured[TRAINING]
    assert same({name: value for name, value in saved.items() if name.startswith(MOMENTS)}, moments)


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
