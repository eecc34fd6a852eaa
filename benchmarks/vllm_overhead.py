"""What do seeds and proofs cost a worker on vLLM, against vLLM's own sampling in the very same engine?

    make test-vllm; OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_overhead.py [--repeat 7] [--shape 2m]

Both sides run through one `VllmEngine`: the same weights, scheduler, cache and batches, every completion to its full
length. `plain` are requests that are not ours: vLLM draws them itself, at temperature 1, without log-probabilities and
with that of the drawn token, which training needs and seeded sampling always gives. `seeds` is `generate` without
proofs, `proofs` with them.

Runs alternate; the median of the rounds' ratios counts, and the best of each side is said beside it. Time is the
processor time of this process, so that other load on the machine tells less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from shoal.engines import GenerationRequest, warm_up
from shoal.engines.vllm.engine import VllmEngine
from shoal.models.load import model_from_files
from shoal.models.state import policy_views
from shoal.protocol import ProofParameters, SamplingParameters

COMMON = {"model_type": "qwen3", "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": 1}
SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    },
    "2m": {
        "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    },
    "40m": {
        "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    },
}  # fmt: skip
PROMPT_TOKENS = 40


def main() -> None:
    options = parse_options()
    warm_up("vllm")
    torch.manual_seed(0)
    files = {"config.json": json.dumps({**COMMON, **SHAPES[options.shape]}).encode()}
    model = model_from_files(files)
    engine = VllmEngine(files, "cpu", "float32")
    engine.load_policy(None, policy_views(model))
    weights, requests = sum(each.numel() for each in model.parameters()), asked(engine, options)
    tokens = options.groups * options.group * options.tokens
    ways: dict[str, Callable[[], None]] = {
        "plain": lambda: plain(engine, requests, None),
        "plain, log-probabilities": lambda: plain(engine, requests, 0),
        "seeds": lambda: ours(engine, requests, None, tokens),
        "proofs": lambda: ours(engine, requests, ProofParameters(), tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(options.repeat):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    print(
        f"{options.shape}: {weights:,} weights, vocabulary {engine.vocabulary_size}, {options.groups} groups of "
        f"{options.group} completions of {options.tokens} tokens, {torch.get_num_threads()} thread(s), "
        f"{options.repeat} rounds"
    )
    for name, taken in seconds.items():
        ratio = statistics.median(each / base for each, base in zip(taken, seconds["plain"], strict=True))
        best = min(taken) / min(seconds["plain"])
        print(f"| {name} | {tokens / min(taken):,.0f} tokens/s | {ratio - 1:+.1%} | {best - 1:+.1%} |")


def asked(engine: VllmEngine, options: argparse.Namespace) -> list[GenerationRequest]:
    random = np.random.default_rng(0)
    sampling = SamplingParameters.model_construct(  # nothing ends a completion early
        temperature=1.0, max_new_tokens=options.tokens, eos_token_ids=()
    )
    return [
        GenerationRequest(
            tuple(random.integers(2, engine.vocabulary_size, PROMPT_TOKENS).tolist()),
            tuple(random.integers(0, 2**63, options.group).tolist()),
            sampling,
        )
        for _ in range(options.groups)
    ]


def plain(engine: VllmEngine, requests: list[GenerationRequest], logprobs: int | None) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vllm = engine._vllm
    vllm.reset_prefix_cache()
    for request in requests:
        for _ in request.seeds:
            parameters = SamplingParams(
                temperature=1.0, max_tokens=request.sampling.max_new_tokens, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY, logprobs=logprobs,
            )  # fmt: skip
            vllm.add_request("plain", {"prompt_token_ids": list(request.prompt_ids)}, parameters)
    while vllm.has_unfinished_requests():
        vllm.step()


def ours(engine: VllmEngine, requests: list[GenerationRequest], proof: ProofParameters | None, expected: int) -> None:
    groups = engine.generate(requests, proof)
    assert sum(len(each.token_ids) for group in groups for each in group) == expected


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="2m")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
