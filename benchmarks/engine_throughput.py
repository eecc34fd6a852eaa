"""How fast is the torch engine, against `transformers.generate` in the same run?

    OMP_NUM_THREADS=1 python benchmarks/engine_throughput.py [--model tiny] [--prompts 64] [--group 16] [--tokens 16]

Every completion is made to run to the full length (the end token is one that is never drawn), so that both sides do
the same work. Runs alternate and the median of several counts. Time is the processor time of this process, so that
other load on the machine tells less; with `--threads` above 1 it adds up over threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from shoal.engines.protocol import GenerationRequest, PrefillRequest
from shoal.engines.torch import TorchEngine
from shoal.models.load import LoadedModel, load_model
from shoal.protocol import SamplingParameters

PROMPT_TOKENS = 9


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model)
    engine = TorchEngine.wrap(loaded.model, pages=True)
    requests = make_requests(loaded, options)
    completions = [c for group in engine.generate(requests) for c in group]
    tokens = sum(len(completion.token_ids) for completion in completions)
    prefills = [
        PrefillRequest(request.prompt_ids, completion.token_ids, 1.0)
        for request, group in zip(requests, engine.generate(requests), strict=True)
        for completion in group
    ]
    ours, theirs, prefilled = medians_of(
        options.repeat,
        lambda: engine.generate(requests),
        lambda: transformers_generate(loaded, requests, options),
        lambda: engine.prefill(prefills),
    )
    rows = options.prompts * options.group
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    print(f"{weights:,} weights, {options.prompts} prompts x {options.group} samples, {tokens / rows:.1f} tokens each")
    print(f"engine.generate        {tokens / ours:10,.0f} tokens/s   x{theirs / ours:.2f} of transformers")
    print(f"transformers.generate  {rows * options.tokens / theirs:10,.0f} tokens/s")
    print(f"engine.prefill         {tokens / prefilled:10,.0f} tokens/s checked")


def make_requests(loaded: LoadedModel, options: argparse.Namespace) -> list[GenerationRequest]:
    never_drawn = loaded.model.config.vocab_size
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=options.tokens, eos_token_ids=(never_drawn,))
    rng = np.random.default_rng(0)
    low, high = 5, min(loaded.model.config.vocab_size, 15)
    return [
        GenerationRequest(
            tuple(int(token) for token in rng.integers(low, high, PROMPT_TOKENS)),
            tuple(range(index * options.group, (index + 1) * options.group)),
            sampling,
        )
        for index in range(options.prompts)
    ]


def transformers_generate(
    loaded: LoadedModel, requests: list[GenerationRequest], options: argparse.Namespace
) -> torch.Tensor:
    ids = torch.tensor([request.prompt_ids for request in requests])
    output: torch.Tensor = loaded.model.generate(
        ids, do_sample=True, num_return_sequences=options.group, max_new_tokens=options.tokens,
        min_new_tokens=options.tokens, top_k=0, temperature=1.0,
    )  # fmt: skip
    return output


def medians_of(repeat: int, *calls: Callable[[], object]) -> list[float]:
    """Processor seconds of each call, the median of `repeat` alternating runs."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for call, own in zip(calls, seconds, strict=True):
            started = time.process_time()
            call()
            own.append(time.process_time() - started)
    return list(map(median, seconds))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of the torch engine against transformers.generate.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
