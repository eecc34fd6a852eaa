"""What the seed check costs beside the head: head + all statistics against head + log_softmax + gather, and drawing.

    python benchmarks/check_kernel.py [--device cuda --vocabulary 151936 --hidden 1024 --rows 1024] [--repeat 20]

On CUDA the head multiplies bfloat16 into float32 (`torch.mm(…, out_dtype=torch.float32)`: exact products, float32
sums); on a CPU all is float32. Times are the best of several runs; on CUDA by events, on a CPU processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.sampling import kernels, sampler


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    generator = torch.Generator(device=options.device).manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shapes = ((options.rows, options.hidden), (options.vocabulary, options.hidden))
    hidden, weight = (
        torch.randn(shape, generator=generator, device=options.device).mul_(options.hidden**-0.25 * scale).to(dtype)
        for shape, scale in zip(shapes, (1.7, 1.7), strict=True)
    )
    tokens = torch.randint(0, options.vocabulary, (options.rows,), device=options.device, generator=generator)
    uniforms = torch.rand(options.rows, device=options.device, generator=generator).double()
    logits = head(hidden, weight)

    def line(name: str, call: Callable[[], object]) -> None:
        seconds = min(timed(call, options.device) for _ in range(options.repeat))
        print(f"| {name} | {1e6 * seconds / options.rows:.2f} | {options.rows / seconds:,.0f} |")

    print(
        f"{options.rows} rows, vocabulary {options.vocabulary:,}, hidden {options.hidden}, {options.device}, {dtype}\n"
    )
    print("| work | µs per token | tokens/s |\n|---|---|---|")
    line("head", lambda: head(hidden, weight))
    line("head + log_softmax + gather", lambda: gathered(head(hidden, weight), tokens))
    line("head + statistics", lambda: sampler.token_statistics(head(hidden, weight), tokens))
    line("head + draw", lambda: sampler.sample(head(hidden, weight), uniforms, 1.0))
    line("log_softmax + gather", lambda: gathered(logits, tokens))
    line("statistics", lambda: sampler.token_statistics(logits, tokens))
    line("draw", lambda: sampler.sample(logits, uniforms, 1.0))
    if options.device == "cuda":
        kernels.usable = lambda _: False  # the comparison: plain torch operations in float64
        part = slice(0, min(256, options.rows))
        for name, call in (
            ("statistics", lambda: sampler.token_statistics(logits[part], tokens[part])),
            ("draw", lambda: sampler.sample(logits[part], uniforms[part], 1.0)),
        ):
            seconds = min(timed(call, options.device) for _ in range(options.repeat))
            rows = part.stop
            print(f"| {name}, plain torch, {rows} rows | {1e6 * seconds / rows:.2f} | {rows / seconds:,.0f} |")


def head(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    if hidden_NH.dtype == torch.bfloat16:
        return torch.mm(hidden_NH, weight_VH.T, out_dtype=torch.float32)
    return hidden_NH @ weight_VH.T


def gathered(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return logits_NV.log_softmax(1).gather(1, tokens_N[:, None])


def timed(call: Callable[[], object], device: str) -> float:
    if device != "cuda":
        started = time.process_time()
        call()
        return time.process_time() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of the seed check's statistics beside the head.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
