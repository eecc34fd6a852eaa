"""Activations computed twice instead of kept: memory of one layer instead of all, for a third more computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from shoal.models.compiled import decoder_layers


def recompute_layers(model: Any) -> None:
    """From now on the backward pass computes every decoder layer again. The gradients are the same.

    transformers' own switch works in training mode only, where dropout would be noise in the ratio.
    """
    for layer in decoder_layers(model):
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*values, **named)
        return checkpoint(forward, *values, use_reentrant=False, preserve_rng_state=False, **named)

    return call
