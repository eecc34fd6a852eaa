"""What is kept of every judged rollout, column by column; the names are those of `SCHEMA`.

outcome   accepted | dropped (accepted, but all rewards of its group are equal) | rejected | unsure
reward    None where nothing was scored: a failed check comes before the reward
gaps      of each token, the claimed log-probability minus the validator's
margins   of each token, how far its uniform lies inside the interval of the token; negative: outside
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

FORMAT = b"shoal.records"
OUTCOMES = ("accepted", "dropped", "rejected", "unsure", "pulled")


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout. `group` numbers groups in the order of their verdicts, `step` is the one that was next then. `kept`:
    whether what follows it is there, or was left out for the budget. `pieces` are the texts of single tokens, `given`
    start and length of tool tokens."""

    group: int
    sample: int
    submission: str
    unit: int
    task: str
    node: str
    validator: str
    kind: str
    outcome: str
    reason: str
    severity: str
    message: str
    depth: str
    incarnation: int
    version: int
    step: int
    received_at_ms: int
    decided_at_ms: int
    reward: float | None
    tokens: int
    prompt_tokens: int
    length_target: int | None
    finish: str
    parts: Mapping[str, float]
    kept: bool
    checks: Sequence[Mapping[str, Any]] = ()
    prompt: str = ""
    completion: str = ""
    pieces: Sequence[str] = ()
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    given: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    gaps: Sequence[float] = field(default=(), repr=False)
    margins: Sequence[float] = field(default=(), repr=False)


NAMES = tuple(each.name for each in fields(RolloutRecord))
BULK = NAMES[NAMES.index("kept") + 1 :]
NARROW = NAMES[: NAMES.index("kept") + 1]


@cache
def schema() -> pa.Schema:
    """Text where nothing else is said."""
    import pyarrow as pa

    whole, number, tokens = pa.int64(), pa.float64(), pa.list_(pa.int32())
    kinds = {
        **dict.fromkeys(("group", "unit", "incarnation", "version", "step", "received_at_ms", "decided_at_ms"), whole),
        **dict.fromkeys(("sample", "tokens", "prompt_tokens", "length_target"), pa.int32()),
        "reward": number, "parts": pa.map_(pa.string(), number), "kept": pa.bool_(),
        "prompt": pa.large_string(), "completion": pa.large_string(), "pieces": pa.list_(pa.string()),
        "prompt_ids": tokens, "token_ids": tokens, "given": tokens, "logprobs": pa.list_(pa.float32()),
        "gaps": pa.list_(pa.float16()), "margins": pa.list_(pa.float16()),
    }  # fmt: skip
    return pa.schema([(name, kinds.get(name, pa.string())) for name in NAMES])


def lists(arrays: Sequence[npt.NDArray[Any]], kind: Any) -> Any:
    """A list column from values and offsets, without a Python object per token."""
    import numpy as np
    import pyarrow as pa

    offsets = [0, *itertools.accumulate(len(array) for array in arrays)]
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values).cast(kind))


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows whose lists of numbers are arrays, and whose `checks` are JSON."""
    import pyarrow as pa

    columns = []
    for each in schema():
        values = [row[each.name] for row in rows]
        is_numbers = pa.types.is_list(each.type) and not pa.types.is_string(each.type.value_type)
        columns.append(lists(values, each.type.value_type) if is_numbers else pa.array(values, each.type))
    return pa.Table.from_arrays(columns, schema=schema())


def records_of(table: pa.Table) -> Iterable[RolloutRecord]:
    """Of a table with all columns, or without the bulk."""
    for row in table.to_pylist():
        row["parts"] = dict(row["parts"] or ())
        if "checks" in row:
            row["checks"] = json.loads(row["checks"] or "[]")
        yield RolloutRecord(**row)
