"""Claim: `shoal plan` says before anything is loaded how much memory a step takes, to within a fifth.

    .venv/bin/python benchmarks/memory_plan.py                                        # CPU, a 50 M Qwen3 shape
    .venv/bin/python benchmarks/memory_plan.py --device cuda --shape qwen3-0.6b       # a GPU

Every case is a process of its own: random weights, two real `train_step`s of one micro-batch, between them the copy
that is saved. Measured is the peak: of allocations on a GPU; on a CPU of resident memory, less what the process had
before the model. The plan's "torch itself" is left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from shoal.models.load import model_from_files
from shoal.models.lora import AdapterShape, add_adapters
from shoal.protocol import TrainingGroup, TrainingRollout, pack_logprobs, pack_tokens
from shoal.trainer.checkpoint import Copies
from shoal.trainer.learner import new_learner
from shoal.trainer.memory import GIB, plan, shape_of
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, train_step

SHAPES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
              "head_dim": 64, "intermediate_size": 1536, "vocab_size": 32_000},
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936},
}  # fmt: skip
CASES = {
    "float32": {"memory": {"precision": "float32"}},
    "float32, recomputed": {"memory": {"precision": "float32", "recompute": True}},
    "float32, adapters": {"memory": {"precision": "float32"}, "lora": {"rank": 16}},
}
TOKENS = {"cpu": 1024, "cuda": 8192}
# Many CPUs compute 16-bit numbers so slowly that a step takes minutes.
GPU_CASES = {
    "bfloat16": {"memory": {"precision": "bfloat16"}},
    "bfloat16, recomputed": {"memory": {"precision": "bfloat16", "recompute": True}},
    "bfloat16, compiled": {"memory": {"precision": "bfloat16", "compile": True}},
}


def groups(tokens: int, length: int, vocabulary: int) -> list[TrainingGroup]:
    """Groups of two completions that together are about so many tokens."""
    random, made = np.random.default_rng(0), []
    for unit in range(max(1, tokens // (2 * length))):
        completions = [random.integers(3, vocabulary, size=length - 8) for _ in range(2)]
        rollouts = [
            TrainingRollout(pack_tokens(ids), pack_logprobs(np.full(len(ids), -8.0, np.float32)), "eos", reward)
            for ids, reward in zip(completions, (0.0, 1.0), strict=True)
        ]
        made.append(TrainingGroup(unit, f"task/{unit}", 0, pack_tokens(np.arange(3, 11)), rollouts))
    return made


def measure(case: str, options: argparse.Namespace) -> None:
    """One case; prints the plan's and the measured bytes."""
    torch.set_num_threads(1)
    values = {**CASES, **GPU_CASES}[case]
    settings = TrainerSettings.model_validate(
        {**values, "minibatches": 1, "micro_batch_tokens": options.tokens, "device": options.device}
    )
    config = {"model_type": "qwen3", "tie_word_embeddings": True, **SHAPES[options.shape]}
    files = {"config.json": json.dumps(config).encode()}
    planned = plan(shape_of(files, settings), settings, 1, kind=options.device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model, copies = model_from_files(files, device=options.device), Copies()
    if (lora := settings.lora) is not None:
        add_adapters(model, AdapterShape(lora.rank, lora.alpha, lora.targets))
    learner = new_learner(model, settings)
    work = StepWork(0, groups(options.tokens, options.length, int(config["vocab_size"])), 1.0, 0)
    train_step(learner, work)
    copies.take(learner, with_training=True)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        train_step(learner, work)
        peak = torch.cuda.max_memory_allocated()
    else:
        train_step(learner, work)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(json.dumps({"planned": planned.total - planned.device["torch itself"], "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--tokens", type=int, help="of the micro-batch; 1024 on a CPU, 8192 on a GPU")
    parser.add_argument("--length", type=int, default=512, help="of one sequence")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = options.tokens or TOKENS[options.device]
    if options.case:
        return measure(options.case, options)
    print("| case | planned, GiB | measured peak, GiB | planned / measured |\n|---|--:|--:|--:|")
    for case in CASES | (GPU_CASES if options.device == "cuda" else {}):
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--case", case]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        if ran.returncode:
            print(f"| {case} | failed: {ran.stderr.strip().splitlines()[-1]} | | |")
            continue
        found = json.loads(ran.stdout.splitlines()[-1])
        ratio = found["planned"] / found["peak"]
        print(f"| {case} | {found['planned'] / GIB:.2f} | {found['peak'] / GIB:.2f} | {ratio:.2f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
