"""What was trained on, for people: each batch as a Parquet file with texts, tokens, log-probabilities and rewards.

A file is written while its step is trained, so that a step that diverges can be examined. shoal never reads these.

    pyarrow.parquet.read_table("runs/NAME/trainer/rollouts").to_pandas()     # the whole run
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.protocol import Batch, TrainingBatch, TrainingRollout, unpack_tokens
from shoal.records.schema import lists
from shoal.runtime.files import ensure_folder, write_atomically

TEXT, COUNT, TOKENS = pa.string(), pa.int64(), pa.list_(pa.int32())
# `sample` is the number of the rollout in its group; `given` holds start, length, … of tool tokens; `audit` is how the
# group was checked: full, or light.
SCHEMA = pa.schema({
    "step": COUNT, "unit": COUNT, "sample": pa.int32(), "task": TEXT, "node": TEXT, "version": COUNT,
    "staleness": COUNT, "prompt": TEXT, "completion": TEXT, "prompt_ids": TOKENS, "token_ids": TOKENS,
    "logprobs": pa.list_(pa.float32()), "given": TOKENS, "finish": TEXT, "reward": pa.float64(),
    "parts": pa.map_(TEXT, pa.float64()), "audit": TEXT,
})  # fmt: skip

Decode = Callable[[Iterable[int]], str]


class RolloutArchive:
    """Its one writer is the trainer, which holds the lock of the parent folder."""

    def __init__(self, folder: Path, decode: Decode) -> None:
        self.folder = folder
        self._decode = decode

    def open(self) -> None:
        """Also removes files that a killed trainer left half-written."""
        for left in ensure_folder(self.folder).glob(".step-*.parquet.*"):
            left.unlink(missing_ok=True)

    def write(self, batch: Batch, rollouts: TrainingBatch) -> Path:
        """The same batch gives the same bytes: one row per rollout, in order of unit and sample."""
        sink = pa.BufferOutputStream()
        trained: list[TrainingRollout] = [rollout for group in rollouts.groups for rollout in group.rollouts]
        columns: dict[str, Any] = {name: [] for name in SCHEMA.names}
        for written, group in zip(batch.groups, rollouts.groups, strict=True):
            same = {
                "step": batch.step, "unit": group.unit, "task": group.task, "node": written.node,
                "version": group.version, "staleness": batch.step - group.version,
                "prompt": self._decode(group.prompt_ids.tolist()), "prompt_ids": group.prompt_ids,
                "audit": written.audit,
            }  # fmt: skip
            for name, value in same.items():
                columns[name] += [value] * len(group.rollouts)
            columns["sample"] += range(len(group.rollouts))
        columns |= {
            "completion": [self._decode(each.token_ids.tolist()) for each in trained],
            "finish": [each.finish for each in trained], "reward": [each.reward for each in trained],
            "parts": [list(each.parts.items()) for each in trained],
            "prompt_ids": lists(columns["prompt_ids"], pa.int32()),
            "token_ids": lists([each.token_ids for each in trained], pa.int32()),
            "logprobs": lists([each.logprob_values for each in trained], pa.float32()),
            "given": lists([unpack_tokens(each.given) for each in trained], pa.int32()),
        }  # fmt: skip
        pq.write_table(pa.table(columns, schema=SCHEMA), sink, compression="zstd")
        path = self.folder / f"step-{batch.step:05d}.parquet"
        write_atomically(path, sink.getvalue().to_pybytes())
        return path
