"""Parts of tensors, written by several and read by others; what a group's failure becomes; who a process is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shoal.cli.main import main
from shoal.errors import CheckpointError, DeadlineExceeded
from shoal.runtime.clock import ManualClock
from shoal.trainer import elastic, settings, shards
from shoal.trainer.checkpoint import Parts, Rows, part_files, part_name, read_full, save_tensors
from shoal.trainer.ranks import Ranks
from shoal.trainer.shards import rows_of

FILE = "model.safetensors"


def write(folder: Path, tensors: dict[str, Tensor], world: int) -> None:
    for rank in range(world):
        own = {name: rows_of(len(value), rank, world) for name, value in tensors.items()}
        shares = {name: Rows(tensors[name][rows], tuple(tensors[name].shape), rows.start) for name, rows in own.items()}
        whole = {"count": torch.tensor(7.0)} if rank == 0 else {}
        save_tensors(folder / part_name(FILE, rank, world), {**shares, **whole})


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 9))
def test_rows_are_found_by_any_number_of_readers(
    tmp_path_factory: pytest.TempPathFactory, writers: int, readers: int, count: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    value = torch.arange(count * 3, dtype=torch.bfloat16).reshape(count, 3)
    write(folder, {"weight": value}, writers)
    with Parts(part_files(folder, FILE)) as parts:
        found = [parts.read("weight", rows_of(count, rank, readers)) for rank in range(readers)]
    assert torch.equal(torch.cat(found), value)
    full = read_full(folder, FILE)
    assert torch.equal(full["weight"], value)
    assert full["weight"].dtype == value.dtype
    assert float(full["count"]) == 7


def test_a_file_that_one_process_wrote_is_read_the_same_way(tmp_path: Path) -> None:
    value = torch.randn(4, 2)
    save_file({"weight": value, "step": torch.tensor(3.0)}, tmp_path / FILE)
    with Parts(part_files(tmp_path, FILE)) as parts:
        assert parts.shape("weight") == (4, 2)
        assert torch.equal(parts.read("weight", slice(1, 3)), value[1:3])
        assert float(parts.read("step")) == 3


def test_missing_parts_and_rows_are_errors_never_zeros(tmp_path: Path) -> None:
    write(tmp_path, {"weight": torch.ones(6, 2)}, 3)
    (tmp_path / part_name(FILE, 1, 3)).unlink()
    with pytest.raises(CheckpointError, match=r"of model\.safetensors there are the parts"):
        read_full(tmp_path, FILE)
    left = [tmp_path / part_name(FILE, rank, 3) for rank in (0, 2)]
    with Parts(left) as parts, pytest.raises(CheckpointError, match="rows 2…5 of weight are in none"):
        parts.read("weight")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / part_name(FILE, 0, 2), {"weight": Rows(torch.ones(2, 3), (4, 3), 0)})
    save_tensors(tmp_path / part_name(FILE, 1, 2), {"weight": Rows(torch.ones(2, 3), (5, 3), 2)})
    with pytest.raises(CheckpointError, match="another shape here"):
        read_full(tmp_path, FILE)
    (tmp_path / part_name(FILE, 1, 2)).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="is not a part of a checkpoint"):
        read_full(tmp_path, FILE)


def test_rank_0_does_not_wait_for_ever_for_the_part_of_another(tmp_path: Path) -> None:
    clock = ManualClock()
    advance = clock.monotonic_s
    clock.monotonic_s = lambda: (clock.advance(400), advance())[1]  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="do all trainer processes see the folder"):
        shards._fetch(tmp_path, ".part-0", tmp_path / "x" / FILE, clock)


def test_a_process_by_itself_has_nobody_to_ask() -> None:
    ranks, values = Ranks(), torch.tensor([3.0, 4.0])
    assert ranks.total(values) is ranks.peak(values) is ranks.whole(values) is values
    assert (ranks.any(True), ranks.any(False)) == (True, False)
    assert float(ranks.norm([values])) == 5
    assert ranks.run(None, lambda: 7) == 7
    ranks.send(b"nobody listens")


# -- how a group ends --------------------------------------------------------------------------------------------------


def failure(folder: Path, rank: int, code: int, said: str | None, at: int) -> ProcessFailure:
    path = folder / f"error-{rank}.json"
    if said is not None:
        path.write_text(json.dumps({"message": said, "timestamp": at, "by": "shoal"}))
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=code, error_file=str(path))


def test_the_code_that_ends_a_run_is_not_lost_among_others(tmp_path: Path) -> None:
    """Rank 1 has a full disk; rank 0 ended first, because nobody answered it any more."""
    failures = {0: failure(tmp_path, 0, 1, "has lost another", 1), 1: failure(tmp_path, 1, 3, "the disk is full", 2)}
    error = elastic.group_error(failures)
    assert (error.exit_code, str(error)) == (3, "the disk is full")


def test_a_killed_rank_is_named_and_may_be_started_again(tmp_path: Path) -> None:
    error = elastic.group_error({1: failure(tmp_path, 1, -9, None, int(time.time()))})
    assert error.exit_code == 1
    assert str(error) == "rank 1 of the trainer was killed by SIGKILL"


def test_a_rank_tells_its_agent_why_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    settings.report_to_agent("nobody listens")
    monkeypatch.setenv(settings.ERROR_FILE, str(path))
    assert main(["trainer", "--dir", str(tmp_path / "nowhere")]) == 2
    found = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    error = elastic.group_error({0: found})
    assert "nowhere" in str(error)
    assert error.exit_code == 2
