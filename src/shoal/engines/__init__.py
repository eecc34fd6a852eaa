"""Engines: generate and prefill behind one protocol. Importing this package does not import torch.

    protocol, registry    what an engine is; an engine by name from a model's files
    torch                 any Hugging Face causal language model; plain, cache: batches with a key-value cache;
                          batching, decoder, page_cache: continuous batching over pages; cpu: the same on a processor
    rows                  a completion that is being drawn, in every engine
    vllm                  vLLM in this process, for workers; a package, which imports vLLM only when asked for
    scripted              a toy model without torch, for tests of everything around an engine
    memory, shelf         how much is computed at once; engines by policy, a few kept loaded
    asking, groups        tasks as prompts of a model; the groups of leases, drawn and as they are submitted
    dialogue              what the environment says between the model's turns, as tokens

An engine is made from the files that describe a model (`config.json`, …) and gets its weights by `load_policy`.
"""

# fmt: off
# isort: off
from shoal.engines.memory import free_bytes, is_out_of_memory, keep_to_share, release_memory
from shoal.engines.protocol import (
    PLAIN, BoundedEngine, Chunks, Completion, Engine, Finish, GenerationRequest, Groups, OnChunks, Prefill,
    PrefillRequest, TokenIds,
)
from shoal.engines.registry import (
    DTYPES, ENGINES, build, check_engine, check_policy, choose, kind_of, resolved, warm_up,
)
from shoal.engines.shelf import EngineShelf, Fetch, LoadedPolicy
