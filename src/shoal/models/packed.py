"""Computes sequences of any lengths end to end in one pass: no padding, and no sequence sees another.

    ids_T        7 1 4 | 9 2 | 5 5 8 8          all layers but attention work on single tokens
    positions_T  0 1 2 | 0 1 | 0 1 2 3
    bounds       0       3     5         9      attention is computed within bounds[i] … bounds[i + 1]

Attention goes through transformers' table of attention functions. Ours, `packed_attention`, is the usual "sdpa" unless
a call has bounds, so an engine in the same process can use the model, too. The bounds are arguments of a layer, so a
layer that is recomputed in the backward pass needs no context. On a GPU in 16 bits attention is one flash kernel over
all sequences; elsewhere sequences of similar length become padded rows for the attention alone.

Layers are compiled one by one (`compile_layers`): a whole model takes minutes to compile, again for every change of
shape; the code of one layer serves all equal layers, with any number of tokens. Only packs for the flash kernel are
compiled: with padded rows each number of rows would need its own code.

T: tokens of all sequences, S: sequences, L: the longest of a bucket, G: heads, D: head size, H: hidden size.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from shoal.errors import ModelError
from shoal.models.logprobs import hidden_states

log = logging.getLogger(__name__)

ATTENTION = "shoal_packed"
# On a GPU a pack is filled up to a multiple of this: aligned products are faster, and there are fewer lengths.
GPU_MULTIPLE = 256
FLASH_HEAD_SIZES = range(8, 257, 8)
# Options of attention that are not supported here.
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "alibi", "cache")
# Exceptions of architectures that do not support packing.
PROBE_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}

# The options for causal attention and shared keys in this version of torch. Compiled code cannot inspect a signature.
VARLEN_KNOWN = inspect.signature(varlen_attn).parameters
VARLEN_OPTIONS: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in VARLEN_KNOWN else {"is_causal": True}
VARLEN_OPTIONS |= {"enable_gqa": True} if "enable_gqa" in VARLEN_KNOWN else {}


@dataclass(frozen=True)
class Packed:
    """Sequences end to end. `bounds` are their cumulative lengths: 0 first, the number of tokens last.

    >>> Packed.of([torch.tensor([7, 1, 4]), torch.tensor([9, 2])]).bounds
    (0, 3, 5)
    """

    ids_T: Tensor
    positions_T: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[Tensor]) -> Packed:
        positions = [torch.arange(len(sequence), device=sequence.device) for sequence in sequences]
        return cls(torch.cat(list(sequences)), torch.cat(positions), tuple(accumulate(map(len, sequences), initial=0)))

    @property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.bounds))

    def filled(self, multiple: int) -> Packed:
        """With one more sequence of zeros, so that the number of tokens is a multiple. Other results do not change."""
        count = -self.bounds[-1] % multiple
        if not count:
            return self
        tail = torch.arange(count, device=self.ids_T.device, dtype=self.positions_T.dtype)
        ids_T = torch.cat([self.ids_T, self.ids_T.new_zeros(count)])
        return Packed(ids_T, torch.cat([self.positions_T, tail]), (*self.bounds, self.bounds[-1] + count))


def packed_states(model: Any, packed: Packed, **options: Any) -> Tensor:
    """The last hidden states [T, H], after the final norm, each as if its sequence were alone."""
    # From now on this model uses our attention. Other models, and its own calls without bounds, do not change.
    if model.config._attn_implementation != ATTENTION:
        AttentionInterface.register(ATTENTION, packed_attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.config._attn_implementation = ATTENTION
    tokens = packed.bounds[-1]
    filled = packed.filled(GPU_MULTIPLE) if packed.ids_T.is_cuda else packed
    # A mask of four dimensions is passed on unchanged and ignored by packed attention, so no real mask is built.
    no_mask = torch.zeros((1, 1, 1, 1), device=packed.ids_T.device)
    layout = {**(_flash_layout(filled) if attends_by_flash(model) else _row_layout(filled)), **options}
    states_1TH = hidden_states(
        model, filled.ids_T[None], position_ids=filled.positions_T[None], attention_mask=no_mask, **layout
    )
    return states_1TH[0, :tokens]


def attends_by_flash(model: Any) -> bool:
    """Whether this model uses the flash kernel: on a GPU, in 16 bits, with usual head sizes. A model that is sharded
    over processes must not be sharded yet."""
    config, weight = model.config.get_text_config(), next(model.parameters())
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and size in FLASH_HEAD_SIZES


def _flash_layout(packed: Packed) -> dict[str, Any]:
    """Both lengths are rounded up, so that a compiled layer sees fewer different ones."""
    bounds = [*packed.bounds, *[packed.bounds[-1]] * (-len(packed.bounds) % 16)]
    bounds_S = torch.tensor(bounds, dtype=torch.int32).to(packed.ids_T.device, non_blocking=True)
    return {"packed_bounds": bounds_S, "packed_longest": 1 << (packed.longest - 1).bit_length()}


def _row_layout(packed: Packed) -> dict[str, Any]:
    """Rows of token numbers per bucket, and each token's place among the rows of all buckets."""
    rows: list[Tensor] = []
    places_T = torch.empty(packed.bounds[-1], dtype=torch.long)
    offset = 0
    for bucket in _buckets([end - start for start, end in pairwise(packed.bounds)]):
        longest = max(length for _index, length in bucket)
        starts = torch.tensor([packed.bounds[index] for index, _length in bucket])[:, None]
        last = torch.tensor([length - 1 for _index, length in bucket])[:, None]
        columns = torch.arange(longest)[None]
        # After its end a sequence's last token is repeated: under causal attention no real token sees it.
        rows.append((starts + columns.minimum(last)).to(packed.ids_T.device))
        real = columns <= last
        places_T[(starts + columns)[real]] = offset + torch.arange(real.numel()).view_as(real)[real]
        offset += real.numel()
    return {"packed_rows": tuple(rows), "packed_places": places_T.to(packed.ids_T.device)}


def _buckets(lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """(index, length) of sequences in buckets, in which none is twice as long as another, so that one long sequence
    does not widen the rows of many short ones.

    >>> _buckets([3, 9, 2, 10])
    [[(3, 10), (1, 9)], [(0, 3), (2, 2)]]
    """
    buckets: list[list[tuple[int, int]]] = []
    for index, length in sorted(enumerate(lengths), key=lambda pair: (-pair[1], pair[0])):
        if length and (not buckets or 2 * length <= buckets[-1][0][1]):
            buckets.append([])
        if length:
            buckets[-1].append((index, length))
    return buckets


def packed_attention(
    module: torch.nn.Module, query_1GTD: Tensor, key_1GTD: Tensor, value_1GTD: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, packed_bounds: Tensor | None = None, packed_longest: int = 0,
    packed_rows: tuple[Tensor, ...] = (), packed_places: Tensor | None = None,
    packed_layers: _AttendedLayers | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within the bounds; without any, what "sdpa" does. Returns [1, T, G, D] as the interface asks."""
    if packed_bounds is None and packed_places is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1GTD, key_1GTD, value_1GTD, attention_mask, scaling=scaling, **options
        )
        return plain
    if refused := [name for name in REFUSED if options.get(name) is not None]:
        raise NotImplementedError(f"this model's attention uses {refused[0]}, which packed attention does not compute")
    if packed_layers is not None:
        packed_layers.count += 1
    query_TGD, key_TGD, value_TGD = (each[0].transpose(0, 1) for each in (query_1GTD, key_1GTD, value_1GTD))
    if packed_bounds is not None:
        lengths = (packed_bounds, packed_bounds, packed_longest, packed_longest)
        attended_TGD = varlen_attn(query_TGD, key_TGD, value_TGD, *lengths, scale=scaling, **VARLEN_OPTIONS)
        assert isinstance(attended_TGD, Tensor)
        return attended_TGD[None], None
    assert packed_places is not None
    parts = []
    for rows_SL in packed_rows:
        # index_select, unlike indexing, has a deterministic backward pass.
        query, key, value = (
            each.index_select(0, rows_SL.flatten()).view(*rows_SL.shape, *each.shape[1:]).transpose(1, 2)
            for each in (query_TGD, key_TGD, value_TGD)
        )
        shared = query.shape[1] != key.shape[1]
        attended_SGLD = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
        )
        parts.append(attended_SGLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, packed_places)[None], None


_known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def supports_packing(model: Any) -> bool:
    """Whether a model computes a pack like single sequences; found out by trying. Models with other attention (sliding
    windows, sinks, soft caps, recurrent layers, own code) do not, and are trained on padded rows. The result is cached;
    the model does not change."""
    if model not in _known:
        before = model.config._attn_implementation
        try:
            kinds = set(getattr(model.config, "layer_types", None) or ())
            fully = kinds <= {"full_attention"} and getattr(model.config, "attention_chunk_size", None) is None
            _known[model] = before in ("sdpa", ATTENTION) and fully and _agrees(model)
        except PROBE_ERRORS as error:
            log.debug("%s is not packed: %s", type(model).__name__, error)
            _known[model] = False
        finally:
            model.config._attn_implementation = before
        if not _known[model]:
            log.info("%s is computed in padded rows: packs do not support its attention", type(model).__name__)
    return _known[model]


class _AttendedLayers:
    """The number of layers that have attended. Not a list: FSDP copies lists among a layer's arguments."""

    count = 0


@torch.no_grad()
def _agrees(model: Any) -> bool:
    """Whether all layers use our function, and states depend neither on other sequences nor on the place."""
    device = next(model.parameters()).device
    ids = torch.arange(15, device=device) % model.config.get_text_config().vocab_size
    first, other, second = ids[:5], ids[5:10], ids[10:]
    layers = _AttendedLayers()
    packed_TH = packed_states(model, Packed.of([first, second]), packed_layers=layers)[5:]
    beside_TH = packed_states(model, Packed.of([other, second]))[5:]
    alone_TH = packed_states(model, Packed.of([second]))
    if layers.count != model.config.get_text_config().num_hidden_layers:
        return False
    bound = PROBE_TOLERANCE.get(packed_TH.dtype, 0.1) * float(alone_TH.abs().max())
    return all(float((packed_TH - each).abs().max()) <= bound for each in (beside_TH, alone_TH))


# A trainer computes with and without gradients, packed and in rows: more variants than torch's default limit.
VARIANTS = 32
# Share of a layer's activations that is kept; the cheapest of the others are computed again in the backward pass. For a
# Qwen3 layer these are the elementwise ones; with a much lower share products are computed twice.
KEPT_ACTIVATIONS = 0.85


def decoder_layers(model: Any) -> list[nn.Module]:
    count = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if not lists:
        detail = f"no list of {count} layers; switch trainer.memory.recompute and .compile off"
        raise ModelError(f"{type(model).__name__} has {detail}")
    # The largest list: others of the same length may hold a small part of each layer.
    largest = max(lists, key=lambda part: sum(weight.numel() for weight in part.parameters()))
    return list(largest)


def compile_layers(model: Any, kept_activations: float = KEPT_ACTIVATIONS) -> None:
    """Compile each layer's `forward` in place, at its first call. Results agree to rounding."""
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    torch._functorch.config.activation_memory_budget = kept_activations
    compiled: dict[type, Any] = {}
    for layer in decoder_layers(model):
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, dynamic=True)
        layer.forward = MethodType(compiled[kind], layer)
