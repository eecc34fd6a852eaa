"""How much processor time do proofs take, against the published `toploc` package in the same run?

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/toploc_throughput.py [--published FOLDER] [--out FILE]

The published package is no requirement of shoal. Its wheel may not load with the torch that is installed; its sources
build against it (a C++ compiler is needed, and some minutes), into a folder of their own:

    pip install --no-build-isolation --no-deps --no-binary toploc --target FOLDER toploc==0.1.6

Without `--published` only shoal is measured. Both see the same bfloat16 activations, 1024 tokens in chunks of 32 with
128 points; rounds of both alternate; time is that of all threads of the process. What each builds, the other verifies.

    build          activations → proofs, by the published functions (`build_proofs_bytes`)
    verify         activations and proofs → three numbers each, by the published functions (`verify_proofs_bytes`)
    full check     shoal only: what the validator does, with signs, forgery and the sums (`compare`, `check_proofs`)
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from cast_parts.report import publish, table

import shoal.toploc
from shoal.toploc import backend, check_proofs, commit, compare, top_points

TOKENS, ROWS, TOPK = 1024, 32, 128
PROOFS = TOKENS // ROWS
HIDDEN = (4096, 5120)


@dataclass
class Figures:
    """Microseconds of processor time per proof, one entry for each round."""

    build: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    published = load_published(options.published)
    parts = [describe(published)]
    for hidden in HIDDEN:
        parts += measure(hidden, published, options.rounds)
    command = "OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/toploc_throughput.py --published FOLDER"
    publish("Processor time of TOPLOC proofs", command, parts, options.out)


def load_published(folder: Path | None) -> ModuleType | None:
    if folder is None:
        return None
    sys.path.append(str(folder.resolve()))
    return importlib.import_module("toploc")


def describe(published: ModuleType | None) -> str:
    against = f"toploc {published.__version__} (C++)" if published else "nothing (no --published)"
    return (
        f"shoal ({'numpy' if backend._is_broken else 'numba'}) against {against}, torch {torch.__version__}, numpy"
        f" {np.__version__}, one thread. {TOKENS} tokens, {ROWS} in a chunk, k = {TOPK}, bfloat16. Best of all rounds,"
        " alternating; the ratio in brackets is the median of the rounds' ratios. The machine was not idle."
    )


def measure(hidden: int, published: ModuleType | None, rounds: int) -> list[str]:
    generator = torch.Generator().manual_seed(hidden)
    activations = torch.randn(TOKENS, hidden, generator=generator).to(torch.bfloat16)
    packages = {"shoal": shoal.toploc, **({"published": published} if published else {})}
    proofs = {name: package.build_proofs_bytes(activations, ROWS, TOPK, True) for name, package in packages.items()}
    cross_verify(activations, packages, proofs)
    figures = {name: Figures() for name in packages}
    own = {"many sequences, build": list[float](), "float32, build": list[float](), "full check": list[float]()}
    wide = activations.float()
    for _ in range(rounds):
        for name, package in packages.items():
            build = lambda package=package: package.build_proofs_bytes(activations, ROWS, TOPK, True)  # noqa: E731
            verify = lambda package=package, name=name: package.verify_proofs_bytes(  # noqa: E731
                activations, proofs[name], ROWS, TOPK, True
            )
            figures[name].build.append(cpu_us(build))
            figures[name].verify.append(cpu_us(verify))
        own["many sequences, build"].append(cpu_us(lambda: commit(points_of(activations))))
        own["float32, build"].append(cpu_us(lambda: commit(points_of(wide))))
        own["full check"].append(cpu_us(lambda: check_proofs(compare(points_of(activations), proofs["shoal"]))))
    return [f"Hidden {hidden}, µs of processor time per proof:", comparison_table(figures), own_table(own)]


def points_of(activations: torch.Tensor) -> shoal.toploc.PointBatch:
    return top_points(activations, [TOKENS // 8] * 8, TOPK, ROWS)


def cpu_us(work: Callable[[], object]) -> float:
    """Processor time of all threads, per proof; at least a fifth of a second of work, so that the clock is fine."""
    repeats, spent_s = 0, 0.0
    started_s = time.process_time()
    while spent_s < 0.2:
        work()
        repeats += 1
        spent_s = time.process_time() - started_s
    return spent_s / repeats / PROOFS * 1e6


def cross_verify(activations: torch.Tensor, packages: dict[str, Any], proofs: dict[str, list[bytes]]) -> None:
    """Each accepts what any built. (Ties at the k-th place are chosen by different rules: a few points differ.)"""
    for verifier, package in packages.items():
        for prover, made in proofs.items():
            results = package.verify_proofs_bytes(activations, made, ROWS, TOPK, True)
            most = max(result.exp_mismatches for result in results)
            if len(results) != PROOFS or most > 8 or (verifier == prover and most > 0):
                raise SystemExit(f"{verifier} does not accept the proofs of {prover}: {most} exponents differ")


def comparison_table(figures: dict[str, Figures]) -> str:
    ours, theirs = figures["shoal"], figures.get("published")
    rows = []
    for what in ("build", "verify"):
        mine = getattr(ours, what)
        other = getattr(theirs, what) if theirs else []
        rows.append([what, f"{min(mine):.0f}", f"{min(other):.0f}" if other else "-", ratio(mine, other)])
    return table(["", "shoal", "published", "ratio"], rows)


def ratio(mine: list[float], other: list[float]) -> str:
    if not other:
        return "-"
    typical = statistics.median(b / a for a, b in zip(mine, other, strict=True))
    return f"{min(other) / min(mine):.1f} ({typical:.1f})"


def own_table(own: dict[str, list[float]]) -> str:
    return table(["shoal's own layer", "µs"], [[name, f"{min(values):.0f}"] for name, values in own.items()])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Processor time of TOPLOC proofs, against the published package.")
    parser.add_argument("--published", type=Path, help="the folder that the published package was installed into")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
