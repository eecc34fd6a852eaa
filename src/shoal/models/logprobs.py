"""Log-probabilities of tokens under softmax(logits / T), with head and softmax in float32 for all model types.

The float32 head on both sides (here and in the engine) removes most of the mismatch between rollouts and training. The
table [tokens, vocabulary] is computed in tiles, and again in the backward pass. A tile is computed by plain torch, on
whose results on a CPU engines and validators rely, or by two Triton kernels that read it once each. Both work in
float32; gradients of logits may be narrower (`dtype`).

N: tokens, H: hidden size, V: vocabulary, B: rows, T: positions.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

import inspect
import logging
import math
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shoal.errors import ModelError

log = logging.getLogger(__name__)

BLOCK, SLOPE_BLOCK = 4096, 2048
LEAST_LOGPROB = -200.0  # as in the kernels: e to its power is 0 in float32, and 0 · −∞ would be NaN
TILE_ELEMENTS, GPU_TILE_ELEMENTS = 2**24, 2**28
# Names of the number that caps or multiplies the logits, by architecture; a power of -1: it divides.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
POWERS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
# Architectures with another meaning of such a name. 0: the setting has no effect.
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
        """A model's own output layer, with the scale and cap of its configuration."""
        layer = model.get_output_embeddings()
        if layer is None:
            raise ModelError(f"{type(model).__name__} has no output layer; it is not a causal language model")
        return cls(layer.weight, getattr(layer, "bias", None), *_rescaling(model.config))

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """In float32, scaled and capped. Products of 16-bit numbers are exact in float32, so a GPU needs no float32
        copy of the head if there is a 16-bit product with a float32 result: without a backward pass."""
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
            logits_NV = torch.tanh(logits_NV)  # in steps: only two tables exist at a time
            logits_NV = logits_NV * self.cap
        return logits_NV

    def through(self, slopes_NV: Tensor, logits_NV: Tensor) -> Tensor:
        """Gradients of the logits → gradients of the product before scale and cap. Both tables are overwritten."""
        if self.cap is not None:
            slopes_NV *= logits_NV.div_(self.cap).square_().neg_().add_(1)
        return slopes_NV if self.scale == 1 else slopes_NV.mul_(self.scale)

    @property
    def is_plain(self) -> bool:
        return self.scale == 1 and self.cap is None


def _rescaling(config: Any) -> tuple[float, float | None]:
    """The scale and the cap in a model's configuration, or in its text part's.

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
            detail = f"which transformers ignores in a model of type {text.model_type}: remove it"
            raise ModelError(f"config.json has {name}, {detail}")
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
    """The last hidden states [B, T, H] of a model, after the final norm: the input of the head."""
    states: Tensor = model.base_model(input_ids=input_ids_BT, use_cache=False, **arguments).last_hidden_state
    return states


def token_logprobs(
    hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature: float = 1.0, tile_elements: int | None = None
) -> TokenLogprobs:
    """Log-probability of each target, and entropy, of the distribution of its hidden state. Both differentiable."""
    count, vocabulary = hidden_NH.shape[0], head.weight.shape[0]
    if tile_elements is not None or not hidden_NH.is_cuda:
        rows = max(1, (tile_elements or TILE_ELEMENTS) // vocabulary)
    else:  # tiles of one size, a multiple of 128 rows for fast matrix products
        tiles = max(1, -(-count * vocabulary // GPU_TILE_ELEMENTS))
        rows = max(1, -(-count // tiles // 128) * 128)
    others = (targets_N, temperature, rows, head.scale, head.cap)
    return TokenLogprobs(*_TokenLogprobs.apply(hidden_NH, head.weight, head.bias, *others))  # type: ignore[no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    """Computes tiles of logits forward, and the same tiles again backward. The gradient of the weights is summed over
    the tiles in float32 and rounded once. The gradient through 16-bit weights is rounded to their type per logit, as
    after every other matrix product of such a model."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float,
        rows: int, scale: float, cap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        head = Head(weight_VH, bias_V, scale, cap)
        tiles = [
            measure(head.logits(hidden), targets, temperature)
            for hidden, targets in zip(torch.split(hidden_NH, rows), torch.split(targets_N, rows), strict=True)
        ]
        measured = TokenMeasures(*(each[0] if len(each) == 1 else torch.cat(each) for each in zip(*tiles, strict=True)))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, *measured)
        ctx.temperature, ctx.rows, ctx.rescaling = temperature, rows, (scale, cap)
        return measured.logprobs_N, measured.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_N: Tensor | None, entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, *measured = ctx.saved_tensors
        if logprobs_N is None and entropy_N is None:
            return (None,) * 8
        slopes_N = torch.zeros_like(measured[0]) if logprobs_N is None else logprobs_N.contiguous()
        head, wanted = Head(weight_VH, bias_V, *ctx.rescaling), ctx.needs_input_grad
        to_hidden_NH = torch.empty_like(hidden_NH) if wanted[0] else None
        to_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wanted[1] else None
        to_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wanted[2] and bias_V is not None else None
        narrow = hidden_NH.is_cuda and hidden_NH.dtype == weight_VH.dtype
        dtype = weight_VH.dtype if narrow else torch.float32
        for start in range(0, hidden_NH.shape[0], ctx.rows):
            tile = slice(start, start + ctx.rows)
            part, here = hidden_NH[tile], TokenMeasures(*(each[tile] for each in measured))
            given = Slopes(slopes_N[tile], None if entropy_N is None else entropy_N[tile].contiguous())
            logits_NV, through = head.logits(part), dtype if head.is_plain else torch.float32
            slopes_NV = slopes(logits_NV, targets_N[tile], here, given, ctx.temperature, through)
            if not head.is_plain:  # slopes of hidden @ weight.T + bias, rounded once
                slopes_NV = head.through(slopes_NV, logits_NV).to(dtype)
            del logits_NV
            if to_hidden_NH is not None:
                to_hidden_NH[tile] = slopes_NV @ weight_VH.to(dtype)
            if to_weight_VH is not None and dtype == torch.float32:
                to_weight_VH.addmm_(slopes_NV.T, part.float())
            elif to_weight_VH is not None:  # in float32: products of 16-bit numbers are exact there
                torch.addmm(to_weight_VH, slopes_NV.T, part.to(dtype), out_dtype=torch.float32, out=to_weight_VH)
            if to_bias_V is not None:
                to_bias_V += slopes_NV.sum(dim=0, dtype=torch.float32)
            del slopes_NV  # before the next tile's is computed
        to_weight = None if to_weight_VH is None else to_weight_VH.to(weight_VH.dtype)
        to_bias = None if to_bias_V is None else to_bias_V.to(bias_V.dtype)
        return to_hidden_NH, to_weight, to_bias, None, None, None, None, None


class TokenMeasures(NamedTuple):
    """Per token: its log-probability, the entropy of its distribution, and log Σ exp(logit / temperature)."""

    logprobs_N: Tensor
    entropy_N: Tensor
    logsum_N: Tensor


@dataclass(frozen=True)
class Slopes:
    """Gradients of a tile's log-probabilities, and of its entropies if these are needed."""

    logprobs_N: Tensor
    entropy_N: Tensor | None


def measure(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> TokenMeasures:
    if usable(logits_NV):
        return _measure_fused(logits_NV, targets_N, temperature)
    all_NV = functional.log_softmax(logits_NV / temperature, dim=-1)
    chosen_N = all_NV.gather(1, targets_N[:, None])[:, 0]
    all_NV.clamp_(min=LEAST_LOGPROB)
    entropy_N = -all_NV.exp().mul_(all_NV).sum(dim=-1)
    return TokenMeasures(chosen_N, entropy_N, torch.zeros_like(chosen_N))


def slopes(
    logits_NV: Tensor, targets_N: Tensor, measured: TokenMeasures, given: Slopes, temperature: float, dtype: torch.dtype
) -> Tensor:
    """The gradient of the sum of (given slope × value) by each logit: [N, V] of `dtype`. Plain torch works in place:
    three tables exist at a time, four with gradients of entropies."""
    if usable(logits_NV):
        return _slopes_fused(logits_NV, targets_N, measured, given, temperature, dtype)
    all_NV = functional.log_softmax(logits_NV / temperature, dim=-1).clamp_(min=LEAST_LOGPROB)
    weight_NV = all_NV.exp()
    if given.entropy_N is None:
        slopes_NV = weight_NV.mul_(-given.logprobs_N[:, None])
    else:
        slopes_NV = weight_NV * -given.logprobs_N[:, None]
        weight_NV.mul_(given.entropy_N[:, None]).mul_(all_NV.add_(measured.entropy_N[:, None]))
        slopes_NV -= weight_NV
    slopes_NV.scatter_add_(1, targets_N[:, None], given.logprobs_N[:, None])
    return slopes_NV.div_(temperature).to(dtype)


def usable(logits_NV: Tensor) -> bool:
    """Whether the kernels can be used for this tile; if not, plain torch gives the same results."""
    return logits_NV.is_cuda and logits_NV.shape[0] > 0 and _compiles(logits_NV.device)


@cache
def _compiles(device: torch.device) -> bool:
    """Tried once: Triton comes with CUDA builds of torch, but needs a C compiler."""
    if find_spec("triton") is None:
        return False
    logits, targets, one = torch.zeros(1, 2, device=device), torch.zeros(1, device=device).long(), torch.ones(1)
    try:
        measured = _measure_fused(logits, targets, 1.0)
        _slopes_fused(logits, targets, measured, Slopes(one.to(device), None), 1.0, torch.float32)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("the head runs without its Triton kernels, slower but with the same results: %s", error)
        return False
    return True


def _measure_fused(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> TokenMeasures:
    from shoal.models.head_kernels import measure_rows  # there may be no Triton

    count, vocabulary = logits_NV.shape
    # Three tensors, not parts of one: Triton compiles again for addresses with another alignment.
    logprobs_N, entropy_N, logsum_N = (logits_NV.new_empty(count) for _ in range(3))
    measure_rows[(count,)](
        logits_NV, targets_N, logprobs_N, entropy_N, logsum_N, 1 / temperature, vocabulary, logits_NV.stride(0),
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return TokenMeasures(logprobs_N, entropy_N, logsum_N)


def _slopes_fused(
    logits_NV: Tensor, targets_N: Tensor, measured: TokenMeasures, given: Slopes, temperature: float, dtype: torch.dtype
) -> Tensor:
    from shoal.models.head_kernels import slope_rows

    count, vocabulary = logits_NV.shape
    found_NV = torch.empty((count, vocabulary), dtype=dtype, device=logits_NV.device)
    entropy_slopes_N = given.logprobs_N if given.entropy_N is None else given.entropy_N
    slope_rows[(count, -(-vocabulary // SLOPE_BLOCK))](
        logits_NV, targets_N, measured.logsum_N, measured.entropy_N, given.logprobs_N, entropy_slopes_N, found_NV,
        1 / temperature, vocabulary, logits_NV.stride(0),
        BLOCK=SLOPE_BLOCK, WITH_ENTROPY=given.entropy_N is not None, num_warps=8,
    )  # fmt: skip
    return found_NV
