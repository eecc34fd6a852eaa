"""Claim: the twin of the described recipe runs ten steps on one GPU with a small real model and loses no sample.

    python benchmarks/intellect2_twin.py --model FOLDER                # 10 steps, bfloat16, on a GPU
    python benchmarks/intellect2_twin.py --steps 2                     # the tiny built-in model; also on a CPU

`recipes/intellect2-tiny.toml` by the real command, `shoal run`: mathematics and code in the sandbox, length budgets,
eight optimizer steps a step, staleness 2. A real model gets larger sizes and the described words for a budget (`REAL`).
Figures are read from what the run left. Exit code 1: the run failed, a sample is unscored, or a kind of task or a
length target did not occur. Code needs bubblewrap (`bwrap`) on the PATH; without it `shoal run` refuses to begin.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from one_gpu import ended, from_database, lost_samples, metrics_of, told
from stranger_gpu import has_gpu, machine

RECIPE = Path(__file__).parents[1] / "recipes" / "intellect2-tiny.toml"
REAL = (
    "run.groups_per_step=16", "run.group_size=16", "run.max_new_tokens=96", "environment.length.targets=[16, 32, 64]",
    "environment.length.alpha=0.003", "environment.length.text=Think for {target} tokens before giving a response.",
    "trainer.learning_rate=3e-6", "trainer.grad_clip=1.0", "trainer.micro_batch_tokens=16384",
    "trainer.publish_dtype=bfloat16", "trainer.memory.precision=bfloat16", "trainer.evaluate_every=5",
    "hub.newcomer_share=1", "validator.keep_versions=4", "validator.memory_share=0.25", "worker.memory_share=0.3",
    "worker.units_per_lease=16",
)  # fmt: skip
COMPUTES = re.compile(r"computing on \w+ in \w+")


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(options, folder)
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    sys.exit(found["exit"])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from shoal.run.recipe import load_recipe

    chosen = [f"run.steps={options.steps}"]
    if options.model is not None:
        chosen += [f"model.path={options.model.resolve()}", *REAL]
    chosen += [f"worker.dtype={options.dtype}"] if options.dtype else []
    chosen += options.set
    recipe = load_recipe(RECIPE, chosen)
    run, log = folder / "run", folder / "run.log"
    command = [sys.executable, "-m", "shoal.cli", "run", str(RECIPE), str(run)]
    command += [word for setting in chosen for word in ("--set", setting)]
    began_ms, began_s = time.time_ns() // 10**6, time.monotonic()
    code = ended(command, log, options.limit_s)
    wall_s = time.monotonic() - began_s
    steps, trained = metrics_of(run), trained_on(run, recipe.environment)
    lost = lost_samples(run, recipe.run.group_size)
    rewards = rewarded(run / "hub" / "hub.db")
    targets = recipe.environment.length.targets if recipe.environment.length else ()
    missing = [kind for kind in ("mathematics", "code") if kind not in trained["kinds"]]
    missing += [f"target {target}" for target in targets if target not in rewards["targets"]]
    said = {path.stem: told(path) for path in sorted((run / "logs").glob("*.log"))}
    result = {
        "machine": machine("cuda" if has_gpu() else "cpu"),
        "model": str(options.model or "tiny"),
        "sandbox": shutil.which("bwrap"),
        "exit": int(code != 0 or lost != 0 or bool(missing)),
        "run_exit": code,
        "wall_s": round(wall_s, 1),
        "steps": len(steps),
        "lost_samples": lost,
        **from_database(run / "hub" / "hub.db", began_ms),
        "trained_on": trained,
        "rewarded": rewards,
        "missing": missing,
        "reward_by_step": [round(row["reward_mean"], 3) for row in steps],
        "staleness_by_step": [row["staleness_max"] for row in steps],
        "step_s": [round(row["step_s"], 2) for row in steps],
        "train_s": [round(row["train_s"], 2) for row in steps],
        "worker": sorted(set(COMPUTES.findall(text_of(run / "logs" / "worker-0.log")))),
        "said": {name: lines for name, lines in said.items() if lines},
    }
    return result if code == 0 else {**result, "end": text_of(log)[-2000:]}


def trained_on(run: Path, settings: Any) -> dict[str, dict[str, int]]:
    """Rollouts by part of the mixture and by kind of task, as the trainer's archive has them."""
    import pyarrow.parquet as pq

    from shoal.environments import build

    if not (run / "trainer" / "rollouts").exists():
        return {"parts": {}, "kinds": {}}
    environment = build(settings)
    tasks = pq.read_table(run / "trainer" / "rollouts", columns=["task"])["task"].to_pylist()
    kinds = {task: environment.task(task).kind for task in set(tasks)}
    return {
        "parts": dict(Counter(task.partition(":")[0] for task in tasks)),
        "kinds": dict(Counter(kinds[task] for task in tasks)),
    }


def rewarded(path: Path) -> dict[str, Any]:
    """What validators gave: rollouts by length target, and the mean of the task's own reward."""
    if not path.exists():
        return {"targets": {}, "task_reward": None}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        verdicts = [json.loads(text)["document"] for (text,) in database.execute("select document from verdicts")]
    parts = [reward["parts"] for verdict in verdicts for reward in verdict["rewards"]]
    return {
        "targets": dict(sorted(Counter(int(part["target"]) for part in parts).items())),
        "task_reward": round(sum(part["task"] for part in parts) / len(parts), 3) if parts else None,
    }


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, instead of the tiny built-in model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", help="of the worker; if not given, the fastest that the run takes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    parser.add_argument("--limit-s", type=float, default=540.0, help="the run is ended after that")
    parser.add_argument("--keep", type=Path, help="a folder for the run, instead of one that is removed")
    parser.add_argument("--out", type=Path, help="where the figures are written, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
