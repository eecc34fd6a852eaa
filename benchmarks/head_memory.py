"""How much memory do log-probabilities and their gradient take, against logits made whole?

    PYTHONPATH=src python benchmarks/head_memory.py [--tokens 4096] [--vocabulary 16384] [--device cpu]

Claim: the head's own gradient never holds a table [tokens, vocabulary]: its memory is that of a tile and of the
weights' gradient, however many tokens there are. The alternative is `log_softmax` of all logits through autograd.

On a CPU what counts is the largest tensor that any operation makes, forward and backward; on a GPU the allocator's
peak as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.models.logprobs import Head, token_logprobs

MIB = 2**20


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation gave."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.size = max(self.size, each.nbytes)
        return result


def tiled(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
    found = token_logprobs(hidden_NH, Head(weight_VH, None), targets_N)
    return found.logprobs.sum() + 0.01 * found.entropy.sum()


def whole(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
    all_NV = torch.log_softmax((hidden_NH @ weight_VH.T).float(), dim=-1)
    return all_NV.gather(1, targets_N[:, None]).sum() - 0.01 * (all_NV.exp() * all_NV).sum()


def main() -> None:
    options = parse_options()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shapes = (options.tokens, options.hidden), (options.vocabulary, options.hidden)
    tensors = [torch.randn(shape, device=options.device).to(dtype).requires_grad_() for shape in shapes]
    targets_N = torch.randint(0, options.vocabulary, (options.tokens,), device=options.device)
    print(f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocabulary}, {options.device}\n")
    print("| | largest tensor MiB | allocator's peak MiB | seconds of the processor |\n|---|---|---|---|")
    for name, way in (("shoal, in tiles", tiled), ("logits made whole", whole)):
        print(f"| {name} | {measure(way, tensors, targets_N)} |")


def measure(way: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor], targets_N: Tensor) -> str:
    cuda = targets_N.is_cuda
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.process_time()
    with Largest() as largest:
        torch.autograd.grad(way(*tensors, targets_N), tensors)
    if cuda:
        torch.cuda.synchronize()
    peak = f"{(torch.cuda.max_memory_allocated() - before) / MIB:,.0f}" if cuda else "-"
    return f"{largest.size / MIB:,.0f} | {peak} | {time.process_time() - began:.1f}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
