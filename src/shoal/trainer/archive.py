"""What was trained on, for people: every batch as a Parquet file with texts, tokens, log-probabilities and rewards.

    written-down batch ─┬─► table, one row per rollout ─► rollouts/step-00007.parquet ─┬─► row 7 of the metrics
                        └─► training of step 7 ────────────────────────────────────────┘

A file is written while its step is trained, whatever comes of it: one that diverges can be looked at. A step that is
repeated after a crash has the same batch, and its file the same bytes. A step without any group has a file without
rows: a missing file means that the step was never reached. Nothing here is ever read back by shoal.

    pyarrow.parquet.read_table("runs/NAME/trainer/rollouts").to_pandas()     # the whole run
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.algorithms.filters import staleness
from shoal.protocol import Batch, TrainingBatch, TrainingGroup, TrainingRollout, unpack_tokens
from shoal.runtime.files import ensure_folder, resource_error, write_atomically

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("unit", pa.int64()),
        ("sample", pa.int32()),  # the rollout's place in its group
        ("task", pa.string()),
        ("node", pa.string()),
        ("version", pa.int64()),
        ("staleness", pa.int64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("given", pa.list_(pa.int32())),  # start, length, … of the tokens that the environment said
        ("finish", pa.string()),
        ("reward", pa.float64()),
    ]
)

Decode = Callable[[Iterable[int]], str]


class RolloutArchive:
    """The folder of these files; its one writer is the trainer, which holds the lock on the folder around it."""

    def __init__(self, folder: Path, decode: Decode) -> None:
        self.folder = folder
        self._decode = decode

    def open(self) -> None:
        """Make the folder, and remove what a trainer that was killed left half-written."""
        ensure_folder(self.folder)
        try:
            for left in self.folder.glob(".step-*.parquet.*"):
                left.unlink()
        except OSError as error:
            raise resource_error("clean up", self.folder, error) from error

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:05d}.parquet"

    def write(self, batch: Batch, rollouts: TrainingBatch) -> Path:
        """Put the file of one step in place, whole; the same batch gives the same bytes."""
        sink = pa.BufferOutputStream()
        pq.write_table(as_table(batch, rollouts, self._decode), sink, compression="zstd")
        path = self.path(batch.step)
        write_atomically(path, sink.getvalue().to_pybytes())
        return path


class _Row(NamedTuple):
    node: str
    group: TrainingGroup
    sample: int
    rollout: TrainingRollout


def as_table(batch: Batch, rollouts: TrainingBatch, decode: Decode) -> Any:
    """One row per rollout, in order of unit and sample. Who generated a group only the batch knows."""
    rows = [
        _Row(written.node, group, sample, rollout)
        for written, group in zip(batch.groups, rollouts.groups, strict=True)
        for sample, rollout in enumerate(group.rollouts)
    ]
    prompts = {group.unit: decode(group.prompt_ids.tolist()) for group in rollouts.groups}
    columns = {
        "step": [batch.step for _ in rows],
        "unit": [row.group.unit for row in rows],
        "sample": [row.sample for row in rows],
        "task": [row.group.task for row in rows],
        "node": [row.node for row in rows],
        "version": [row.group.version for row in rows],
        "staleness": [staleness(batch.step, row.group.version) for row in rows],
        "prompt": [prompts[row.group.unit] for row in rows],
        "completion": [decode(row.rollout.token_ids.tolist()) for row in rows],
        "prompt_ids": _lists([row.group.prompt_ids for row in rows], pa.int32()),
        "token_ids": _lists([row.rollout.token_ids for row in rows], pa.int32()),
        "logprobs": _lists([row.rollout.logprob_values for row in rows], pa.float32()),
        "given": _lists([unpack_tokens(row.rollout.given) for row in rows], pa.int32()),
        "finish": [row.rollout.finish for row in rows],
        "reward": [row.rollout.reward for row in rows],
    }
    return pa.table(columns, schema=SCHEMA)


def _lists(arrays: Sequence[npt.NDArray[Any]], kind: Any) -> Any:
    """A list column made of its values and offsets, without a Python object per token."""
    offsets = [0, *itertools.accumulate(len(array) for array in arrays)]
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values).cast(kind))
