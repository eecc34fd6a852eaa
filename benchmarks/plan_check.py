"""Claim: `shoal plan` says what a run takes of disk, memory, links and time, role by role, to within a fifth.

    .venv/bin/python benchmarks/plan_check.py                        # 20 M weights in float32, 6 steps, on a CPU
    .venv/bin/python benchmarks/plan_check.py --publish bfloat16
    .venv/bin/python benchmarks/plan_check.py --run FOLDER           # times and links of a finished run on a GPU

`--run` reads what a run with staleness 0 left (`one_gpu.py --keep`): its stages follow one another, so that each has
the GPU for itself. Its first two steps, in which kernels are compiled, do not count; of the others the median does.

A real `shoal run` of a random model with the reward of recipes/sums.py. Its processes' peaks of resident memory
(VmHWM) are read twice a second, the sizes of its folders ten times, and once when it has ended. Its held-out scores
are all equal, so that the newest checkpoint is the best one, too: `keep_best` is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.tiny import build_tiny, build_tokenizer, tokenizer_config
from shoal.models.folder import model_folder
from shoal.run.estimate import Planning
from shoal.run.recipe import Recipe, load_recipe
from shoal.runtime.sizing import Speeds
from shoal.trainer.memory import GIB, available, plan, shape_of

ROOT = Path(__file__).parents[1]
EVERY_S, LOOKS = 0.1, 5
RANDOM_DELTA_SHARE = 0.03 / 4**0.83  # measured: a step of four changes more of random weights, which are small
FOLDERS = {
    "trainer: checkpoints": "trainer/checkpoints", "trainer: export": "trainer/export", "origin": "origin",
    "each relay": "relay-0", "each validator": "validator-0", "each worker": "worker-0", "hub": "hub",
}  # fmt: skip
ROLES = {"trainer": "trainer", "validator": "validator", "join": "worker", "hub": "hub", "relay": "origin, relay"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--publish", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--run", type=Path, help="a finished run's folder: compare times and links with it")
    parser.add_argument("--model", type=Path, help="its model, if it is no longer where the run had it")
    options = parser.parse_args()
    if options.run:
        compare_times(options.run, options.model)
        return
    with tempfile.TemporaryDirectory(prefix="plan-check-") as temporary:
        folder = Path(temporary)
        make_model(folder / "model", options.width, options.layers)
        overrides = [
            f"model.path={folder / 'model'}", f"environment.file={ROOT / 'recipes' / 'sums.py'}",
            f"run.steps={options.steps}", "run.groups_per_step=4", "run.group_size=4", "run.max_new_tokens=16",
            f"trainer.publish_dtype={options.publish}", "trainer.micro_batch_tokens=256", "worker.dtype=float32",
            "trainer.evaluate_tasks=8", "trainer.device=cpu", "trainer.learning_rate=1e-6", "trainer.keep_best=0",
        ]  # fmt: skip
        seen = measure(folder / "run", overrides)
        recipe = load_recipe(ROOT / "recipes" / "tiny.toml", tuple(overrides))
        print_tables(planning(recipe, Speeds(RANDOM_DELTA_SHARE, length_share=1.0)), *seen)


def planning(recipe: Recipe, speeds: Speeds, gpu_gib: float | None = None) -> Planning:
    """What `shoal plan` makes its lines of, for one trainer process."""
    config = (model_folder(recipe.model.path) / "config.json").read_bytes()
    shape, (kind, here) = shape_of({"config.json": config}, recipe.trainer), available(recipe.trainer, 1)
    if gpu_gib is not None:
        kind, here = "cuda", int(gpu_gib * GIB)
    memory = plan(shape, recipe.trainer, 1, recipe.run.max_new_tokens, kind)
    return Planning(recipe, shape, memory, 1, kind, here, speeds)


def make_model(folder: Path, width: int, layers: int) -> None:
    """A random model with the tokenizer of the tiny policy."""
    heads = width // 64
    model = build_tiny(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=64,
    )  # fmt: skip
    model.save_pretrained(folder)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(tokenizer_config())


Sizes = dict[str, float]


def measure(run: Path, overrides: list[str]) -> tuple[Sizes, Sizes, Sizes]:
    """Peaks of resident memory by role, peaks of folders, and folders in the end."""
    command = [sys.executable, "-m", "shoal.cli", "run", str(ROOT / "recipes" / "tiny.toml"), str(run)]
    ran = subprocess.Popen([*command, *(part for one in overrides for part in ("--set", one))], env=os.environ)
    memory: Sizes = defaultdict(float)
    disk: Sizes = defaultdict(float)
    pause = threading.Event()
    looks = 0
    while ran.poll() is None:
        looks += 1
        for role, size in resident(run).items() if looks % LOOKS == 0 else ():
            memory[role] = max(memory[role], size)
        for name, size in folders(run).items():
            disk[name] = max(disk[name], size)
        pause.wait(EVERY_S)
    if ran.returncode:
        sys.exit(f"shoal run ended with exit code {ran.returncode}")
    return memory, disk, folders(run)


def resident(run: Path) -> Sizes:
    found: Sizes = defaultdict(float)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            status = (process / "status").read_text()
        except OSError:
            continue  # it has ended
        if str(run) in words and "shoal.cli" in words and "VmHWM:" in status:
            role = ROLES.get(words[words.index("shoal.cli") + 1], "")
            found[role] = max(found[role], 1024.0 * int(status.partition("VmHWM:")[2].split()[0]))
    return found


def folders(run: Path) -> Sizes:
    found = {}
    for name, folder in FOLDERS.items():
        size = 0
        for place, _folders, names in os.walk(run / folder):  # passes over folders that were removed just now
            for file in names:
                with contextlib.suppress(OSError):
                    size += Path(place, file).lstat().st_size
        found[name] = float(size)
    return found


def print_tables(planned: Planning, memory: Sizes, disk: Sizes, ended: Sizes) -> None:
    print(f"\n{planned.shape.weights / 1e6:.1f} M weights, published in {planned.recipe.trainer.publish_dtype}\n")
    print("| memory | planned, MB | measured, MB | planned / measured |\n|---|--:|--:|--:|")
    for name, device, host, _ in planned.memory():
        row("memory", name, device + host, memory[name])
    print("\n| disk | planned, MB | measured, MB | planned / measured |\n|---|--:|--:|--:|")
    for name, running, finished, _ in planned.disk():
        if name in disk:
            row("disk", name, running, disk[name])
            row("disk", f"{name}, finished", finished, ended[name])


SKIPPED = 2
FETCHED = re.compile(r"policy 0\.(\d+): ([\d.]+) MB \(of ([\d.]+) MB\) in ([\d.]+) s by policy")
JUDGED = re.compile(r"(\d+) submissions by policy 0\.(\d+) judged and reported in ([\d.]+) s")


def compare_times(run: Path, model: Path | None) -> None:
    """What the plan says of the run's recipe, beside what the run took; completions as long as they were."""
    recipe = load_recipe(run / "recipe.toml", (f"model.path={model}",) if model else ())
    rows = [json.loads(line) for line in (run / "trainer" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_s" in row]
    share = statistics.mean(row["tokens"] for row in steps) / (
        recipe.run.groups_per_step * recipe.run.group_size * recipe.run.max_new_tokens
    )
    planned = planning(recipe, Speeds(length_share=share), 141)
    stages = {name: seconds for name, seconds, _ in planned.stages()}
    later = steps[SKIPPED:]
    fetches = [
        (float(megabytes), float(seconds))
        for version, megabytes, _, seconds in FETCHED.findall((run / "logs" / "worker-0.log").read_text())
        if int(version) >= SKIPPED
    ]
    judged: dict[int, float] = defaultdict(float)
    for _, version, seconds in JUDGED.findall((run / "logs" / "validator-0.log").read_text()):
        judged[int(version)] += float(seconds)
    seen = {
        "generate": [seconds for version, seconds in generated(run / "hub" / "hub.db").items() if version >= SKIPPED],
        "audit": [seconds for version, seconds in judged.items() if version >= SKIPPED],
        "train": [row["train_s"] for row in later],
        "publish": [row["hidden_s"] - row["save_s"] for row in later],
        "apply": [seconds for _, seconds in fetches],
    }
    workers, validators = planned.workers, planned.validators
    stages["generate"], stages["audit"] = (
        stages["generate"] * workers,
        stages["audit"] * validators,
    )  # there was one of each
    print("| stage, s a step | planned | measured, median | planned / measured |\n|---|--:|--:|--:|")
    for name, seconds in seen.items():
        middle = statistics.median(seconds)
        print(f"| {name} | {stages[name]:.2f} | {middle:.2f} | {stages[name] / middle:.2f} |")
    links = {name: delta for name, delta, _ in planned.links()}
    measured = statistics.median(megabytes for megabytes, _ in fetches)
    print(f"| delta into each worker, MB | {links['into each worker and validator'] / 1e6:.2f} | {measured:.2f} | "
          f"{links['into each worker and validator'] / 1e6 / measured:.2f} |")  # fmt: skip
    whole = [float(all_) for _, _, all_, _ in FETCHED.findall((run / "logs" / "worker-0.log").read_text())]
    payload = planned.payload / 1e6
    print(f"| a whole version, MB | {payload:.1f} | {whole[0]:.1f} | {payload / whole[0]:.2f} |")


def generated(database: Path) -> dict[int, float]:
    """By version, the seconds from the first lease to the last submission."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        found = connection.execute(
            "select l.version, max(s.received_at_ms) - min(l.issued_at_ms) from submissions s "
            "join leases l on l.lease = s.lease group by l.version"
        )
        return {version: milliseconds / 1000 for version, milliseconds in found}


def row(_kind: str, name: str, planned: float, measured: float) -> None:
    ratio = f"{planned / measured:.2f}" if measured else "-"
    print(f"| {name} | {planned / 1e6:,.1f} | {measured / 1e6:,.1f} | {ratio} |")


if __name__ == "__main__":
    main()
