"""Log-probabilities of given tokens under softmax(logits / T), head and softmax in float32 whatever the model's type.

The float32 head on both sides (here and in the engine) removes most of the mismatch between rollouts and training.
A table [tokens, vocabulary] is never made whole: it is computed in tiles, and recomputed in the backward pass.

N: tokens, H: hidden size, V: vocabulary, B: rows, T: positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal.errors import ModelError

TILE_ELEMENTS = 2**24
UNSUPPORTED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Head(NamedTuple):
    """The output layer of a model: logits = hidden @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, model: Any) -> Head:
        """A model's own output layer; one that does more to its logits than this is refused, not approximated."""
        for name in UNSUPPORTED_HEADS:
            if getattr(model.config, name, None) not in (None, 1.0, 1):
                raise ModelError(f"models that rescale their logits ({name} in config.json) are not supported")
        layer = model.get_output_embeddings()
        if layer is None:
            raise ModelError(f"{type(model).__name__} has no output layer; it is not a causal language model")
        return cls(layer.weight, getattr(layer, "bias", None))

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """In float32. Products of 16-bit numbers are exact there, so a GPU need not make a float32 copy of the head."""
        bias = None if self.bias is None else self.bias.float()
        if bias is None and self._multiplies_exactly(hidden_NH):
            return torch.mm(hidden_NH, self.weight.T, out_dtype=torch.float32)
        return functional.linear(hidden_NH.float(), self.weight.float(), bias)

    def _multiplies_exactly(self, hidden_NH: Tensor) -> bool:
        """Whether a 16-bit product with a float32 result is there: on a GPU, and without a backward pass."""
        same = hidden_NH.dtype == self.weight.dtype and hidden_NH.dtype in (torch.bfloat16, torch.float16)
        return same and hidden_NH.is_cuda and not torch.is_grad_enabled()


class TokenLogprobs(NamedTuple):
    """Per token, float32: its log-probability, and the entropy of the distribution that it was drawn from."""

    logprobs: Tensor
    entropy: Tensor


def hidden_states(model: Any, input_ids_BT: Tensor, **arguments: Any) -> Tensor:
    """The last hidden states [B, T, H] of a model, after the final norm: what the head sees."""
    output = model.base_model(input_ids=input_ids_BT, use_cache=False, **arguments)
    states: Tensor = output.last_hidden_state
    return states


def token_logprobs(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature: float = 1.0, tile_elements: int = TILE_ELEMENTS
) -> TokenLogprobs:
    """Log-probability of each target under the distribution that its hidden state predicts. Differentiable."""
    rows = max(1, tile_elements // head.weight.shape[0])
    if hidden_NH.shape[0] <= rows:
        return TokenLogprobs(*_tile(hidden_NH, head.weight, head.bias, targets_N, temperature))
    tiles = [
        checkpoint(_tile, hidden, head.weight, head.bias, targets, temperature, use_reentrant=False)
        for hidden, targets in zip(torch.split(hidden_NH, rows), torch.split(targets_N, rows), strict=True)
    ]
    logprobs, entropies = zip(*tiles, strict=True)
    return TokenLogprobs(torch.cat(logprobs), torch.cat(entropies))


def _tile(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_NV = Head(weight_VH, bias_V).logits(hidden_NH) / temperature
    all_NV = functional.log_softmax(logits_NV, dim=-1)
    entropy_N = -(all_NV.exp() * all_NV).sum(dim=-1)
    return all_NV.gather(1, targets_N[:, None])[:, 0], entropy_N
