"""Engines: generate and prefill behind one protocol.

    protocol  Engine, GenerationRequest, Completion, PrefillRequest, Prefill
    torch     TorchEngine: batched decoding with a key-value cache, any Hugging Face causal language model
    scripted  ScriptedEngine: a toy model without torch, for tests of everything around an engine
    registry  ENGINES, build: an engine by name from a model's files; warm_up: its slow imports, beforehand

An engine is made from the files that describe a model (`config.json`, …) and gets its weights by `load_policy`.
Importing this package does not import torch.
"""

from shoal.engines.protocol import Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.registry import ENGINES, build, warm_up

__all__ = ["ENGINES", "Completion", "Engine", "GenerationRequest", "Prefill", "PrefillRequest", "build", "warm_up"]
