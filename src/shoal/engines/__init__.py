"""Engines: generate and prefill behind one protocol.

    protocol  Engine, GenerationRequest, Completion, Chunks, PrefillRequest, Prefill
    torch     TorchEngine: any Hugging Face causal language model; rows, decoding: batches with a key-value cache;
              batching, paged, pages: continuous batching over pages, for GPUs
    memory    Room, is_out_of_memory: how much is computed at once, by what is free and by what did not fit
    dialogue  Dialogue, dialogue_for, Line: what the environment says between the model's turns, as tokens;
              Talks, greedy_answers, greedy_lines: the same in evaluation, where there are no leases
    asking    Asking: tasks as prompts of a model, and whether it can take them
    scripted  ScriptedEngine: a toy model without torch, for tests of everything around an engine
    groups    generate, submission_of: the groups of leases, drawn and as they are submitted
    registry  ENGINES, build, kind_of: an engine by name from a model's files; choose: one a run takes; warm_up: imports
    shelf     EngineShelf, LoadedPolicy: engines by policy, a few kept loaded within a memory budget

Importing this package does not import torch.
"""

from shoal.engines.protocol import PLAIN, Chunks, Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.registry import ENGINES, build, check_engine, check_policy, choose, kind_of, warm_up

__all__ = [
    "ENGINES", "PLAIN", "Chunks", "Completion", "Engine", "GenerationRequest", "Prefill", "PrefillRequest",
    "build", "check_engine", "check_policy", "choose", "kind_of", "warm_up",
]  # fmt: skip
