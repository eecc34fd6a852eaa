"""Engines: generate and prefill behind one protocol. Importing this package does not import torch.

    protocol, registry    what an engine is; an engine by name from a model's files
    torch                 any Hugging Face causal language model; rows, decoding: batches with a key-value cache;
                          batching, paged, pages: continuous batching over pages, for GPUs
    scripted              a toy model without torch, for tests of everything around an engine
    memory, shelf         how much is computed at once; engines by policy, a few kept loaded
    asking, groups        tasks as prompts of a model; the groups of leases, drawn and as they are submitted
    dialogue              what the environment says between the model's turns, as tokens

An engine is made from the files that describe a model (`config.json`, …) and gets its weights by `load_policy`.
"""

from shoal.engines.protocol import PLAIN, Chunks, Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.registry import ENGINES, build, check_engine, check_policy, choose, kind_of, warm_up

__all__ = [
    "ENGINES", "PLAIN", "Chunks", "Completion", "Engine", "GenerationRequest", "Prefill", "PrefillRequest",
    "build", "check_engine", "check_policy", "choose", "kind_of", "warm_up",
]  # fmt: skip
