"""Make a synthetic data set in the described schema, of any size: for tests, benchmarks and a first try.

    python scripts/make_dataset.py --out DIR [--tasks 285000] [--shard-gb 1.7] [--bad 0] [--seed 0]

Columns: problem_id, task_type, prompt, verification_info (a JSON string), solve_rate_synthetic. Mathematics goes to
shards of --tasks-per-shard rows; all programs go to one shard that holds --shard-gb of unit tests. The tasks are real
(their answers are right), the same seed gives the same rows, and no more than one row group is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("task_type", pa.string()),
        ("prompt", pa.string()),
        ("verification_info", pa.string()),
        ("solve_rate_synthetic", pa.float64()),
    ]
)
CASES = 8  # unit tests of a program
GROUP_BYTES = 16 * 2**20  # so that reading one task does not mean reading a gigabyte
PADDING = "Give every step of your reasoning, name the rule that you use, and check the result by another way. "
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is to be made."""

    out: Path
    tasks: int = 285_000
    shard_gb: float = 1.7
    code_share: float = 26 / 285
    tasks_per_shard: int = 65_000
    rows_per_group: int = 1000
    bad: int = 0
    seed: int = 0

    @property
    def programs(self) -> int:
        return round(self.tasks * self.code_share)


def make(plan: Plan) -> list[Path]:
    """Write the shards; returns their paths in order."""
    plan.out.mkdir(parents=True, exist_ok=True)
    mathematics = plan.tasks - plan.programs
    starts = list(range(0, mathematics, plan.tasks_per_shard))
    spans = [range(start, min(start + plan.tasks_per_shard, mathematics)) for start in starts]
    code = range(mathematics, plan.tasks)
    everything = [*spans, *([code] if code else [])]
    return [_shard(plan, span, number, len(everything), span is code) for number, span in enumerate(everything)]


def _shard(plan: Plan, rows: range, number: int, total: int, code: bool) -> Path:
    path = plan.out / f"train-{number:05d}-of-{total:05d}.parquet"
    tests_bytes = int(plan.shard_gb * 1e9 / max(1, len(rows))) if code else 0
    per_group = min(plan.rows_per_group, max(1, GROUP_BYTES // tests_bytes)) if tests_bytes else plan.rows_per_group
    spoilt = frozenset(_bad_rows(plan))
    packing = dict.fromkeys(SCHEMA.names, "snappy") | {"verification_info": "none"}  # the size is what was asked for
    with pq.ParquetWriter(path, SCHEMA, compression=packing, use_dictionary=["task_type"]) as writer:
        for start in range(rows.start, rows.stop, per_group):
            group = range(start, min(start + per_group, rows.stop))
            made = (_program(plan.seed, row, tests_bytes) if code else _sum(plan.seed, row) for row in group)
            writer.write_table(pa.Table.from_pylist([_spoil(row, spoilt) for row in made], schema=SCHEMA))
    return path


def _bad_rows(plan: Plan) -> Iterator[int]:
    return (int(row) for row in np.random.default_rng([plan.seed, 2**32 - 1]).permutation(plan.tasks)[: plan.bad])


def _sum(seed: int, row: int) -> Row:
    """A task of mathematics: the sum of an arithmetic progression, in some 400 characters."""
    rng = np.random.default_rng([seed, row])
    first, step, count = (int(rng.integers(low, high)) for low, high in ((1, 10**6), (1, 1000), (3, 400)))
    answer = count * first + step * count * (count - 1) // 2
    prompt = (
        f"Problem {row}. The first term of an arithmetic progression is {first} and each term is {step} more than the"
        f" one before. What is the sum of its first {count} terms? {PADDING * int(rng.integers(1, 4))}"
        "Put your final answer within \\boxed{}."
    )
    return _row(f"math_{row}", "verifiable_math", prompt, {"ground_truth": str(answer)}, float(rng.integers(0, 9) / 8))


def _program(seed: int, row: int, tests_bytes: int) -> Row:
    """A programming task: read numbers, print the sum of every k-th; its tests have `tests_bytes` bytes of input."""
    rng = np.random.default_rng([seed, row])
    every = int(rng.integers(2, 50))
    count = max(3, tests_bytes // CASES // 10)
    cases = []
    for _ in range(CASES):
        numbers = rng.integers(10**8, 10**9, count)
        text = f"{count} {every}\n" + " ".join(map(str, numbers.tolist()))
        cases.append({"type": "stdin_stdout", "input": text, "output": str(int(numbers[::every].sum()))})
    prompt = (
        f"Task {row}. The first line of the input holds n and k, the second line n integers. Print the sum of the first"
        f" of every {every} integers in a row (k = {every}). {PADDING * 15}Write a Python program that reads standard"
        " input and prints the answer, in a ```python block."
    )
    info = {"language": "python", "test_cases": cases}
    return _row(f"code_{row}", "prime_rl_code", prompt, info, float(rng.integers(0, 9) / 8))


def _row(problem_id: str, task_type: str, prompt: str, info: dict[str, Any], solve_rate: float) -> Row:
    return {
        "problem_id": problem_id, "task_type": task_type, "prompt": prompt, "verification_info": json.dumps(info),
        "solve_rate_synthetic": solve_rate,
    }  # fmt: skip


def _spoil(row: Row, spoilt: frozenset[int]) -> Row:
    """Make a row bad, in one of five ways, if it is among those that should be."""
    number = int(row["problem_id"].partition("_")[2])
    if number not in spoilt:
        return row
    ways: list[Row] = [
        {"prompt": ""},
        {"prompt": None},
        {"task_type": None},
        {"verification_info": "{not JSON"},
        {"verification_info": None},
    ]
    return {**row, **ways[number % len(ways)]}


def size_text(size_bytes: int) -> str:
    """In the unit that leaves a number people can read.

    >>> size_text(2_345_678), size_text(1_710_000_000)
    ('2.3 MB', '1.71 GB')
    """
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:.2f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a synthetic data set in the described schema.")
    defaults = Plan(Path())
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tasks", type=int, default=defaults.tasks)
    parser.add_argument("--shard-gb", type=float, default=defaults.shard_gb, help="unit tests of all programs")
    parser.add_argument("--code-share", type=float, default=defaults.code_share)
    parser.add_argument("--tasks-per-shard", type=int, default=defaults.tasks_per_shard)
    parser.add_argument("--rows-per-group", type=int, default=defaults.rows_per_group)
    parser.add_argument("--bad", type=int, default=0, help="how many rows to spoil")
    parser.add_argument("--seed", type=int, default=0)
    paths = make(Plan(**vars(parser.parse_args())))
    size = size_text(sum(path.stat().st_size for path in paths))
    print(f"wrote {len(paths)} file{'s' if len(paths) != 1 else ''}, {size}, to {paths[0].parent}")  # noqa: T201


if __name__ == "__main__":
    main()
