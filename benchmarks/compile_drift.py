"""Do compiled layers drift away from eager ones over a long run?

    PYTHONPATH=src python benchmarks/compile_drift.py [--steps 400] [--every 40]      # a GPU, about three minutes
    PYTHONPATH=src python benchmarks/compile_drift.py --device cpu                    # a small model, on a CPU

Claim: over hundreds of optimizer steps, log-probabilities of the compiled bfloat16 model stay as near to those of the
eager one as rounding to bfloat16 is anyway (the band: eager bfloat16 against eager float32, same weights), and the
distance does not grow beyond what the band itself does. Training compiled learns what training eagerly learns.

A model of 108 million weights (on a CPU 1 million) learns a synthetic language (each token depends on the two before
it) twice, from the same weights on the same batches: compiled and eager. Every `--every` steps both are measured on
held-out sequences.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shoal.models.logprobs import Head, token_logprobs
from shoal.models.packed import Packed, packed_states
from shoal.models.state import policy_state
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.samples import Prepared, Sample
from shoal.trainer.settings import MemorySettings, TrainerSettings
from shoal.trainer.step import StepWork, train_samples


@dataclass(frozen=True)
class Scale:
    """How large all of it is. Lengths on a CPU are of one bucket, since each number of buckets is compiled anew."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    sequences: int
    lengths: tuple[int, int]


SCALES = {"cuda": Scale(32_768, 768, 12, 12, 32, (50, 450)), "cpu": Scale(1024, 128, 4, 4, 8, (50, 90))}


def build(device: str) -> Any:
    torch.manual_seed(0)
    scale = SCALES[device]
    config = Qwen3Config(
        vocab_size=scale.vocabulary, hidden_size=scale.hidden, intermediate_size=3 * scale.hidden,
        num_hidden_layers=scale.layers, num_attention_heads=scale.heads, num_key_value_heads=scale.heads // 2,
        head_dim=scale.hidden // scale.heads, tie_word_embeddings=True, attn_implementation="sdpa", dtype=torch.float32,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device).eval()


def sequence(rng: np.random.Generator, lengths: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The next token is a fixed function of the last two, but for one in five, which is drawn."""
    count = int(rng.integers(*lengths))
    ids = rng.integers(0, 512, count)
    for place in range(2, count):
        if rng.random() > 0.2:
            ids[place] = (31 * ids[place - 1] + 17 * ids[place - 2] + 7) % 512
    return ids


def batch(seed: int, scale: Scale) -> Prepared:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(scale.sequences):
        ids = sequence(rng, scale.lengths)
        count = len(ids) - 1
        samples.append(Sample(ids[:1], ids[1:], np.zeros(count, np.float32), 1.0, np.ones(count, np.bool_)))
    return Prepared([samples], without_signal=0, rollouts=scale.sequences, truncated=0)


def learner_of(device: str, *, compiled: bool) -> Learner:
    memory = MemorySettings(precision="bfloat16", compile=compiled)
    settings = TrainerSettings(
        learning_rate=3e-4, warmup_steps=20, grad_clip=1.0, minibatches=1, loss="cross_entropy", memory=memory
    )
    return new_learner(build(device), settings)


@torch.no_grad()
def logprobs(model: Any, packed: Packed) -> torch.Tensor:
    states_TH = packed_states(model, packed)
    targets_T = packed.ids_T.roll(-1)  # the last of a sequence predicts the next one's first: as good a target as any
    return token_logprobs(states_TH, Head.of(model), targets_T).logprobs


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())


def main() -> None:
    options = parse_options()
    began = time.perf_counter()
    device, scale = options.device, SCALES[options.device]
    fast, slow = learner_of(device, compiled=True), learner_of(device, compiled=False)
    exact, twin = build(device), build(device)
    for weight in twin.parameters():  # not its buffers: rotary frequencies stay in float32 on both sides
        weight.data = weight.data.bfloat16()
    sources = [np.random.default_rng(10**6 + number) for number in range(32)]
    held_out = Packed.of([torch.from_numpy(sequence(rng, scale.lengths)).to(device) for rng in sources])
    weights = sum(weight.numel() for weight in exact.parameters())
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {weights / 1e6:.0f} million weights")
    print("| step | loss compiled | loss eager | compiled to eager | eager to float32 | compiled to float32 | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    points = []
    for step in range(options.steps + 1):
        if step % options.every == 0:
            own = policy_state(fast.model)
            for model in (exact, twin):
                for name, tensor in policy_state(model).items():
                    tensor.copy_(own[name])
            compiled, eager, truth = (logprobs(model, held_out) for model in (fast.model, twin, exact))
            near, band, far = distance(compiled, eager), distance(eager, truth), distance(compiled, truth)
            points.append((step, near / band))
        work, plan = batch(step, scale), StepWork(step=step, temperature=1.0, recorded=False)
        rows = [train_samples(learner, work, plan) for learner in (fast, slow)]
        if step % options.every == 0:
            losses = " | ".join(f"{row['loss']:.4f}" for row in rows)
            print(f"| {step} | {losses} | {near:.5f} | {band:.5f} | {far:.5f} | {near / band:.2f} |", flush=True)
    report(points)
    print(f"{options.steps} steps of each, {time.perf_counter() - began:.0f} s")


def report(points: list[tuple[int, float]]) -> None:
    steps, ratios = (np.array(each, dtype=np.float64) for each in zip(*points, strict=True))
    slope, spread = np.polyfit(steps, ratios, 1)[0], float(ratios.std())
    print(f"distance / band: mean {ratios.mean():.2f}, largest {ratios.max():.2f}, spread {spread:.2f},", end=" ")
    print(f"slope {slope * 100:+.3f} per 100 steps")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--device", choices=SCALES, default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
