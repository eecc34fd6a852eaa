"""Compile a model layer by layer: one decoder layer is compiled once and serves for all of them.

A whole model would be one graph, minutes to compile and again for every change of shape. A layer is small, its twins
share its code, and the number of tokens is compiled as one that changes: packs of other sizes compile nothing anew.
That holds where packs are one flash kernel. As rows of similar lengths each number of rows, and of such buckets, would
be a program of its own, until torch gives up and computes everything uncompiled: the trainer does not compile those.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError

# A trainer computes with and without gradients, packed and in rows: more variants than torch allows for by itself.
VARIANTS = 32
# Share of a layer's activations that is kept; the rest, what is cheapest to compute, is computed again backward. Of a
# Qwen3 layer this drops what is elementwise: less memory and less traffic. Much lower and products are computed twice.
KEPT_ACTIVATIONS = 0.85


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers one after another, whatever the architecture calls the list that holds them.

    >>> from shoal.models.tiny import build_tiny
    >>> len(decoder_layers(build_tiny()))
    3
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of {count} layers; switch trainer.memory.recompute and .compile off"
        )
    # The largest: there may be lists of the same length that hold one small part of each layer.
    largest = max(lists, key=lambda part: sum(weight.numel() for layer in part for weight in layer.parameters()))
    return list(largest)


def compile_layers(model: Any, kept_activations: float = KEPT_ACTIVATIONS) -> None:
    """Compile every layer's `forward` in place; hooks and recomputation around a layer stay outside of it.

    Nothing is compiled until the first call. Weights and their names stay; results agree to rounding.
    """
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    torch._functorch.config.activation_memory_budget = kept_activations
    compiled: dict[type, Any] = {}
    for layer in decoder_layers(model):
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, dynamic=True)
        layer.forward = MethodType(compiled[kind], layer)
