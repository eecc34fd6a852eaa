"""Engines: generate and prefill behind one protocol.

    protocol  Engine, GenerationRequest, Completion, Chunks, PrefillRequest, Prefill
    torch     TorchEngine: batched decoding with a key-value cache, any Hugging Face causal language model
    rows      Rows: the rows of a batch, and how each gets its next hidden state
    decoding  Decoding, HiddenRows: what has been decoded so far, and its proofs in the making
    memory    Room, is_out_of_memory: how much is computed at once, by what is free and by what did not fit
    dialogue  Dialogue, Line; Talks, for evaluation: what the environment says between the model's turns, as tokens
    asking    Asking: tasks as prompts of a model, and whether it can take them
    scripted  ScriptedEngine: a toy model without torch, for tests of everything around an engine
    groups    generate, submission_of: the groups of leases, drawn and as they are submitted
    registry  ENGINES, build, kind_of: an engine by name from a model's files; choose: one a run takes; warm_up: imports
    shelf     EngineShelf, LoadedPolicy: engines by policy, a few kept loaded within a memory budget

An engine is made from the files that describe a model (`config.json`, …) and gets its weights by `load_policy`.
Importing this package does not import torch.
"""

from shoal.engines.protocol import PLAIN, Chunks, Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.registry import ENGINES, build, check_engine, check_policy, choose, kind_of, warm_up

__all__ = [
    "ENGINES", "PLAIN", "Chunks", "Completion", "Engine", "GenerationRequest", "Prefill", "PrefillRequest",
    "build", "check_engine", "check_policy", "choose", "kind_of", "warm_up",
]  # fmt: skip
