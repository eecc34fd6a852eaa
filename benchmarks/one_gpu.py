"""Claim: all roles of a run share one GPU; saving and publishing cost < 5 % of its time, and the first verdict comes
within 5 s of the first submission.

    python benchmarks/one_gpu.py                                  # Qwen3-0.6B shape, random weights, 20 steps
    python benchmarks/one_gpu.py --model FOLDER --steps 10        # a model of your own
    python benchmarks/one_gpu.py --small --steps 2                # a toy shape; also on a CPU

`recipes/one-gpu.toml` by the real command, `shoal run`, with real processes. Every figure is read from what the run
left: the hub's database, the trainer's metrics, the processes' logs. `--set` goes to `shoal run`.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stranger_gpu import has_gpu, machine, make_model

RECIPE = Path(__file__).parents[1] / "recipes" / "one-gpu.toml"
SMALL = (
    "run.groups_per_step=4", "run.group_size=4", "run.max_new_tokens=24", "worker.units_per_lease=4",
    "trainer.checkpoint_every=2", "trainer.evaluate_every=0", "environment.held_out_size=16",
)  # fmt: skip
TOLD = re.compile(r"loaded ahead|rehearsed|is out, digest|submissions by policy|memory|calibrat|banned|unsure|rejected")
SAID_LINES = 12
GRACE_S = 30.0


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
    model = options.model
    if model is None:
        model = folder / "model"
        make_model(model, "small" if options.small else "0.6b", "bfloat16")
    chosen = [f"model.path={model}", f"run.steps={options.steps}", *(SMALL if options.small else ())]
    if options.dtype:
        chosen += [f"worker.dtype={options.dtype}", f"validator.dtype={options.validator_dtype or options.dtype}"]
    run, log = folder / "run", folder / "run.log"
    command = [sys.executable, "-m", "shoal.cli", "run", str(RECIPE), str(run)]
    command += [word for setting in [*chosen, *options.set] for word in ("--set", setting)]
    began_ms, began_s = time.time_ns() // 10**6, time.monotonic()
    code = ended(command, log, options.limit_s)
    wall_s = time.monotonic() - began_s
    said = {path.stem: told(path) for path in sorted((run / "logs").glob("*.log"))}
    result = {
        "machine": machine("cuda" if has_gpu() else "cpu"),
        "model": str(options.model or ("a toy" if options.small else "Qwen3-0.6B shape, random weights")),
        "exit": code,
        "wall_s": round(wall_s, 1),
        **from_database(run / "hub" / "hub.db", began_ms),
        **from_metrics(run),
        "said": {name: lines for name, lines in said.items() if lines},
    }
    return result if code == 0 else {**result, "end": log.read_text(errors="replace")[-2000:]}


def ended(command: list[str], log: Path, limit_s: float) -> int:
    """Run to its end, or stop it after `limit_s` (exit code 124): there are figures of what it did until then."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return 124


def from_database(path: Path, began_ms: int) -> dict[str, Any]:
    """When submissions came in and were decided, and how. Times are seconds since the command was started."""
    if not path.exists():
        return {"submissions": 0}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "select received_at_ms, decided_at_ms, state, reason, generated_tokens from submissions"
        ).fetchall()
        announced = dict(database.execute("select version, min(announced_at_ms) from policies group by version"))
        verdicts = [json.loads(row[0])["document"] for row in database.execute("select document from verdicts")]
    if not rows:
        return {"submissions": 0}
    decided = [row for row in rows if row[1] is not None]
    first_ms = min(row[0] for row in rows)
    verdict_ms = min((row[1] for row in decided), default=None)
    waits_s = sorted((row[1] - row[0]) / 1000 for row in decided)
    counts = Counter(f"{row[2]} {row[3]}" if row[2] in ("rejected", "unsure") else row[2] for row in rows)
    verified = sum(row[4] for row in decided)
    over_s = (max(row[1] for row in decided) - first_ms) / 1000 if decided else 0.0
    return {
        "first_policy_s": round((min(announced.values()) - began_ms) / 1000, 1) if announced else None,
        "first_submission_s": round((first_ms - began_ms) / 1000, 1),
        "first_verdict_after_it_s": None if verdict_ms is None else round((verdict_ms - first_ms) / 1000, 2),
        "verdict_after_submission_s": {
            "median": round(waits_s[len(waits_s) // 2], 2) if waits_s else None,
            "largest": round(waits_s[-1], 2) if waits_s else None,
        },
        "submissions": dict(counts),
        "verified_tokens": verified,
        "verified_tokens_per_s": round(verified / over_s) if over_s else None,
        "branches": branches_of(verdicts),
    }


def branches_of(verdicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How much was looked at: the share of full audits with a branch, branches by rollout, decoded by audited tokens.
    (The hub asks for about 4 % of the tokens of a node's first 50 groups, 2.6 % later.)"""
    full = [verdict for verdict in verdicts if verdict["depth"] == "full" and verdict["rewards"]]
    looks, rollouts = [verdict["branches"] for verdict in full], sum(len(verdict["rewards"]) for verdict in full)
    looked, tokens = sum(each["looked"] for each in looks), sum(verdict["generated_tokens"] for verdict in full)
    return {
        "audits_looked_at": round(sum(each["looked"] > 0 for each in looks) / max(1, len(full)), 4),
        "looked_by_rollout": round(looked / max(1, rollouts), 4),
        "decoded_by_token": round(sum(each["tokens"] for each in looks) / max(1, tokens), 4),
        "unequal_pairs": sum(len(each["differences"]) for each in looks),
    }


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The rows of the trained steps, as the trainer wrote them."""
    path = run / "trainer" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if "step_s" in row]


def lost_samples(run: Path, group_size: int) -> int:
    """Samples without a score: in groups that no validator could score, and in steps that were trained."""
    path, lost = run / "hub" / "hub.db", sum(int(row["unscored"]) for row in metrics_of(run))
    if path.exists():
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            failed = database.execute("select count(*) from submissions where reason = ?", ("reward.machinery",))
            lost += failed.fetchone()[0] * group_size
    return lost


def from_metrics(run: Path) -> dict[str, Any]:
    """Where the trainer's time went, over all steps but the first, which has everybody's start in it."""
    steps = metrics_of(run)
    later = steps[1:] or steps
    if not later:
        return {"steps": 0}
    total_s = sum(row["step_s"] for row in later)
    blocked_s = sum(row["publish_wait_s"] + row["copy_s"] for row in later)
    columns = ("step_s", "wait_s", "train_s", "copy_s", "publish_wait_s", "hidden_s", "save_s")
    return {
        "steps": len(steps),
        "trainer_idle": round(sum(row["wait_s"] for row in later) / total_s, 4),
        "blocked_by_saving_and_publishing": round(blocked_s / total_s, 4),
        "save_s": [round(row["save_s"], 2) for row in steps],
        "publish_s": [round(row["hidden_s"] - row["save_s"], 2) for row in steps],
        "per_step": [{name: round(row[name], 2) for name in columns} for row in steps],
    }


def told(path: Path) -> list[str]:
    """The lines of a log that say where time went, or that something went wrong: the first ones."""
    lines = path.read_text(errors="replace").splitlines()
    return [line for line in lines if TOLD.search(line)][:SAID_LINES]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, instead of random weights")
    parser.add_argument("--small", action="store_true", help="a toy shape and small batches")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", help="of the worker, and of the validator; if not given, as the recipe says")
    parser.add_argument("--validator-dtype", help="of the validator, if it is another one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    parser.add_argument("--limit-s", type=float, default=560.0, help="the run is ended after that")
    parser.add_argument("--keep", type=Path, help="a folder for the model and the run, instead of one that is removed")
    parser.add_argument("--out", type=Path, help="where the figures are written, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
