"""How fast is a training step, and how much memory does it take, against stock transformers and TRL in the same run?

    PYTHONPATH=src python benchmarks/train_throughput.py [--cases mixed uniform long stock trl] [--steps 8]

Claim: on an H200, with the shape of Qwen3-0.6B (random weights from a configuration, nothing is downloaded), packed
16,384 tokens per device batch in bfloat16, a training step reaches at least 42 % of the matrix rate that the same run
measures, in at most 28 GiB; 65,536 tokens fit in 40 GiB.

What is timed is all of `train_samples`: laying out, copying, forward, loss (two-sided clip), backward, gradient norm,
fused AdamW on float32 masters, rounding to bfloat16, and the numbers that come out. Credited operations, whatever is
computed twice:

    6 · T · (weights in the layers)  +  6 · N · hidden · vocabulary  +  6 · Σ length² · heads · head size · layers

with T tokens read, N of them scored, and half of length² because attention is causal. Alternatives get the same
credit for the same samples: what they compute on padding is not work.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.machinery
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shoal.algorithms.losses import LossParameters, LossTokens, two_sided_clip
from shoal.trainer.learner import make_deterministic, new_learner
from shoal.trainer.samples import Prepared, Sample
from shoal.trainer.settings import MemorySettings, TrainerSettings
from shoal.trainer.step import StepWork, train_samples

LAYERS, HIDDEN, HEADS, KEY_HEADS, HEAD, INNER, VOCABULARY = 28, 1024, 16, 8, 128, 3072, 151_936
MATRICES = LAYERS * (HIDDEN * HEAD * (2 * HEADS + 2 * KEY_HEADS) + 3 * HIDDEN * INNER)
PROMPT = 64
# Tokens that are read, 16,384 together: a batch as it comes, and one as it suits padded rows best.
MIXED = (2048, 2048, 1792, 1536, 1536, 1280, 1152, 1024, 896, 768, 640, 512, 448, 384, 320)
UNIFORM = (2048,) * 8
GIB = 2**30


@dataclass(frozen=True)
class Work:
    """Samples of these lengths (tokens read), `updates` optimizer steps of `micros` device batches each."""

    lengths: Sequence[int]
    micros: int = 1

    @property
    def tokens(self) -> int:
        return sum(self.lengths) * self.micros

    @property
    def operations(self) -> float:
        scored = self.tokens - self.micros * len(self.lengths) * (PROMPT - 1)
        attended = self.micros * sum(length**2 for length in self.lengths) * HEADS * HEAD * LAYERS
        return 6 * (self.tokens * MATRICES + scored * HIDDEN * VOCABULARY + attended)

    def prepared(self) -> Prepared:
        rng = np.random.default_rng(0)
        groups = [[_sample(rng, length) for length in self.lengths] for _ in range(self.micros)]
        return Prepared(groups, without_signal=0, rollouts=len(self.lengths) * self.micros, truncated=0)


def _sample(rng: np.random.Generator, length: int) -> Sample:
    """Its last token is predicted and not read."""
    count = length + 1 - PROMPT
    ids = rng.integers(0, VOCABULARY, length + 1)
    behaviour = rng.normal(-np.log(VOCABULARY), 0.5, count).astype(np.float32)
    return Sample(ids[:PROMPT], ids[PROMPT:], behaviour, float(rng.normal()), np.ones(count, dtype=np.bool_))


def build(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=HEAD, tie_word_embeddings=True,
        max_position_embeddings=40_960, attn_implementation="sdpa", dtype=dtype,
    )  # fmt: skip
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(dtype).eval()


# -- ours and theirs ---------------------------------------------------------------------------------------------------


def ours(work: Work, *, compiled: bool = True, recompute: bool = False) -> Callable[[], None]:
    settings = TrainerSettings(
        minibatches=1,
        micro_batch_tokens=sum(work.lengths) + len(work.lengths),
        memory=MemorySettings(precision="bfloat16", compile=compiled, recompute=recompute),
    )
    learner = new_learner(build(torch.float32), settings)
    assert learner.packed
    if OPTIONS.kept is not None:
        torch._functorch.config.activation_memory_budget = OPTIONS.kept
    prepared, plan = work.prepared(), StepWork(step=0, temperature=1.0)
    return lambda: void(train_samples(learner, prepared, plan))


@dataclass(frozen=True)
class Rows:
    """The same samples as padded rows: ids, which positions are real, and per scored token what the loss takes."""

    ids: torch.Tensor
    mask: torch.Tensor
    scored: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor


def rows_of(work: Work) -> Rows:
    samples = work.prepared().groups[0]
    shape = len(samples), max(sample.length for sample in samples)
    ids, mask, scored = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    for row, sample in enumerate(samples):
        ids[row, : sample.length] = np.concatenate([sample.prompt_ids, sample.token_ids])
        mask[row, : sample.length] = 1
        scored[row, PROMPT : sample.length] = True
    behaviour = np.concatenate([sample.behaviour for sample in samples])
    advantages = np.concatenate([np.full(sample.trained, sample.advantage, dtype=np.float32) for sample in samples])
    return Rows(*(torch.from_numpy(each).cuda() for each in (ids, mask, scored, behaviour, advantages)))


def stock(work: Work) -> Callable[[], None]:
    """transformers as it comes: padded rows, logits of every position, AdamW on bfloat16 weights (no masters)."""
    model = build(torch.bfloat16)
    rows = rows_of(work)
    targets, scored = rows.ids[:, 1:, None], rows.scored[:, 1:]

    def logprobs() -> torch.Tensor:
        logits = model(rows.ids[:, :-1], use_cache=False).logits.float()
        return torch.log_softmax(logits, dim=-1).gather(2, targets)[..., 0][scored]

    return stepping(model, rows, logprobs)


def trl(work: Work) -> Callable[[], None]:
    """TRL's own log-probabilities for GRPO (its fused head, padded rows), then loss and optimizer as in `stock`."""
    trainer, add_head = import_trl()
    model = build(torch.bfloat16)
    add_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    rows = rows_of(work)
    accelerator = types.SimpleNamespace(autocast=contextlib.nullcontext, is_main_process=False)
    self = types.SimpleNamespace(accelerator=accelerator)
    kept = rows.ids.shape[1] - PROMPT

    def logprobs() -> torch.Tensor:
        found, _entropy, _aux = trainer._get_per_token_logps_and_entropies(
            self, model, rows.ids, rows.mask, kept, compute_entropy=True
        )
        return found[rows.scored[:, PROMPT:]].float()

    return stepping(model, rows, logprobs)


class Empty(types.ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_trl() -> tuple[Any, Any]:
    """Its trainer wants two libraries of data at import that none of this uses; where they lack, empty ones do."""
    for name in ("datasets", "pandas"):
        with contextlib.suppress(ImportError):
            __import__(name)
            continue
        module = Empty(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    return GRPOTrainer, add_fused_lm_head


def stepping(model: Any, rows: Rows, logprobs: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    parameters = LossParameters(0.2, 4.0)

    def step() -> None:
        loss = two_sided_clip(LossTokens(logprobs(), rows.behaviour, rows.advantages), parameters).loss_N.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- measuring ---------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, Work, Callable[[Work], Callable[[], None]]]] = {
    "mixed": ("shoal, mixed lengths", Work(MIXED), ours),
    "uniform4": ("shoal, 8 x 2048, 4 device batches an update", Work(UNIFORM, 4), ours),
    "uniform": ("shoal, 8 x 2048", Work(UNIFORM), ours),
    "eager": ("shoal, mixed lengths, not compiled", Work(MIXED), lambda work: ours(work, compiled=False)),
    "recompute": ("shoal, mixed lengths, recompute", Work(MIXED), lambda work: ours(work, recompute=True)),
    "long": ("shoal, 65k tokens, recompute", Work(MIXED * 4), lambda work: ours(work, recompute=True)),
    "stock": ("transformers, 8 x 2048", Work(UNIFORM), stock),
    "stock_mixed": ("transformers, mixed lengths", Work(MIXED), stock),
    "trl": ("TRL, 8 x 2048", Work(UNIFORM), trl),
    "trl_mixed": ("TRL, mixed lengths", Work(MIXED), trl),
}


def main() -> None:
    options = OPTIONS
    if options.deterministic:
        make_deterministic(TrainerSettings())
    peak = matrix_peak()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: 8192³ bfloat16 {peak / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    print("| | tokens/s | ms | TFLOP/s | of the matrix rate | peak GiB | first step s |\n|---|---|---|---|---|---|---|")
    for name in options.cases:
        label, work, make = CASES[name]
        try:
            print(row(label, work, make, options.steps, peak), flush=True)
        except torch.OutOfMemoryError:
            print(f"| {label} | out of memory | | | | | |", flush=True)
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def row(label: str, work: Work, make: Callable[[Work], Callable[[], None]], steps: int, peak: float) -> str:
    step = make(work)
    first = seconds(step)
    seconds(step)
    torch.cuda.reset_peak_memory_stats()
    took = float(np.median([seconds(step) for _ in range(steps)]))
    rate, memory = work.operations / took, torch.cuda.max_memory_allocated() / GIB
    return (
        f"| {label} | {work.tokens / took:,.0f} | {took * 1e3:.1f} | {rate / 1e12:.0f} | {rate / peak:.1%} |"
        f" {memory:.1f} | {first:.1f} |"
    )


def seconds(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def matrix_peak(size: int = 8192) -> float:
    """Operations per second of a large product of random bfloat16 matrices, the median of 20."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [seconds(lambda: void(left @ right)) for _ in range(25)][5:]
    return float(2 * size**3 / np.median(times))


def void(_value: object) -> None:
    return None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=8, help="timed steps per case; the median counts")
    parser.add_argument("--deterministic", action="store_true", help="as a trainer process sets torch")
    parser.add_argument("--kept", type=float, help="share of activations that a compiled layer keeps")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse_options()
    main()
