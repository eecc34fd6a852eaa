"""How much memory training takes on each device, computed from config.json before any weight is loaded.

    fixed        weights, float32 masters, gradients, two moments, the reference      exact: from the shapes
    gathered     with several processes: the layer that computes; embeddings and head, whole
    activations  what the backward pass keeps of one micro-batch, counted in a forward pass on torch's meta device;
                 attention is assumed to keep its inputs and output (flash)
    head         a tile of logits with its softmax; on a CPU also copies of the size of the head
    copy         the state that is saved and published: in host memory for a GPU, beside the model on a CPU
    copying      on a GPU: the one weight that is copied out while training continues
    holes        on a CPU: free memory that is not returned to the system; of gathering, with several processes

Compiled layers keep less (`COMPILED`). `COMPILED` and `HOLES` are measured, not derived.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from shoal.engines.memory import cached_token_bytes
from shoal.errors import ResourceError
from shoal.models.load import DTYPES, model_from_files
from shoal.models.logprobs import GPU_TILE_ELEMENTS, TILE_ELEMENTS
from shoal.models.lora import adapted_layers
from shoal.models.packed import decoder_layers
from shoal.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

GIB = 2**30
SMALL = 40  # training takes less than its weights times this, with default settings
PROBE_TOKENS = 512
COMPILED = 0.5
TILES = 3  # logits, their softmax, and its gradient
HOLES = 0.4  # share of the activations of all layers; see `plan`
MAPPED_BYTES = 32 * 2**20  # glibc maps larger blocks, and returns them to the system at once
CONTEXT_BYTES = {"cuda": GIB, "cpu": GIB // 2}  # torch itself, empty
ATTENTION = "shoal_planned"
COPIES = ("copy of the state", "published copy", "holes of gathering")  # only in the first process


@dataclass(frozen=True)
class Shape:
    """The properties of a model that memory depends on. Bytes are per token, in the type that it computes in."""

    kind: str
    weights: int
    trained: int
    layers: int
    largest_layer: int
    outside_layers: int
    hidden: int
    vocabulary: int
    activation_bytes: int
    dtype: torch.dtype
    cached_bytes: int = 0  # of one token while it is decoded, in bfloat16


@dataclass(frozen=True)
class MemoryPlan:
    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.device.values())

    @property
    def others(self) -> int:
        return sum(size for name, size in self.device.items() if name not in COPIES)

    @property
    def certain(self) -> int:
        estimated = ("activations", "head", "copying", "holes", "torch itself")
        return sum(size for name, size in self.device.items() if name not in estimated)


def shape_of(files: Mapping[str, bytes], settings: TrainerSettings) -> Shape:
    """No weight is created."""
    dtype = DTYPES[settings.memory.precision]
    with torch.device("meta"):
        model = model_from_files(files, dtype=settings.memory.precision, device="meta")
    layers = decoder_layers(model)
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    weights = sum(weight.numel() for weight in model.parameters())
    config, trained = model.config.get_text_config(), weights
    if settings.lora is not None:
        adapted = adapted_layers(model, settings.lora.targets).values()
        trained = sum(settings.lora.rank * sum(layer.weight.shape) for layer in adapted)
    return Shape(
        kind=type(model).__name__, weights=weights, trained=trained, layers=len(layers), largest_layer=max(sizes),
        outside_layers=weights - sum(sizes), hidden=config.hidden_size, vocabulary=config.vocab_size,
        activation_bytes=_kept_bytes(model), dtype=dtype, cached_bytes=cached_token_bytes(config, 2),
    )  # fmt: skip


def plan(shape: Shape, settings: TrainerSettings, processes: int, longest: int = 0, kind: str = "cuda") -> MemoryPlan:
    """Of each process, for micro-batches as in the settings, or for one sequence of `longest` tokens."""
    tokens, on_host, alone = max(settings.micro_batch_tokens, longest), kind == "cpu", processes == 1
    width, table = shape.dtype.itemsize, shape.vocabulary * shape.hidden
    stored = shape.weights * (width if alone else 4)  # sharded weights are float32
    fixed = {
        "weights": stored // processes,
        "masters": 4 * shape.trained if alone and width < 4 else 0,
        "gradients": 4 * shape.trained // processes,
        "moments": 8 * shape.trained // processes,
        # With adapters it is the model itself, computed without them.
        "reference": stored // processes if settings.objective.kl > 0 and settings.lora is None else 0,
        # Two layers, because the next one is prefetched; and the float32 gradients of one.
        "gathered": 0 if alone else (2 * shape.largest_layer + shape.outside_layers) * width + 4 * shape.largest_layer,
    }
    # For saving and publishing (`Copies`): weights in the saved type and in the published type, if that is another. On
    # a GPU the largest weight is gathered and rounded before it is copied out.
    rounds = settings.publish_dtype == "bfloat16" and settings.lora is None
    state = 4 * shape.weights + 8 * shape.trained
    # On a CPU each matrix (about a quarter of its layer) that is gathered to be copied leaves a hole of its size.
    leaves_holes = on_host and not alone and shape.largest_layer < MAPPED_BYTES
    sizes = (state, 2 * shape.weights * rounds, state * leaves_holes)
    copied = {name: size for name, size in zip(COPIES, sizes, strict=True) if size}
    copying = ((0 if alone else 4) + (2 if rounds else 0)) * table
    kept = shape.activation_bytes * tokens
    # glibc seldom reuses an aligned block for one of the same size, so temporary tensors leave holes. Larger blocks do
    # not.
    holes = {} if tokens * shape.hidden * width >= MAPPED_BYTES else {"holes": int(HOLES * kept)}
    if settings.memory.compile and kind == "cuda" and width == 2:
        kept = int(kept * COMPILED)
    if settings.memory.recompute:
        kept = shape.layers * shape.hidden * width * tokens + kept // shape.layers
    # GPU kernels need less than is counted here, by more than the gradient of the head. A CPU holds that gradient twice
    # for a moment, and 16-bit weights also in float32.
    tile = 4 * min(TILE_ELEMENTS if on_host else GPU_TILE_ELEMENTS, tokens * shape.vocabulary)
    head = 2 * 4 * tokens * shape.hidden + TILES * tile
    if on_host:
        head += (settings.objective.entropy > 0) * tile + ((settings.lora is None) + (width < 4)) * 4 * table
    device = {
        **{name: size for name, size in fixed.items() if size}, "activations": kept, "head": head,
        **(copied | holes if on_host else {"copying": copying}), "torch itself": CONTEXT_BYTES[kind],
    }  # fmt: skip
    return MemoryPlan(device, {} if on_host else copied)


def alternatives(
    shape: Shape, settings: TrainerSettings, processes: int, longest: int = 0, kind: str = "cuda"
) -> dict[str, MemoryPlan]:
    """The memory with one setting changed; only changes that save memory."""

    def planned(count: int = processes, of: Shape = shape, memory: Mapping[str, Any] = {}, **change: Any) -> MemoryPlan:
        change["memory"] = settings.memory.model_copy(update=memory)
        return plan(of, settings.model_copy(update=change), count, longest, kind)

    smaller = max(longest, settings.micro_batch_tokens // 4)
    found = {
        "trainer.memory.recompute=true": planned(memory={"recompute": True}),
        f"trainer.micro_batch_tokens={smaller}": planned(micro_batch_tokens=smaller),
    }
    if kind == "cuda":
        found["trainer.memory.compile=true"] = planned(memory={"compile": True})
    for count in (2 * processes, 4 * processes, 8 * processes) if kind == "cuda" else ():  # CPUs share a memory
        found[f"trainer.processes={count}"] = planned(count)
    if settings.memory.precision == "float32":
        # Not half of the bytes, because some activations are always kept in float32.
        halved = replace(shape, activation_bytes=int(shape.activation_bytes * 0.6), dtype=torch.bfloat16)
        found['trainer.memory.precision="bfloat16"'] = planned(of=halved, memory={"precision": "bfloat16"})
    return {words: other for words, other in found.items() if other.total < planned().total}


def available(settings: TrainerSettings, processes: int) -> tuple[str, int]:
    if settings.device != "cpu" and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_properties(0).total_memory
    return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


@contextmanager
def within_memory(
    settings: TrainerSettings, files: Mapping[str, bytes], processes: int, weight_bytes: int = 0
) -> Iterator[None]:
    """Load and train a model inside this block. What does not fit becomes a `ResourceError` with the numbers. Before
    loading, only certain numbers refuse; estimates are a warning. Models whose `weight_bytes` on disk are small for
    this machine are not checked."""
    kind, memory_bytes = available(settings, processes)
    if weight_bytes * SMALL >= memory_bytes:
        planned = plan(shape_of(files, settings), settings, processes, kind=kind)
        if planned.certain > memory_bytes:
            raise ResourceError(does_not_fit(planned, memory_bytes))
        if planned.total > memory_bytes:
            log.warning("training may run out of memory: %s", does_not_fit(planned, memory_bytes))
    try:
        yield
    except torch.OutOfMemoryError as error:
        planned = plan(shape_of(files, settings), settings, processes, kind=kind)
        first = str(error).strip().splitlines()[0]
        raise ResourceError(f"out of memory ({first}): {does_not_fit(planned, memory_bytes)}") from error


def does_not_fit(planned: MemoryPlan, memory_bytes: int) -> str:
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in planned.device.items())
    return (
        f"training takes about {planned.total / GIB:.1f} GiB on each device ({parts}), which has "
        f"{memory_bytes / GIB:.1f} GiB; `shoal plan RECIPE` says what would fit: trainer.memory.recompute, fewer "
        "trainer.micro_batch_tokens, more trainer.processes, or [trainer.lora]"
    )


def _kept_bytes(model: Any) -> int:
    """Bytes per token that a forward pass keeps for the backward pass, without weights."""
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device="meta")
    no_mask = torch.zeros((1, 1, 1, 1), device="meta")  # a four-dimensional mask is passed on as it is
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_arguments, **_named: None)
    before, model.config._attn_implementation = model.config._attn_implementation, ATTENTION
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            model.base_model(input_ids=ids, attention_mask=no_mask, use_cache=False)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        log.debug("%s cannot be counted without numbers: %s", type(model).__name__, error)
        # Some models, mostly mixtures of experts, cannot run on the meta device. In a usual layer norms keep two
        # copies of the hidden state each, attention its inputs and output, a gated layer four.
        config = model.config.get_text_config()
        wide = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        inner = (wide or 4 * config.hidden_size) * (getattr(config, "num_experts_per_tok", None) or 1)
        dtype: torch.dtype = next(model.parameters()).dtype
        return int(config.num_hidden_layers * (12 * config.hidden_size + 4 * inner) * dtype.itemsize)
    finally:
        model.config._attn_implementation = before
    total = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights)
    return total // PROBE_TOKENS


def _attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **_options: Any
) -> tuple[Tensor, None]:
    attended: Tensor = _Flash.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).contiguous(), None


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, attended)
        return attended

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        raise NotImplementedError("memory is counted in a forward pass")
