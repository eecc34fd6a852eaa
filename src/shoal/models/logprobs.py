"""Log-probabilities of given tokens under softmax(logits / T), head and softmax in float32 whatever the model's type.

The float32 head on both sides (here and in the engine) removes most of the mismatch between rollouts and training.
A table [tokens, vocabulary] is never made whole: it is computed in tiles, and recomputed in the backward pass.

N: tokens, H: hidden size, V: vocabulary, B: rows, T: positions.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.errors import ModelError
from shoal.models.head_tables import Slopes, TokenMeasures, measure, slopes

TILE_ELEMENTS = 2**24
GPU_TILE_ELEMENTS = 2**28
# What architectures call the number that they cap or multiply their logits with; a power of -1: they divide by it.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
POWERS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
# Architectures that mean something else by such a name. 0: they have the setting and do not look at it.
OTHERWISE = {("hyperclovax", "logits_scaling"): 1, ("mpt", "logit_scale"): 0, ("gemma3", "final_logit_softcapping"): 0}


class Head(NamedTuple):
    """The output layer of a model: logits = capped(scale · (hidden @ weight.T + bias)), with cap · tanh(x / cap). Most
    models neither scale (1) nor cap (None), and their logits are the plain product bit for bit."""

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """A model's own output layer, and what its configuration says is done to the logits."""
        layer = model.get_output_embeddings()
        if layer is None:
            raise ModelError(f"{type(model).__name__} has no output layer; it is not a causal language model")
        return cls(layer.weight, getattr(layer, "bias", None), *_rescaling(model.config))

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """In float32, scaled and capped. Products of 16-bit numbers are exact in float32, so a GPU need not make a
        float32 copy of the head where a 16-bit product with a float32 result is there: without a backward pass."""
        narrow = hidden_NH.dtype == self.weight.dtype and hidden_NH.dtype in (torch.bfloat16, torch.float16)
        if self.bias is None and narrow and hidden_NH.is_cuda and not torch.is_grad_enabled():
            logits_NV = torch.mm(hidden_NH, self.weight.T, out_dtype=torch.float32)
        else:
            bias = None if self.bias is None else self.bias.float()
            logits_NV = functional.linear(hidden_NH.float(), self.weight.float(), bias)
        if self.scale != 1:
            logits_NV = logits_NV * self.scale
        if self.cap is not None:
            logits_NV = logits_NV / self.cap
            logits_NV = torch.tanh(logits_NV)  # by steps: only two tables are there at a time
            logits_NV = logits_NV * self.cap
        return logits_NV

    def through(self, slopes_NV: Tensor, logits_NV: Tensor) -> Tensor:
        """Slopes of the logits → slopes of the product that they were made of. Both tables are overwritten."""
        if self.cap is not None:
            slopes_NV *= logits_NV.div_(self.cap).square_().neg_().add_(1)
        return slopes_NV if self.scale == 1 else slopes_NV.mul_(self.scale)

    @property
    def is_plain(self) -> bool:
        return self.scale == 1 and self.cap is None


def _rescaling(config: Any) -> tuple[float, float | None]:
    """The scale and the cap that a model's configuration asks for; of one that sees pictures, its text part's.

    >>> from transformers import GraniteConfig
    >>> _rescaling(GraniteConfig(logits_scaling=8.0))
    (0.125, None)
    """
    text = config.get_text_config()
    scale, cap = 1.0, None
    for name in (*POWERS, *CAPS):
        value, meant = getattr(text, name, None), OTHERWISE.get((config.model_type, name))
        if value is None or meant == 0:
            continue
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{name} in config.json is {value!r}; it has to be a positive number")
        if not hasattr(type(text), name) and name not in inspect.signature(type(text).__init__).parameters:
            raise ModelError(
                f"config.json has {name}, which transformers does not look at in a model of type {text.model_type}: "
                "what is meant would not be computed; remove it if the model does without"
            )
        if name in CAPS:
            cap = float(value)
        else:
            scale *= float(value) ** (meant or POWERS[name])
    return scale, cap


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
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature: float = 1.0, tile_elements: int | None = None
) -> TokenLogprobs:
    """Log-probability of each target under the distribution that its hidden state predicts. Differentiable, both."""
    count, vocabulary = hidden_NH.shape[0], head.weight.shape[0]
    if tile_elements is not None or not hidden_NH.is_cuda:
        rows = max(1, (tile_elements or TILE_ELEMENTS) // vocabulary)
    else:  # tiles are of one size and a multiple of what a GPU's matrix products are made of
        tiles = max(1, -(-count * vocabulary // GPU_TILE_ELEMENTS))
        rows = max(1, -(-count // tiles // 128) * 128)
    how = _How(temperature, rows, head.scale, head.cap)
    found = _TokenLogprobs.apply(hidden_NH, head.weight, head.bias, targets_N, how)  # type: ignore[no-untyped-call]
    return TokenLogprobs(*found)


class _How(NamedTuple):
    """All that is no tensor."""

    temperature: float
    rows: int
    scale: float
    cap: float | None


class _TokenLogprobs(torch.autograd.Function):
    """Tiles of logits forward; the same tiles again backward, since keeping them would be the table made whole. The
    gradient of the weights is summed over the tiles in float32 and rounded once. What flows back through 16-bit weights
    is rounded to their type per logit, as it is after every other matrix product of such a model."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        head = Head(weight_VH, bias_V, how.scale, how.cap)
        tiles = [
            measure(head.logits(hidden), targets, how.temperature)
            for hidden, targets in zip(torch.split(hidden_NH, how.rows), torch.split(targets_N, how.rows), strict=True)
        ]
        measured = TokenMeasures(*(each[0] if len(each) == 1 else torch.cat(each) for each in zip(*tiles, strict=True)))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, *measured)
        ctx.how = how
        return measured.logprobs_N, measured.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_N: Tensor | None, entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, *measured = ctx.saved_tensors
        if logprobs_N is None and entropy_N is None:
            return (None,) * 5
        slopes_N = torch.zeros_like(measured[0]) if logprobs_N is None else logprobs_N.contiguous()
        given = Slopes(slopes_N, entropy_N)
        whole = _Whole(hidden_NH, targets_N, TokenMeasures(*measured), given)
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        head = Head(weight_VH, bias_V, ctx.how.scale, ctx.how.cap)
        return (*_gradients(head, whole, wanted, ctx.how.temperature, ctx.how.rows), None, None)


class _Whole(NamedTuple):
    """What the backward pass knows of all tokens."""

    hidden_NH: Tensor
    targets_N: Tensor
    measured: TokenMeasures
    given: Slopes

    def part(self, tile: slice) -> _Whole:
        entropy_N = self.given.entropy_N
        given = Slopes(self.given.logprobs_N[tile], None if entropy_N is None else entropy_N[tile].contiguous())
        measured = TokenMeasures(*(each[tile] for each in self.measured))
        return _Whole(self.hidden_NH[tile], self.targets_N[tile], measured, given)


def _gradients(
    head: Head, whole: _Whole, wanted: tuple[bool, bool, bool], temperature: float, rows: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of the hidden states, the weights and the bias; None for those that nobody wants."""
    hidden_NH = torch.empty_like(whole.hidden_NH) if wanted[0] else None
    weight_VH = torch.zeros_like(head.weight, dtype=torch.float32) if wanted[1] else None
    bias_V = torch.zeros_like(head.bias, dtype=torch.float32) if wanted[2] and head.bias is not None else None
    narrow = whole.hidden_NH.is_cuda and whole.hidden_NH.dtype == head.weight.dtype
    dtype = head.weight.dtype if narrow else torch.float32
    for start in range(0, whole.hidden_NH.shape[0], rows):
        tile = slice(start, start + rows)
        part = whole.part(tile)
        logits_NV, given = head.logits(part.hidden_NH), dtype if head.is_plain else torch.float32
        slopes_NV = slopes(logits_NV, part.targets_N, part.measured, part.given, temperature, given)
        if not head.is_plain:  # slopes of hidden @ weight.T + bias, rounded once
            slopes_NV = head.through(slopes_NV, logits_NV).to(dtype)
        del logits_NV
        if hidden_NH is not None:
            hidden_NH[tile] = slopes_NV @ head.weight.to(dtype)
        if weight_VH is not None and dtype == torch.float32:
            weight_VH.addmm_(slopes_NV.T, part.hidden_NH.float())
        elif weight_VH is not None:  # in float32 whatever the factors' type: products of 16-bit numbers are exact there
            torch.addmm(weight_VH, slopes_NV.T, part.hidden_NH.to(dtype), out_dtype=torch.float32, out=weight_VH)
        if bias_V is not None:
            bias_V += slopes_NV.sum(dim=0, dtype=torch.float32)
        del slopes_NV  # or it would be there beside the next tile's
    return (
        hidden_NH,
        None if weight_VH is None else weight_VH.to(head.weight.dtype),
        None if bias_V is None or head.bias is None else bias_V.to(head.bias.dtype),
    )
