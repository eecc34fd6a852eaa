"""How long does a data set of full size take to open, and how much memory? 285,000 tasks, one shard of 1.7 GB.

    python benchmarks/open_dataset.py [--data FOLDER] [--rounds 3] [--out FILE]

Without --data, scripts/make_dataset.py writes one to a temporary folder first (a minute, 1.8 GB). Every figure is of a
process of its own, which is why its peak memory can be told; times begin after the imports. The files are read once
before anything is measured: what is claimed is the time with warm files, since a disk's own speed is not shoal's.

    first      opened with an empty cache: digest of all bytes, a look at every row
    again      opened with what was found the first time
    prompts    1,000 random tasks by id, as a hub asks for them: no answer is read
    drawn      1,000 random tasks by position, each answer read and checked, as a hub draws them
    all        pyarrow.parquet.read_table of all columns: what a loader that is not lazy does
    prompts*   the same of the columns that are needed to ask: problem_id, task_type, prompt
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cast_parts.report import publish, table

ROOT = Path(__file__).parent.parent
ASKING = ["problem_id", "task_type", "prompt"]
RANDOM_TASKS = 1000
Figures = dict[str, float]


# ── what is measured, each in a process of its own ───────────────────────────────────────────────────────────────


def measure_shoal(data: Path) -> Figures:
    import numpy as np
    import pyarrow.parquet  # noqa: F401 - loaded before the clock starts, for both alike

    from shoal.environments import EnvironmentSettings, build

    began = time.perf_counter()
    environment: Any = build(EnvironmentSettings(name="dataset", data=data))
    open_s = time.perf_counter() - began
    opened_mb = peak_mb()
    tasks = environment.tasks("train")
    first_s = timed(lambda: tasks[0])
    places = [int(place) for place in np.random.default_rng(0).integers(0, len(tasks), RANDOM_TASKS)]
    programs = environment.row_count - round(environment.row_count * 26 / 285)  # as scripts/make_dataset.py names them
    rows = [environment.row_at("train", place) for place in places]
    names = [f"{row}/{'math' if row < programs else 'code'}_{row}" for row in rows]
    prompts_s = timed(lambda: [environment.task(name) for name in names])
    prompts_mb = peak_mb()
    drawn_s = timed(lambda: [tasks[place] for place in places])
    return {
        "open_s": open_s, "open_mb": opened_mb, "first_s": first_s, "tasks": len(tasks),
        "prompts_per_s": RANDOM_TASKS / prompts_s, "prompts_mb": prompts_mb,
        "drawn_per_s": RANDOM_TASKS / drawn_s, "drawn_mb": peak_mb(),
    }  # fmt: skip


def measure_table(data: Path, columns: list[str] | None) -> Figures:
    import pyarrow.parquet as pq

    began = time.perf_counter()
    read = pq.read_table(data, columns=columns)
    return {"open_s": time.perf_counter() - began, "open_mb": peak_mb(), "tasks": read.num_rows}


MEASURES: dict[str, Callable[[Path], Figures]] = {
    "shoal": measure_shoal,
    "all": lambda data: measure_table(data, None),
    "prompts*": lambda data: measure_table(data, ASKING),
}


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ── the rounds ───────────────────────────────────────────────────────────────────────────────────────────────────


def in_a_process(measure: str, data: Path, cache: Path) -> Figures:
    command = [sys.executable, __file__, "--measure", measure, "--data", str(data)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    figures: Figures = json.loads(ran.stdout.splitlines()[-1])
    return figures


def rounds(data: Path, count: int) -> dict[str, list[Figures]]:
    """Each measured once per round, in turn."""
    found: dict[str, list[Figures]] = {name: [] for name in ("first", "again", "all", "prompts*")}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            found["first"].append(in_a_process("shoal", data, Path(cache)))
            found["again"].append(in_a_process("shoal", data, Path(cache)))
            for name in ("all", "prompts*"):
                found[name].append(in_a_process(name, data, Path(cache)))
    return found


def report(found: dict[str, list[Figures]]) -> list[str]:
    def middle(name: str, key: str) -> float:
        return statistics.median(figures[key] for figures in found[name])

    def most(name: str, key: str) -> float:
        return max(figures[key] for figures in found[name])

    opening = [
        [name, f"{middle(name, 'open_s'):.2f}", f"{most(name, 'open_s'):.2f}", f"{most(name, 'open_mb'):.0f}"]
        for name in found
    ]
    reading = [
        [f"{kind}, {name}", f"{middle(name, f'{kind}_per_s'):,.0f}", f"{most(name, f'{kind}_mb'):.0f}"]
        for kind in ("prompts", "drawn")
        for name in ("first", "again")
    ]
    return [
        table(["opening", "seconds (median)", "seconds (worst)", "peak memory, MB"], opening),
        table(["1,000 random tasks", "tasks/s (median)", "peak memory, MB"], reading),
        f"First task after opening: {1000 * middle('first', 'first_s'):.0f} ms; {middle('first', 'tasks'):,.0f} tasks.",
    ]


def describe(data: Path) -> str:
    files = sorted(data.glob("*.parquet"))
    largest = max(file.stat().st_size for file in files) / 1e9
    total = sum(file.stat().st_size for file in files) / 1e9
    return f"{len(files)} files, {total:.2f} GB, the largest {largest:.2f} GB; files warm in memory."


def warm(data: Path) -> None:
    for file in data.glob("*.parquet"):
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how a data set of full size opens.")
    parser.add_argument("--data", type=Path, help="folder that scripts/make_dataset.py wrote")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(MEASURES[options.measure](options.data)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder)
        if options.data is None:
            subprocess.run([sys.executable, ROOT / "scripts" / "make_dataset.py", "--out", folder], check=True)
        warm(data)
        parts = [describe(data), *report(rounds(data, options.rounds))]
    publish("Opening a data set of 285,000 tasks", "python benchmarks/open_dataset.py", parts, options.out)


if __name__ == "__main__":
    main()
