"""The forward pass of a dense decoder (Llama, Qwen2, Qwen3, Mistral) on a processor: tokens of many rows, over pages.

transformers spends most of a small step between its operations, and torch's own matrix product is half as fast as
oneDNN's on some processors. A trial with numbers decides whether a model is computed here (`batching.paged_decoder`);
others are decoded by the plain path.

N: tokens, H: hidden size, Q: query heads, K: key heads, D: size of a head, W: pages of a table, P: positions.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.engines.page_cache import PagedCache
from shoal.models.logprobs import Head

BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
BY_LENGTH = ("dynamic", "longrope")  # kinds of rotation that depend on how long a sequence is
LEAST_WORK = 2**20  # weights times tokens: for larger products oneDNN is faster than torch's own


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def __call__(self, input_NH: Tensor, then: str = "none", other: Tensor | None = None) -> Tensor:
        """The product and what follows it: "swish", or "add" or "mul" with another tensor."""
        if len(input_NH) * self.weight.numel() >= LEAST_WORK and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            operation = torch.ops.mkldnn._linear_pointwise
            if other is None:
                found: Tensor = operation(input_NH, *self, then, [], "")
            else:
                found = operation.binary(input_NH, other, *self, then)
            return found
        found = functional.linear(input_NH, *self)
        if other is None:
            return functional.silu(found) if then == "swish" else found
        return found.add_(other) if then == "add" else found.mul_(other)


class Norm(NamedTuple):
    weight: Tensor
    eps: float

    def __call__(self, states_NH: Tensor) -> Tensor:
        return functional.rms_norm(states_NH, states_NH.shape[1:], *self)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], float]:
        return self.weight.numpy(), self.eps


class Layer(NamedTuple):
    before: Norm
    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm
    key_norm: Norm
    out: Linear
    after: Norm
    gate: Linear
    up: Linear
    down: Linear
    scale: float
    window: int


class DenseModel:
    """Uses a model's weights in place: they may change."""

    def __init__(self, model: Any) -> None:
        """Raises `NotImplementedError` for a model with other parts."""
        base = model.base_model
        is_alike = model.dtype == torch.float32 and _parts(base) == BASE and all(map(_is_dense, base.layers))
        if not is_alike or getattr(base.rotary_emb, "rope_type", "default") in BY_LENGTH:
            raise NotImplementedError("it is not one of the dense decoders that are computed here")
        import shoal.engines.cpu.kernels as kernels  # numba takes a second to import

        self._kernels, self._base, self._head = kernels, base, Head.of(model)
        self._layers, self._norm = [_layer(each) for each in base.layers], _norm(base.norm)
        self._cos_PD = self._sin_PD = np.empty((0, 0), dtype=np.float32)

    def logits(self, states_NH: Tensor) -> Tensor:
        if self._head.is_plain:
            return Linear(self._head.weight.detach(), self._head.bias)(states_NH)
        return self._head.logits(states_NH)

    def states(self, cache: PagedCache, ids_N: Tensor, position_N: Tensor, table_NW: Tensor) -> Tensor:
        """The last hidden states [N, H] of tokens. Their keys and values are stored first, so tokens of one row see
        each other."""
        states_NH, count = self._base.embed_tokens(ids_N), len(ids_N)
        # cosines and sines of at least so many positions, computed once
        positions = table_NW.shape[1] * cache.page
        if len(self._cos_PD) < positions:
            cos_1PD, sin_1PD = self._base.rotary_emb(states_NH, torch.arange(positions)[None])
            self._cos_PD, self._sin_PD = cos_1PD[0].numpy(), sin_1PD[0].numpy()
        tokens = (self._cos_PD, self._sin_PD, position_N.numpy(), table_NW.numpy())
        for layer, stored in zip(self._layers, cache.stored, strict=True):
            keys, values = stored[0].numpy(), stored[1].numpy()
            normed_NH, shape = layer.before(states_NH), (count, -1, keys.shape[3])
            query, key, value = (
                each(normed_NH).numpy().reshape(shape) for each in (layer.query, layer.key, layer.value)
            )
            self._kernels.store_tokens(key, value, *layer.key_norm.arrays, *tokens, keys, values)
            found_NH = torch.empty(count, query[0].size)
            self._kernels.attend_tokens(
                query, *layer.query_norm.arrays, *tokens, keys, values, layer.scale, layer.window,
                found_NH.numpy().reshape(query.shape),
            )  # fmt: skip
            states_NH = layer.out(found_NH, "add", states_NH)
            normed_NH = layer.after(states_NH)
            states_NH = layer.down(layer.up(normed_NH, "mul", layer.gate(normed_NH, "swish")), "add", states_NH)
        return self._norm(states_NH)


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_dense(layer: Any) -> bool:
    if _parts(layer) != LAYER or _parts(layer.mlp) != MLP:
        return False
    norms = [getattr(layer.self_attn, name) for name in HEAD_NORMS & _parts(layer.self_attn)]
    norms += [layer.input_layernorm, layer.post_attention_layernorm]
    linear = [part for part in (*layer.self_attn.children(), *layer.mlp.children()) if part not in norms]
    return (
        _parts(layer.self_attn) in (ATTENTION, ATTENTION | HEAD_NORMS)
        and all(type(part) is nn.Linear for part in linear if part is not layer.mlp.act_fn)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def _layer(layer: Any) -> Layer:
    own, mlp = layer.self_attn, layer.mlp
    window = getattr(own, "sliding_window", getattr(own.config, "sliding_window", None))
    return Layer(
        before=_norm(layer.input_layernorm), query=_linear(own.q_proj), key=_linear(own.k_proj),
        value=_linear(own.v_proj), query_norm=_norm(getattr(own, "q_norm", None)),
        key_norm=_norm(getattr(own, "k_norm", None)), out=_linear(own.o_proj),
        after=_norm(layer.post_attention_layernorm), gate=_linear(mlp.gate_proj), up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj), scale=own.scaling, window=window or 0,
    )  # fmt: skip


def _linear(part: nn.Linear) -> Linear:
    return Linear(part.weight.detach(), None if part.bias is None else part.bias.detach())


def _norm(part: Any) -> Norm:
    return Norm(torch.empty(0), 0.0) if part is None else Norm(part.weight.detach(), part.variance_epsilon)
