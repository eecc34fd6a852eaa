"""What would each cheat gain, how soon do the checks see it, and what passes? docs/guides/attack-your-run.md quotes it.

    OMP_NUM_THREADS=1 python benchmarks/cheats.py [--groups 64] [--versions 3] [--learning-rate 1e-4] [--part trials …]

Three parts, on the tiny policy:

    trials   every cheat at version 0, by the validator's own judge: reward, groups rejected, tokens until it is caught
             and banned; by a worker in float32, and by one that says it is in bfloat16, which is forgiven more
    stale    a few steps are trained here, and groups of version 0 judged as what they claim to be: later ones
    run      a real run: hub, origin, trainer, validator and an honest worker, attacked by every cheat

The tables are also written to benchmarks/results/adversaries.md. The attackers are those of tests/adversary.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from kit.attack import Attacked, table  # noqa: E402
from kit.trial import PROFILES, Harness, Judged, Trial, audit_job  # noqa: E402
from shoal.adversary import CHEATS, Cheat, find_cheat  # noqa: E402
from shoal.adversary.steering import steer  # noqa: E402
from shoal.adversary.tokens import Steal  # noqa: E402
from shoal.engines.shelf import LoadedPolicy  # noqa: E402
from shoal.protocol import Lease, Outcome, Submission, TrainingGroup, TrainingRollout  # noqa: E402
from shoal.run.recipe import Recipe, load_recipe  # noqa: E402  # noqa: E402
from shoal.trainer.learner import new_learner  # noqa: E402
from shoal.trainer.step import StepWork, train_step  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "adversaries.md"
RECIPE = ROOT / "recipes" / "tiny.toml"
FLOAT32, BFLOAT16 = "torch/cpu/float32", "torch/cpu/bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=64, help="groups per cheat")
    parser.add_argument("--versions", type=int, default=3, help="how many steps to train")
    parser.add_argument("--learning-rate", type=float, help="another one than the recipe's")
    parser.add_argument("--part", choices=PARTS, nargs="*", default=list(PARTS), help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = [PARTS[name](options) for name in options.part]
    text = "\n\n".join(["# Adversaries", f"`python benchmarks/cheats.py`, {time.strftime('%Y-%m-%d')}.", *parts])
    if set(options.part) == set(PARTS):
        RESULTS.write_text(text + "\n")


def said(text: str) -> str:
    print(text, flush=True)
    return text


# ── trials ───────────────────────────────────────────────────────────────────────────────────────────────────────


def trials(options: argparse.Namespace) -> str:
    units = range(options.groups)
    lines = [
        f"## Every cheat on trial: {options.groups} groups of 16\n",
        "Mean reward if nobody looked; groups rejected; groups (tokens) until the first rejection, and the ban.\n",
        "| cheat | reward | rejected | caught at | banned at | reasons | as bfloat16 | caught at | banned at |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|",
    ]
    print("\n".join(lines))
    for name in ("honest", *CHEATS):
        exact, loose = (tried(name, profile, units) for profile in (FLOAT32, BFLOAT16))
        cells = [name, f"{reward(exact):.3f}", *columns(exact), reasons(exact.judged), *columns(loose)]
        lines.append(said(f"| {' | '.join(cells)} |"))
    return "\n".join(lines)


def tried(name: str, profile: str, units: Sequence[int]) -> Trial:
    harness = Harness(profile=profile)
    if name == "steal":
        Steal.library[:] = [submission for _, submission in harness.groups(Cheat(), [harness.lease(10**6)])]
    if name == "steer":  # slow, for it looks at every token of the vocabulary: only until it is banned
        return harness.tried(steer(PROFILES[profile].sampling)(), units, stop_when_banned=True)
    return harness.tried(Cheat() if name == "honest" else find_cheat(name), units)


def columns(trial: Trial) -> tuple[str, str, str]:
    share = f"{len(trial.rejected)} of {len(trial.judged)}"
    return share, place(trial.until_caught()), place(trial.until_banned())


def reward(trial: Trial) -> float:
    harness = scorer()
    rewards = [harness.reward_of(each) for each in trial.judged]
    return sum(rewards) / len(rewards)


@cache
def scorer() -> Harness:
    return Harness()


def place(until: tuple[int, int] | None) -> str:
    return "never" if until is None else f"{until[0]} ({until[1]})"


def reasons(judged: Sequence[Judged]) -> str:
    counts = Counter(each.verdict.reason for each in judged if each.verdict.outcome is not Outcome.ACCEPTED)
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())


# ── stale ────────────────────────────────────────────────────────────────────────────────────────────────────────


def stale(options: argparse.Namespace) -> str:
    rate = () if options.learning_rate is None else (f"trainer.learning_rate={options.learning_rate}",)
    recipe, harness = load_recipe(RECIPE, rate), Harness()
    units = range(10**6, 10**6 + options.groups)  # tasks that are not trained on here
    old = list(harness.groups(Cheat(), [harness.lease(unit) for unit in units]))
    learner = new_learner(harness.loaded.model, recipe.trainer)
    lines = [said(f"## Stale: {options.groups} groups of version 0, judged as groups of a later version\n")]
    unit = 0
    for version in range(1, options.versions + 1):
        batch, unit = collect(harness, recipe, unit, version - 1)
        train_step(learner, StepWork(version - 1, batch, recipe.run.temperature, 0, recipe.run.seed))
        judged = [claimed(harness, lease.unit, version, submission) for lease, submission in old]
        rejected = sum(each.verdict.outcome is Outcome.REJECTED for each in judged)
        lines.append(said(f"* version {version}: {rejected} rejected ({reasons(judged)})"))
    return "\n".join(lines)


def claimed(harness: Harness, unit: int, version: int, submission: Submission) -> Judged:
    """An old group, as what it would claim to be."""
    lease = harness.lease(unit, version)
    said_so = harness.as_of(submission, lease)
    truth = LoadedPolicy(lease.policy, harness.engine(), harness.files)
    [verdict] = harness.judge.verdicts([audit_job(lease, said_so)], truth)
    return Judged(lease, said_so, verdict)


def collect(harness: Harness, recipe: Recipe, unit: int, version: int) -> tuple[list[TrainingGroup], int]:
    """A step's groups by the present weights: those whose rewards differ, from `unit` on."""
    batch: list[TrainingGroup] = []
    while len(batch) < recipe.run.groups_per_step:
        [(lease, submission)] = harness.groups(Cheat(), [harness.lease(unit, version)])
        rewards = harness.rewards(unit, submission)
        if len(set(rewards)) > 1:
            batch.append(training_group(lease, submission, rewards))
        unit += 1
    return batch, unit


def training_group(lease: Lease, submission: Submission, rewards: Sequence[float]) -> TrainingGroup:
    rollouts = [
        TrainingRollout(tokens=each.tokens, logprobs=each.logprobs, finish=each.finish, reward=value)
        for each, value in zip(submission.rollouts, rewards, strict=True)
    ]
    return TrainingGroup(
        unit=lease.unit, task=lease.task, version=lease.policy.version, prompt=submission.prompt, rollouts=rollouts
    )


# ── run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(_options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder, Attacked.running(Path(folder) / "run") as attacked:
        Steal.library[:] = attacked.watch.bodies_of(next(iter(attacked.watch.judged)).node)
        attacked.attack([name for name in CHEATS if name != "steer"])  # which is too slow for its leases
        return said(f"## A real run, attacked by every cheat (groups of 8)\n\n{table(attacked)}")


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {"trials": trials, "stale": stale, "run": run}


if __name__ == "__main__":
    main()
