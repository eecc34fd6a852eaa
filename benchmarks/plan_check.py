"""Claim: `shoal plan` says what a run takes of disk, memory, links and time, role by role, to within a fifth.

    .venv/bin/python benchmarks/plan_check.py                        # 20 M weights in float32, 6 steps, on a CPU
    .venv/bin/python benchmarks/plan_check.py --publish bfloat16 --set run.max_new_tokens=64 --set trainer.processes=2
    .venv/bin/python benchmarks/plan_check.py --run FOLDER           # times and links of a finished run on a GPU
    .venv/bin/python benchmarks/plan_check.py --save FILE --set …    # before it: what recipes/one-gpu.toml will take
    .venv/bin/python benchmarks/plan_check.py --run FOLDER --against FILE

Without `--run`: a real `shoal run` of a random model with the reward of recipes/sums.py. Its processes' peaks of
resident memory (VmHWM) are read twice a second, the sizes of its folders ten times, and once when it has ended. Its
held-out scores are all equal, so that the newest checkpoint is the best one, too: `keep_best` is 0.

`--run` reads what a run with staleness 0 left (`one_gpu.py --keep`): its stages follow one another, so that each has
the GPU for itself. Its first two steps, in which kernels are compiled, do not count; of the others the median does.
The plan has the mean length that completions had. `--against` takes the plan that `--save` wrote before the run began,
with a guessed length: nothing of the run is in it. It refuses a plan of other settings, or one that was made later.
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
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.tiny import build_tiny, build_tokenizer, tokenizer_config
from shoal.cli.plan import planning
from shoal.run.estimate import Planning
from shoal.run.recipe import Recipe, load_recipe
from shoal.runtime.sizing import Speeds

ROOT = Path(__file__).parents[1]
EVERY_S, LOOKS = 0.1, 5
GPU_GIB = 141
RANDOM_DELTA_SHARE = 0.022 / 4**0.83  # measured: a step of four changes more of random weights, which are small
FOLDERS = {
    "trainer: checkpoints": "trainer/checkpoints", "trainer: export": "trainer/export", "origin": "origin",
    "each relay": "relay-0", "each validator": "validator-0", "each worker": "worker-0", "hub": "hub",
}  # fmt: skip
ROLES = {"trainer": "trainer", "validator": "validator", "join": "worker", "hub": "hub", "relay": "origin, relay"}
Sizes = dict[str, float]
Lists = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--publish", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--set", action="append", default=[], help="a further setting of the run")
    parser.add_argument("--run", type=Path, help="a finished run's folder: compare times and links with it")
    parser.add_argument("--model", type=Path, help="its model, if it is no longer where the run had it")
    parser.add_argument("--save", type=Path, help="write what one-gpu.toml with these settings will take")
    parser.add_argument("--length", type=float, help="tokens of a mean completion, of --save: what is expected")
    parser.add_argument("--against", type=Path, help="compare --run with what --save wrote")
    options = parser.parse_args()
    if options.save:
        save_plan(options.save, load_recipe(ROOT / "recipes" / "one-gpu.toml", tuple(options.set)), options.length)
    elif options.run:
        compare_times(options.run, options.model, options.against)
    else:
        check_on_cpu(options)


def check_on_cpu(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="plan-check-") as temporary:
        folder = Path(temporary)
        make_model(folder / "model", options.width, options.layers)
        overrides = [
            f"model.path={folder / 'model'}", f"environment.file={ROOT / 'recipes' / 'sums.py'}",
            f"run.steps={options.steps}", "run.groups_per_step=4", "run.group_size=4", "run.max_new_tokens=16",
            f"trainer.publish_dtype={options.publish}", "trainer.micro_batch_tokens=256", "worker.dtype=float32",
            "trainer.evaluate_tasks=8", "trainer.device=cpu", "trainer.learning_rate=1e-6", "trainer.keep_best=0",
            *options.set,
        ]  # fmt: skip
        run, recipe = folder / "run", load_recipe(ROOT / "recipes" / "tiny.toml", tuple(overrides))
        memory, disk, ended = measure(run, overrides, recipe.trainer.processes)
        speeds = Speeds(RANDOM_DELTA_SHARE, length_share=length_share(run, recipe))
        planned = planning(recipe, recipe.trainer.processes, None, None, speeds)
        print_tables(planned, memory, disk, ended)
        print_table("bytes on links", {name: (size, seen_links(run)[name]) for name, size in links(planned).items()})


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


def measure(run: Path, overrides: list[str], trainers: int) -> tuple[Sizes, Sizes, Sizes]:
    """Peaks of resident memory by role, peaks of folders, and folders in the end."""
    command = [sys.executable, "-m", "shoal.cli", "run", str(ROOT / "recipes" / "tiny.toml"), str(run)]
    ran = subprocess.Popen([*command, *(part for one in overrides for part in ("--set", one))], env=os.environ)
    processes: dict[int, tuple[str, float]] = {}
    disk: Sizes = defaultdict(float)
    pause = threading.Event()
    looks = 0
    while ran.poll() is None:
        looks += 1
        processes |= resident(run) if looks % LOOKS == 0 else {}
        for name, size in folders(run).items():
            disk[name] = max(disk[name], size)
        pause.wait(EVERY_S)
    if ran.returncode:
        sys.exit(f"shoal run ended with exit code {ran.returncode}")
    return by_role(processes.values(), trainers), disk, folders(run)


def by_role(processes: Iterable[tuple[str, float]], trainers: int) -> Sizes:
    """The largest process of each role. Several trainer processes have a parent, which is small."""
    of_role: Lists = defaultdict(list)
    for role, size in sorted(processes, key=lambda each: -each[1]):
        of_role[role].append(size)
    found = {role: sizes[0] for role, sizes in of_role.items()}
    if trainers > 1:
        ranks = of_role["trainer"][:trainers]
        found |= {"trainer, first process": ranks[0], "trainer, each other process": ranks[-1]}
        found[f"trainer, {trainers} on one host"] = sum(ranks)
    return found


def resident(run: Path) -> dict[int, tuple[str, float]]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            status = (process / "status").read_text()
        except OSError:
            continue  # it has ended
        if str(run) in words and "shoal.cli" in words and "VmHWM:" in status:
            role = ROLES.get(words[words.index("shoal.cli") + 1], "")
            found[int(process.name)] = role, 1024.0 * int(status.partition("VmHWM:")[2].split()[0])
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
    print(f"\n{planned.shape.weights / 1e6:.1f} M weights, published in {planned.recipe.trainer.publish_dtype}")
    print_table("memory", {name: (device + host, memory[name]) for name, device, host, _ in planned.memory()})
    rows = {}
    for name, running, finished, _ in planned.disk():
        if name in disk:
            rows[name] = running, disk[name]
            rows |= {f"{name}, finished": (finished, ended[name])} if finished else {}
    print_table("disk", rows)


def print_table(what: str, rows: dict[str, tuple[float, float]], unit: str = "MB", scale: float = 1e6) -> None:
    print(f"\n| {what} | planned, {unit} | measured, {unit} | planned / measured |\n|---|--:|--:|--:|")
    for name, (planned, measured) in rows.items():
        ratio = f"{planned / measured:.2f}" if measured else "-"
        print(f"| {name} | {cell(planned / scale)} | {cell(measured / scale)} | {ratio} |")


def cell(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


SKIPPED = 2
FETCHED = re.compile(r"policy 0\.(\d+): [\d.]+ MB \(of [\d.]+ MB\) in ([\d.]+) s by the local policy")
JUDGED = re.compile(r"(\d+) submissions by policy 0\.(\d+) judged and reported in ([\d.]+) s")


def links(planned: Planning) -> Sizes:
    """The delta and the payload of a version, and a group's bytes."""
    groups = planned.recipe.run.groups_per_step
    return {
        "delta into each worker": planned.delta, "a whole version": float(planned.payload),
        "a group, worker to hub": planned.hub_links()["workers to hub"] / groups,
        "a group, hub to validator": planned.hub_links()["hub to validators"] / groups,
    }  # fmt: skip


def seen_links(run: Path) -> Sizes:
    """Of versions what the manifests say that the origin has left; of groups what the hub has stored, and what of that
    was judged. (A worker's log does not count what an interrupted fetch had brought.)"""
    deltas, manifests = [], [
        json.loads(path.read_text())["document"] for path in (run / "origin" / "manifests").glob("*.json")
    ]  # fmt: skip
    for manifest in manifests:
        version = manifest["policy"]["version"]
        deltas += [each["size_bytes"] for each in manifest["deltas"] if each["base"]["version"] == version - 1 > 0]
    submitted, judged = queried(
        run, "select avg(s.size_bytes), avg(case when v.submission is null then null else s.size_bytes end) "
        "from submissions s left join verdicts v on v.submission = s.submission",
    )[0]  # fmt: skip
    return {
        "delta into each worker": statistics.median(deltas), "a whole version": manifests[0]["size_bytes"],
        "a group, worker to hub": submitted, "a group, hub to validator": judged,
    }  # fmt: skip


def queried(run: Path, query: str) -> list[tuple[float, ...]]:
    database = f"file:{run / 'hub' / 'hub.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(database, uri=True)) as connection:
        return connection.execute(query).fetchall()


def trained(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "trainer" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "step_s" in row]


def length_share(run: Path, recipe: Recipe) -> float:
    most = recipe.run.groups_per_step * recipe.run.group_size * recipe.run.max_new_tokens
    return statistics.mean(row["tokens"] for row in trained(run)) / most


def stages(planned: Planning) -> Sizes:
    """Seconds, with one worker and one validator."""
    found = {name: seconds for name, seconds, _ in planned.stages()}
    found["generate"] *= planned.workers
    found["audit"] *= planned.validators
    return {name: found[name] for name in ("generate", "audit", "train", "publish", "apply")}


def seen_stages(run: Path) -> Sizes:
    judged: dict[int, float] = defaultdict(float)
    for _, version, seconds in JUDGED.findall((run / "logs" / "validator-0.log").read_text()):
        judged[int(version)] += float(seconds)
    later = trained(run)[SKIPPED:]
    fetched = FETCHED.findall((run / "logs" / "worker-0.log").read_text())
    generated = queried(
        run, "select l.version, max(s.received_at_ms) - min(l.issued_at_ms) from submissions s "
        "join leases l on l.lease = s.lease group by l.version",
    )  # fmt: skip
    seen: Lists = {
        "generate": [milliseconds / 1000 for version, milliseconds in generated if version >= SKIPPED],
        "audit": [seconds for version, seconds in judged.items() if version >= SKIPPED],
        "train": [row["train_s"] for row in later],
        "publish": [row["hidden_s"] - row["save_s"] for row in later],
        "apply": [float(seconds) for version, seconds in fetched if int(version) >= SKIPPED],
    }
    return {name: statistics.median(seconds) for name, seconds in seen.items()}


def compare_times(run: Path, model: Path | None, against: Path | None) -> None:
    """What the plan says of the run's recipe, beside what the run took."""
    recipe = load_recipe(run / "recipe.toml", (f"model.path={model}",) if model else ())
    if against is None:
        plan = described(recipe, length_share(run, recipe))
    else:
        plan = saved_before(against, run, recipe)
        length = length_share(run, recipe) * recipe.run.max_new_tokens
        print(f"planned with completions of {plan['length']:.0f} tokens; they had {length:.0f}")
    for what, seen, unit, scale in (
        ("stage of a step", seen_stages(run), "s", 1.0), ("bytes on links", seen_links(run), "MB", 1e6),
    ):  # fmt: skip
        print_table(what, {name: (plan[what][name], size) for name, size in seen.items()}, unit, scale)


def described(recipe: Recipe, share: float) -> dict[str, Any]:
    planned = planning(recipe, 1, GPU_GIB, None, Speeds(length_share=share))
    settings = recipe.model_dump(mode="json", exclude={"model"})
    return {
        "length": share * recipe.run.max_new_tokens, "stage of a step": stages(planned),
        "bytes on links": links(planned), "a step": planned.step_s, "assumed": asdict(planned.speeds),
        "settings": settings, "made_at_ms": time.time_ns() // 10**6,
    }  # fmt: skip


def save_plan(path: Path, recipe: Recipe, length: float | None) -> None:
    share = Speeds().length_share if length is None else length / recipe.run.max_new_tokens
    plan = described(recipe, share)
    path.write_text(json.dumps(plan, indent=1) + "\n")
    print(json.dumps({name: plan[name] for name in ("length", "stage of a step", "bytes on links")}, indent=1))


def saved_before(path: Path, run: Path, recipe: Recipe) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(path.read_text())
    settings = recipe.model_dump(mode="json", exclude={"model"})
    if others := [name for name, section in settings.items() if plan["settings"].get(name) != section]:
        sys.exit(f"{path} is the plan of other settings than the run in {run} had: {', '.join(others)}")
    if plan["made_at_ms"] >= queried(run, "select min(issued_at_ms) from leases")[0][0]:
        sys.exit(f"{path} was made after the run in {run} had begun")
    return plan


if __name__ == "__main__":
    main()
