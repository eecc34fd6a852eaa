"""Files of tensors and their parts; what a group's failure becomes; who a process is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shoal.cli.main import main
from shoal.errors import CheckpointError
from shoal.trainer import elastic, settings
from shoal.trainer.checkpoint import part_name, read_tensors
from shoal.trainer.ranks import Ranks
from shoal.trainer.shards import rows_of

FILE = "training.safetensors"


def tensors(count: int) -> dict[str, Tensor]:
    return {f"w{number}": torch.full((2, 3), number, dtype=torch.bfloat16) for number in range(count)}


def test_rows_of_a_tensor_are_read_alone(tmp_path: Path) -> None:
    value = torch.arange(15.0).reshape(5, 3)
    save_file({"weight": value}, tmp_path / FILE)
    [(name, shape, read)] = read_tensors(tmp_path, FILE)
    assert (name, shape) == ("weight", (5, 3))
    for world in range(1, 7):
        assert torch.equal(torch.cat([read(rows_of(5, rank, world)) for rank in range(world)]), value)


def test_parts_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    save_file(tensors(2), tmp_path / part_name(FILE, 0, 2))
    with pytest.raises(CheckpointError, match=r"of training\.safetensors there are the parts"):
        list(read_tensors(tmp_path, FILE))
    (tmp_path / part_name(FILE, 1, 2)).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="is not a part of a checkpoint"):
        list(read_tensors(tmp_path, FILE))


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
