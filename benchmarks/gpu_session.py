"""All figures of results/honest_bands.md that need a GPU, in one command, each step kept at once.

    python benchmarks/gpu_session.py OUT --smollm2 FOLDER --gemma FOLDER [--budget-s 1500] [--only tests one-gpu …]

Every step writes OUT/NAME.log and what it names there. A step that would begin after the budget is left out; one that
is still at work then is ended, and what it has written stays. OUT/summary.json has exit codes and seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ON_GPU = ["--device", "cuda", "--dtype", "bfloat16"]
BOTH = ["--calibrate", "--against", "cuda/float32", "cuda/bfloat16"]


def script(name: str, *words: object) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, words)]


def steps(out: Path, smollm2: Path, gemma: Path) -> Iterator[tuple[str, float, list[str]]]:
    """Name, most seconds, command."""
    yield "tests", 300, [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "--durations=5", "tests/gpu"]
    yield "one-gpu", 260, script("one_gpu", "--steps", 20, "--limit-s", 240, "--out", out / "one-gpu.json")
    overhead = ["--shape", "0.6b", "--groups", 4, "--group", 32, "--tokens", 256, "--all", "--sequences", 256]
    yield "overhead", 150, script("check_overhead", *ON_GPU, *overhead)
    branches = ["--against", "cuda/float32", "--groups", 32]
    yield "branches", 150, script("steered_branches", "--model", smollm2, *ON_GPU, *branches)
    models = {"smollm2": [smollm2], "gemma": [gemma, "--begin", "<bos>"]}
    for name, model in models.items():
        kept = ["--looks", out / f"{name}-looks", "--keep", out / f"{name}-kept", "--out", out / f"{name}-short.json"]
        short = ["--groups", 2048, "--tokens", 128, "--batch", 64, "--limit-s", 280]
        yield f"{name}-short", 330, script("honest_groups", "--model", *model, *ON_GPU, *BOTH, *short, *kept)
    for name, model in models.items():
        long = ["--groups", 20, "--tokens", 8192, "--endless", "--batch", 20, "--out", out / f"{name}-long.json"]
        yield f"{name}-long", 420, script("honest_groups", "--model", *model, *ON_GPU, *BOTH, *long)
    for name in models:  # needs no GPU: it may also be run later
        looks = [out / f"{name}-looks" / f"cuda-{dtype}.npz" for dtype in ("float32", "bfloat16")]
        yield f"{name}-nodes", 200, script("evidence", "--scales", 1, 1.2, "--looks", *looks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--gemma", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=1500.0)
    parser.add_argument("--only", nargs="*", help="names of steps")
    options = parser.parse_args()
    out, began_s, summary = options.out.resolve(), time.monotonic(), dict[str, object]()
    for folder in (out, out / "smollm2-kept", out / "gemma-kept"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, most_s, command in steps(out, options.smollm2.resolve(), options.gemma.resolve()):
        left_s, step_s = began_s + options.budget_s - time.monotonic(), time.monotonic()
        if (options.only and name not in options.only) or left_s <= 0:
            continue
        with (out / f"{name}.log").open("w") as log:
            try:
                code: object = subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=log, timeout=min(most_s, left_s)
                ).returncode
            except subprocess.TimeoutExpired:
                code = "ended"
        summary[name] = {"exit": code, "seconds": round(time.monotonic() - step_s, 1)}
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(name, summary[name], flush=True)


if __name__ == "__main__":
    main()
