"""What a calibration measures, and how long it takes: bands by kernel and batch, catch rates, seconds.

    python benchmarks/calibration.py --model FOLDER --device cuda --out benchmarks/results/calibration.md

Measures what a validator measures when a policy comes up: workers of each number format of the device, as validators of
each format see them. The weights are rounded to bfloat16 first, as a run publishes them. `--random` takes the shape of
Qwen3-0.6B with random weights in place of a folder. Tables are appended to `--out`; without it they are printed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from stranger_gpu import make_model

from shoal.engines import ENGINES
from shoal.engines.torch import TorchEngine
from shoal.models import BUILTIN
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.validator.calibrate import BLOCKS, Measurement, Plan, measure, openings, prompts_of

COLUMNS = ("outside_rate", "distance_max", "exponent_rate", "mantissa_mean", "logprob_max")


def measured(options: argparse.Namespace, name: str) -> Iterator[tuple[str, str, Measurement, float]]:
    """One measurement for each format of a worker and of a validator."""
    loaded = load_model(name, "bfloat16")
    views = policy_views(loaded.model)
    prompts = openings(loaded.tokenizer)
    if name in BUILTIN:
        from shoal.environments import EnvironmentSettings, build

        prompts = prompts_of(loaded.files, build(EnvironmentSettings(name="sort")), options.tokens)
    plan = Plan(
        prompts,
        loaded.eos_token_ids,
        sequences=options.sequences,
        tokens=options.tokens,
        temperature=options.temperature,
    )
    for theirs in options.validators:
        began = time.monotonic()
        validator = TorchEngine(loaded.files, theirs, options.device)
        validator.load_policy(None, views)
        print(f"a validator in {theirs} is loaded after {time.monotonic() - began:.1f} s", flush=True)
        for ours in ENGINES["torch"].formats(options.device):
            began = time.monotonic()
            worker = validator.copied(loaded.files, ours)
            found = measure(
                worker, {f"{options.device}/{theirs}": validator}, plan, print, BLOCKS if options.all else ()
            )
            yield ours, theirs, found, time.monotonic() - began


def table(ours: str, theirs: str, found: Measurement, seconds: float) -> Iterator[str]:
    yield f"\n### worker in {ours}, validator in {theirs}: {seconds:.1f} s, {found.groups} honest groups\n"
    yield f"| kernel or batch | tokens | {' | '.join(COLUMNS)} |"
    yield f"|---|---|{'---|' * len(COLUMNS)}"
    for (name, _), bands in found.variants.items():
        yield f"| {name} | {bands.tokens} | {' | '.join(f'{getattr(bands, column):.4g}' for column in COLUMNS)} |"
    yield "\n| cheat | tokens | blocks | by seeds | by proofs | by either |"
    yield "|---|---|---|---|---|---|"
    for catch in found.catches:
        shares = f"{catch.by_sampling:.1%} | {catch.by_proofs:.1%} | {catch.by_either:.1%}"
        yield f"| {catch.cheat} | {catch.tokens} | {catch.blocks} | {shares} |"
    failing = sum(map(len, found.failures.values()))
    decided = "Refused: " + "; ".join(found.problems) if found.problems else "Accepted."
    yield f"\nHonest groups that fail: {failing}. {decided}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--random", action="store_true", help="the shape of Qwen3-0.6B with random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--validators", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sequences", type=int, default=Plan.sequences)
    parser.add_argument("--tokens", type=int, default=Plan.tokens)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--all", action="store_true", help="catch rates of all block sizes (takes longer)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        name = options.model
        if options.random:
            name = f"{scratch}/model"
            make_model(Path(name), "0.6b", "bfloat16")
        title = "Qwen3-0.6B shape, random weights" if options.random else name.rstrip("/").rpartition("/")[2]
        where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        lines = [f"\n## {title} on {where}, {options.sequences} x {options.tokens} tokens"]
        for each in measured(options, name):
            lines += table(*each)
    text = "\n".join(lines) + "\n"
    if options.out is None:
        print(text)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
