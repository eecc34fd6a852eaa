"""bfloat16 weights that compute, float32 ones that learn.

    model (bfloat16) ──forward, backward──► gradient of one weight ──added in float32──► master.grad
         ▲                                                                                  │ optimizer, on masters
         └───────────────────────────── rounded once ──────────────────────── master ◄──────┘

A step of training moves most weights by less than bfloat16 can tell apart; the masters keep what would be rounded away.
A gradient is taken over as soon as it is there, so that those in bfloat16 never exist all at once.

Weights that are not trained have no masters. What they were before they were rounded is kept in the host's memory: it
is what is saved, published and exported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class Masters:
    """The float32 weights behind a model's 16-bit ones, by name: `named` are trained, `frozen` are not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.named: Mapping[str, Tensor] = {
            name: nn.Parameter(weight.detach().to(torch.float32, copy=True)) for name, weight in trained.items()
        }
        untrained = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
        # On a CPU the memory that they lay in: `attach` gives the model other.
        self.frozen: Mapping[str, Tensor] = {
            name: weight.detach().to("cpu", torch.float32) for name, weight in untrained.items()
        }
        self._untrained: list[Tensor] = list(untrained.values())
        self._weights: list[Tensor] = list(trained.values())
        self._masters: list[Tensor] = list(self.named.values())

    def attach(self, dtype: torch.dtype) -> None:
        """Round the model's weights to `dtype`, and take over their gradients from now on.

        Buffers keep their type: the frequencies of rotary positions would lose what tells far positions apart.
        """
        for own in self._model.parameters():
            own.data = own.data.to(dtype)
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.register_post_accumulate_grad_hook(_hand_over(master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write_back(self) -> None:
        """The model computes with what the masters have become."""
        torch._foreach_copy_(self._weights, self._masters)

    @torch.no_grad()
    def write_back_all(self) -> None:
        """The same, and with what was loaded into the weights that are not trained."""
        self.write_back()
        for weight, exact in zip(self._untrained, self.frozen.values(), strict=True):
            weight.copy_(exact)


def _hand_over(master: Tensor) -> Callable[[Tensor], None]:
    def take(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.to(torch.float32)
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    return take
