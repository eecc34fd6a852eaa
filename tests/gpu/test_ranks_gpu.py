"""One rank on a GPU: NCCL, weights in shards (FSDP2) and compiled layers train what one process trains by itself.

One machine with one GPU has a world of size 1; more ranks are tried on CPUs (tests/unit/trainer/test_ranks.py).
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def ranks() -> Any:
    """The kit of the trainer's own tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))
    return importlib.import_module("test_ranks")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_rank_with_nccl_and_shards_trains_as_one_process_does(
    tmp_path: Path, ranks: Any, precision: str, compiled: bool
) -> None:
    """In bfloat16 AdamW may move a weight whose gradient is mostly rounding the other way: the rank may then not be
    much further from the float32 run than one process is in bfloat16."""
    memory = ranks.SHARED.memory.model_copy(update={"precision": precision, "compile": compiled})
    settings = ranks.SHARED.model_copy(update={"device": "cuda", "memory": memory})
    ranks.run_ranks(tmp_path / "rank", 1, steps=3, settings=settings)
    plain = settings.model_copy(update={"memory": memory.model_copy(update={"compile": False}), "device": "cpu"})
    expected = ranks.alone(tmp_path / "one", steps=3, settings=plain)
    ours = ranks.stubs.stored_in(tmp_path / "rank" / "trainer" / "checkpoints")
    if precision == "float32":
        assert ranks.difference(ours, expected) < 2e-5
    else:
        wide = plain.model_copy(update={"memory": ranks.SHARED.memory})
        exact = ranks.alone(tmp_path / "exact", steps=3, settings=wide)
        assert 0 < ranks.distance(ours, exact) <= 1.5 * ranks.distance(expected, exact)
    rows, theirs = ranks.stubs.rows_of(tmp_path / "rank"), ranks.stubs.rows_of(tmp_path / "one")
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in theirs]
    apart = {"float32": 4e-4, "bfloat16": 4e-2}[precision]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in theirs], abs=apart)
