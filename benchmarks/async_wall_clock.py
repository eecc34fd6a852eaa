"""How much does an asynchronous run learn in the time of a synchronous one of the same recipe?

    python benchmarks/async_wall_clock.py [--recipe recipes/tiny.toml] [--staleness 0,1,2,4] [--seeds 0,1,2]
                                          [--steps 40] [--set worker.count=2] [--out benchmarks/results/…]

Real processes: `shoal run` with hub, relay, worker, validator and trainer, one run after the other, on a quiet machine.
`run.max_staleness = 0` is the synchronous run: nobody generates while the trainer trains. A version's time is the
moment at which its last training step was recorded, counted from the beginning of the first step; its score is the
greedy one on held-out tasks. A run that is there already in --runs is not repeated.

    equal time      the score (linear between two measured versions) when the fastest run was through
    time to score   the first moment at which the score reached --target; "no" if it never did
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shoal.evaluation.statistics import t_interval

RUN_DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Curve:
    """The scores of one run over time. `times_s` rises; the first is 0, of the policy that training began with."""

    staleness: int
    seed: int
    times_s: tuple[float, ...]
    scores: tuple[float, ...]
    step_s: float
    idle: float
    age: float

    def at(self, time_s: float) -> float:
        return float(np.interp(time_s, self.times_s, self.scores))

    def reaches(self, target: float) -> float:
        """The first moment at which the line between two measured versions is as high as `target`."""
        if self.scores[0] >= target:
            return 0.0
        points = list(zip(self.times_s, self.scores, strict=True))
        for (before_s, low), (after_s, high) in pairwise(points):
            if high >= target:
                return before_s + (after_s - before_s) * (target - low) / (high - low)
        return math.inf


def main() -> None:
    options = parse_options()
    curves = []
    for seed in options.seeds:  # the outer loop: what is cut off leaves whole seeds, and a slow hour hits all alike
        for staleness in options.staleness:
            curves.append(measured(options, staleness, seed))
            print(f"seed {seed}, staleness {staleness}: {curves[-1]}", flush=True)
    text = report(curves, options)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def measured(options: argparse.Namespace, staleness: int, seed: int) -> Curve:
    folder = options.runs / f"{options.recipe.stem}-s{staleness}-seed{seed}-{options.steps}"
    if not (folder / "trainer" / "export").is_dir():
        settings = [f"run.max_staleness={staleness}", f"run.seed={seed}", f"run.steps={options.steps}", *options.set]
        command = [sys.executable, "-m", "shoal.cli", "run", str(options.recipe), str(folder)]
        options.runs.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".output").open("wb") as output:
            subprocess.run(
                [*command, *(part for setting in settings for part in ("--set", setting))],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=RUN_DEADLINE_S, check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
    return read_curve(folder / "trainer" / "metrics.jsonl", staleness, seed)


def read_curve(metrics: Path, staleness: int, seed: int) -> Curve:
    """Row n has the score of version n, and the moment at which step n was done, which is when version n + 1 was."""
    rows = {int(row["step"]): row for row in map(json.loads, metrics.read_text().splitlines())}
    begin_ms = rows[0]["at_ms"] - 1000 * rows[0]["step_s"]
    known = [step for step in sorted(rows) if "held_out" in rows[step]]
    steps = [rows[step] for step in sorted(rows) if "step_s" in rows[step]]
    return Curve(
        staleness,
        seed,
        times_s=tuple((rows[step - 1]["at_ms"] - begin_ms) / 1000 if step else 0.0 for step in known),
        scores=tuple(rows[step]["held_out"] for step in known),
        step_s=statistics.median(row["step_s"] for row in steps[1:]),
        idle=statistics.fmean(row["idle_fraction"] for row in steps[1:]),
        age=statistics.fmean(row["staleness_mean"] for row in steps),
    )


def report(curves: Sequence[Curve], options: argparse.Namespace) -> str:
    equal_s = min(curve.times_s[-1] for curve in curves)
    by_staleness = {s: [curve for curve in curves if curve.staleness == s] for s in options.staleness}
    base = by_staleness[options.staleness[0]]
    lines = [
        "# Asynchronous against synchronous, at equal wall-clock time",
        "",
        f"`python benchmarks/async_wall_clock.py --recipe {options.recipe} --steps {options.steps} --seeds "
        f"{','.join(map(str, options.seeds))}{''.join(f' --set {one}' for one in options.set)}`",
        "",
        f"{machine()}. Means over {len(base)} seeds, ± half of the 95 % interval (Student's t). Equal time: "
        f"{equal_s:.0f} s, when the fastest run was through its {options.steps} steps.",
        "",
        f"| bound on staleness | mean age | step | trainer idle | score at {equal_s:.0f} s "
        f"| time to {options.target} | ratio to {options.staleness[0]} | last score |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    first_s = statistics.fmean(curve.reaches(options.target) for curve in base)
    for staleness, own in by_staleness.items():
        reach_s = statistics.fmean(curve.reaches(options.target) for curve in own)
        ratio = f"{reach_s / first_s:.2f}" if 0 < first_s < math.inf and reach_s < math.inf else ""
        cells = [
            str(staleness),
            f"{statistics.fmean(curve.age for curve in own):.2f}",
            f"{statistics.fmean(curve.step_s for curve in own):.2f} s",
            f"{statistics.fmean(curve.idle for curve in own):.0%}",
            shown([curve.at(equal_s) for curve in own]),
            f"{reach_s:.0f} s" if reach_s < math.inf else "no",
            ratio,
            shown([curve.scores[-1] for curve in own]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(values: Sequence[float]) -> str:
    estimate = t_interval(np.array(values))
    return f"{estimate.value:.3f} ± {(estimate.high - estimate.low) / 2:.3f}"


def machine() -> str:
    import torch

    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    return f"{cores}, Python {platform.python_version()}, torch {torch.__version__}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/tiny.toml"))
    parser.add_argument(
        "--staleness", type=_numbers, default=[0, 1, 2, 4], help="the first is what others are held against"
    )
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--target", type=float, default=0.7, help="score whose time is measured")
    parser.add_argument("--set", action="append", default=[], help="a further setting of the recipe")
    parser.add_argument("--runs", type=Path, default=Path("runs/async-wall-clock"), help="where the runs are kept")
    parser.add_argument("--out", type=Path, help="a Markdown file")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
