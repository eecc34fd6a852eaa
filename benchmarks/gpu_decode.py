"""How fast rollouts are drawn on a GPU, with seeds and proofs: pages and captured steps against the plain path.

    python benchmarks/gpu_decode.py [--rows 64 256 1024] [--prompt 128] [--tokens 512] [--mixed] [--out F.json]
    python benchmarks/gpu_decode.py --profile          # which kernels a step of 256 rows spends its time in

Groups of 16; every completion runs to its full length, but for `--mixed` (limits of 64 … 2,048 tokens, geometric).
Random weights: speed only. The alternative in the same run is `TorchEngine`'s plain path (`--plain ROWS`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stranger_gpu import SHAPES, machine, make_model

from shoal.engines import GenerationRequest, PrefillRequest
from shoal.engines.torch import TorchEngine
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import ProofParameters, SamplingParameters

GROUP = 16
GIB = 2**30


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", options.shape, "bfloat16", options.device)
        loaded = load_model(str(Path(folder) / "model"), "bfloat16")
    engine = TorchEngine(loaded.files, "bfloat16", options.device)
    engine.load_policy(None, policy_views(loaded.model))
    del loaded
    found: dict[str, Any] = {"machine": machine(options.device), "shape": options.shape}
    never = SHAPES[options.shape][0] - 1
    if options.profile:
        profiled(engine, requests(256, options.prompt, [64] * 256, never))
        return

    def note(name: str, **figures: Any) -> None:
        found[name] = figures
        print(name, figures, flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=2) + "\n")

    for rows in options.rows:
        asked = requests(rows, options.prompt, [options.tokens] * rows, never)
        first = timed(engine, asked, ProofParameters())
        note(f"{rows} rows, first call", **first)
        note(f"{rows} rows, proofs", **timed(engine, asked, ProofParameters()))
        note(f"{rows} rows, no proofs", **timed(engine, asked, None))
    if options.mixed:
        rng = np.random.default_rng(0)
        limits = np.clip(rng.geometric(1 / 400, 1024) + 63, 64, 2048).tolist()
        asked = requests(1024, options.prompt, limits, never)
        engine.generate(asked[:1], ProofParameters())
        note("1024 rows, mixed lengths", **timed(engine, asked, ProofParameters()))
    if options.plain:
        asked = requests(options.plain, options.prompt, [64] * options.plain, never)
        engine._may_page = False
        engine.generate(asked, ProofParameters())
        note(f"{options.plain} rows x 64, plain path", **timed(engine, asked, ProofParameters()))
        engine._may_page = True
        note(f"{options.plain} rows x 64, pages", **timed(engine, asked, ProofParameters()))
    if options.prefill:
        asked = requests(256, options.prompt, [options.tokens] * 256, never)
        groups = engine.generate(asked, None)
        checks = [
            PrefillRequest(request.prompt_ids, each.token_ids, 1.0)
            for request, group in zip(asked, groups, strict=True)
            for each in group
        ]
        for _ in range(2):
            began = time.monotonic()
            engine.prefill(checks, ProofParameters())
            seconds = time.monotonic() - began
        note("prefill with every statistic", tokens_per_s=round(256 * (options.prompt + options.tokens) / seconds))


def requests(rows: int, prompt: int, limits: list[int], never: int) -> list[GenerationRequest]:
    """Groups of 16 rows; the rows of one group have one limit, that of its first."""
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            tuple(rng.integers(0, never, prompt).tolist()),
            tuple(range(start, min(start + GROUP, rows))),
            SamplingParameters(temperature=1.0, max_new_tokens=limits[start], eos_token_ids=(never,)),
        )
        for start in range(0, rows, GROUP)
    ]


def timed(engine: TorchEngine, asked: list[GenerationRequest], proof: ProofParameters | None) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    groups = engine.generate(asked, proof)
    seconds = time.monotonic() - began
    tokens = sum(len(each.token_ids) for group in groups for each in group)
    peak = round(torch.cuda.max_memory_allocated() / GIB, 1) if cuda else 0
    return {"tokens_per_s": round(tokens / seconds), "seconds": round(seconds, 2), "tokens": tokens, "gib": peak}


def profiled(engine: TorchEngine, asked: list[GenerationRequest]) -> None:
    from torch.profiler import ProfilerActivity, profile

    engine.generate(asked, ProofParameters())
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        engine.generate(asked, ProofParameters())
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--plain", type=int, default=0, metavar="ROWS")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
