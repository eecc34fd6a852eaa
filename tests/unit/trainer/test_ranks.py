"""Several processes train as one does: gradients, weights, checkpoints, and how a group ends."""

from pathlib import Path

import pytest
import torch
import trainer_stubs as stubs
from safetensors.torch import save_file
from trainer_stubs import KEY, RUN, SETTINGS, FakeHub, tiny_loaded, training_run

from shoal.cli.main import main
from shoal.errors import CheckpointError
from shoal.shardcast.origin import Origin
from shoal.trainer import ranks, settings
from shoal.trainer.checkpoint import MODEL, TRAINING, StoredCheckpoint, part_name, stored_tensors
from shoal.trainer.learner import new_learner
from shoal.trainer.ranks import rows_of
from shoal.trainer.settings import TrainerSettings

SHARED = SETTINGS.model_copy(update={"evaluate_every": 0, "micro_batch_tokens": 24, "grad_clip": 0.05})
LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "up_proj"]}


def run_ranks(folder: Path, world: int, steps: int, settings: TrainerSettings = SHARED) -> None:
    ended = stubs.run_ranks(folder, world, steps, settings)
    assert [code for code, _said in ended] == [0] * world, "\n".join(said for _code, said in ended)


def alone(folder: Path, steps: int, settings: TrainerSettings = SHARED) -> StoredCheckpoint:
    """One process, from wherever the folder stands."""
    hub = FakeHub(steps)
    hub.remember(Origin(folder / "origin", RUN, KEY))
    loaded = tiny_loaded(settings)
    made = new_learner(loaded.model, settings)
    run, _ = training_run(folder, hub, settings, learner=made, files=dict(loaded.files))
    run.run()
    return stubs.stored_in(folder / "trainer" / "checkpoints")


def difference(left: StoredCheckpoint, right: StoredCheckpoint, file: str = MODEL) -> float:
    ours, theirs = left.tensors(file), right.tensors(file)
    assert ours.keys() == theirs.keys()
    compared = [name for name in ours if not name.startswith("generator/")]
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in compared)


def distance(left: StoredCheckpoint, right: StoredCheckpoint) -> float:
    """The norm of the difference of all weights."""
    ours, theirs = left.tensors(), right.tensors()
    return sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs) ** 0.5


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Three steps with clipped gradients and tied embeddings; then one process goes on where the two have ended."""
    torch.set_num_threads(1)
    run_ranks(tmp_path / "two", 2, steps=3)
    stored, expected = stubs.stored_in(tmp_path / "two/trainer/checkpoints"), alone(tmp_path / "one", steps=3)
    assert difference(stored, expected) < 2e-6
    assert difference(stored, expected, TRAINING) < 2e-6
    for ours, theirs in zip(stubs.rows_of(tmp_path / "two"), stubs.rows_of(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["grad_norm"] > SHARED.grad_clip, "otherwise nothing is clipped"
        assert ours["tokens"] == theirs["tokens"]
        assert ours["padding_fraction"] == theirs["padding_fraction"] == 0, "two processes pack as one does"
    assert difference(alone(tmp_path / "two", steps=5), alone(tmp_path / "one", steps=5)) < 5e-6


@pytest.mark.slow
def test_a_checkpoint_is_loaded_by_any_number_of_processes(tmp_path: Path) -> None:
    """One process, then two, then three, then one again: the same run as by one alone."""
    torch.set_num_threads(1)
    alone(tmp_path / "run", steps=1)
    run_ranks(tmp_path / "run", 2, steps=2)
    run_ranks(tmp_path / "run", 3, steps=3)
    stored, expected = alone(tmp_path / "run", steps=4), alone(tmp_path / "one", steps=4)
    assert stored.progress.version == 4
    assert difference(stored, expected) < 5e-6
    assert difference(stored, expected, TRAINING) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"objective": {"kl": 0.05, "ratio_base": "recomputed"}, "memory": {"recompute": True}},
    {"memory": {"precision": "bfloat16"}}, {"lora": LORA, "objective": {"kl": 0.05}},
    {"lora": LORA, "memory": {"precision": "bfloat16"}},
], ids=["kl-recomputed", "bfloat16", "lora-kl", "lora-bfloat16"])  # fmt: skip
def test_every_kind_of_step_in_two_processes(tmp_path: Path, changes: dict[str, object]) -> None:
    """The reference's pass, recomputed layers, rounded weights, adapters: as in one process. Then one process goes on
    where the two have ended. In bfloat16, sums of another order round otherwise, and AdamW may move a weight whose
    gradient is mostly rounding the other way: any single weight may then be twice the learning rate off for each of 6
    updates, on either side. So the two processes may not be further from the float32 run than the one process is."""
    torch.set_num_threads(1)
    settings = TrainerSettings.model_validate({**SHARED.model_dump(), **changes})
    run_ranks(tmp_path / "two", 2, 3, settings)
    two, one = stubs.stored_in(tmp_path / "two/trainer/checkpoints"), alone(tmp_path / "one", 3, settings)
    rounds = settings.memory.precision == "bfloat16"
    wide = settings.model_copy(update={"memory": settings.memory.model_copy(update={"precision": "float32"})})

    def check(ours: StoredCheckpoint, theirs: StoredCheckpoint, limit: float, steps: int) -> None:
        if rounds:
            exact = alone(tmp_path / "exact", steps, wide)
            assert 0 < distance(ours, exact) <= 1.3 * distance(theirs, exact)
        else:
            assert difference(ours, theirs) < limit

    check(two, one, 2e-6, 3)
    for ours, theirs in zip(stubs.rows_of(tmp_path / "two"), stubs.rows_of(tmp_path / "one"), strict=True):
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-2 if rounds else 1e-5)
        assert ours["padding_fraction"] == 0
    stored, expected = alone(tmp_path / "two", 4, settings), alone(tmp_path / "one", 4, settings)
    assert {value.dtype for value in stored.tensors().values()} == {torch.float32}
    check(stored, expected, 4e-6, 4)
    if settings.lora is not None:
        frozen = [name for name in expected.tensors() if "lora_" not in name]
        start = tiny_loaded(settings).model.state_dict()
        assert all(torch.equal(stored.tensors()[name], start[name]) for name in frozen), "the base stays as it was"


def test_rows_of_a_tensor_are_read_alone(tmp_path: Path) -> None:
    value = torch.arange(15.0).reshape(5, 3)
    save_file({"weight": value}, tmp_path / TRAINING)
    stored = stored_tensors(tmp_path, TRAINING)["weight"]
    assert (stored.shape, stored.dtype) == ([5, 3], "F32")
    for world in range(1, 7):
        assert torch.equal(torch.cat([stored[rows_of(5, rank, world)] for rank in range(world)]), value)


def test_parts_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / part_name(TRAINING, 0, 2))
    with pytest.raises(CheckpointError, match=r"of training\.safetensors there are the parts"):
        stored_tensors(tmp_path, TRAINING)
    (tmp_path / part_name(TRAINING, 1, 2)).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="is not a part of a checkpoint"):
        stored_tensors(tmp_path, TRAINING)


@pytest.mark.parametrize(("failures", "code", "said"), [
    ({0: (1, "has lost another"), 1: (3, "the disk is full")}, 3, "the disk is full"),
    ({1: (-9, "")}, 1, "rank 1 of the trainer was killed by SIGKILL"),
], ids=["a full disk, and one that nobody answered", "killed"])  # fmt: skip
def test_the_code_that_ends_a_run_is_not_lost_among_others(failures, code, said):
    error = ranks.group_error(failures)
    assert (error.exit_code, str(error)) == (code, said)


def test_a_rank_tells_its_agent_why_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    settings.report_to_agent("nobody listens")
    monkeypatch.setenv(settings.ERROR_FILE, str(path))
    assert main(["trainer", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in ranks._message(path)
