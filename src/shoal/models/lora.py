"""Low-rank adapters: a few small matrices are trained, and the weights they sit on stay as they were.

    y = x·Wᵀ + b  +  (alpha / rank) · (x·Aᵀ)·Bᵀ            A: [rank, in], B: [out, rank], B = 0 at first

A policy with adapters is published like any other: all its weights by name, and `adapter.json` beside config.json. Only
A and B ever change, so the base travels once, with the first anchor. Workers and validators compute with the adapters
in place, as the trainer does: merged weights would be rounded otherwise, and proofs would differ. An export is merged,
or in PEFT's format.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import ModelError
from shoal.models.folder import PEFT_DOWN, PEFT_PREFIX, PEFT_UP, PEFT_WEIGHTS, PeftAdapter, refuse_unknown_targets

ADAPTER_FILE = "adapter.json"
DOWN, UP = "lora_a", "lora_b"


@dataclass(frozen=True)
class AdapterShape:
    """Where adapters sit and how large they are; `adapter.json` is this as JSON."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def as_file(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode() + b"\n"


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter. Weight and bias are the layer's own, under their own names, and frozen."""

    def __init__(self, layer: nn.Linear, scale: float, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = scale
        self.active = True
        self.lora_a = nn.Parameter(down)
        self.lora_b = nn.Parameter(up)

    def forward(self, values: Tensor) -> Tensor:
        output = functional.linear(values, self.weight, self.bias)
        if not self.active:
            return output
        return output + functional.linear(functional.linear(values, self.lora_a), self.lora_b) * self.scale


def add_adapters(model: nn.Module, shape: AdapterShape) -> None:
    """Freeze a model and add adapters to each linear layer that `shape.targets` names. Its results do not change."""
    if any(isinstance(module, AdaptedLinear) for module in model.modules()):
        raise ModelError("this model has adapters already")
    found = adapted_layers(model, shape.targets)
    model.requires_grad_(False)
    for name, layer in found.items():
        down = torch.empty((shape.rank, layer.in_features), dtype=layer.weight.dtype, device=layer.weight.device)
        up = torch.zeros((layer.out_features, shape.rank), dtype=down.dtype, device=down.device)  # nothing changes yet
        if not down.is_meta:  # A follows from the layer's name, so that it is the same at every start
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
            bound = (1.0 / layer.in_features) ** 0.5
            random = torch.rand(down.shape, generator=torch.Generator().manual_seed(seed))
            down.copy_(random * (2 * bound) - bound)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, AdaptedLinear(layer, shape.scale, down, up))


def adapter_shape(files: Mapping[str, bytes]) -> AdapterShape | None:
    """The adapters of a policy, from the files beside its weights; None if it has none."""
    if ADAPTER_FILE not in files:
        return None
    try:
        values = json.loads(files[ADAPTER_FILE])
        shape = AdapterShape(int(values["rank"]), float(values["alpha"]), tuple(map(str, values["targets"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the policy's {ADAPTER_FILE} cannot be read: {error!r}") from error
    if not (0 < shape.rank <= 65_536 and shape.alpha > 0 and shape.targets):
        raise ModelError(f"the policy's {ADAPTER_FILE} makes no sense: {shape}")
    return shape


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The policy that the adapters started from, without a second copy of the weights."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.active = False
    try:
        yield
    finally:
        for module in adapted:
            module.active = True


def merged(tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    """Weights and files of the same policy as an ordinary model; without adapters as they are."""
    shape = adapter_shape(files)
    if shape is None:
        return dict(tensors), dict(files)
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith((f".{DOWN}", f".{UP}"))}
    for name in (name.removesuffix(f".{DOWN}") for name in tensors if name.endswith(f".{DOWN}")):
        down, up, weight = tensors[f"{name}.{DOWN}"], tensors[f"{name}.{UP}"], tensors[f"{name}.weight"]
        update = up.double() @ down.double() * shape.scale
        # The base may be in the host's memory, and the adapters on a device.
        plain[f"{name}.weight"] = (weight.double() + update.to(weight.device)).to(weight.dtype)
    return plain, {name: data for name, data in files.items() if name != ADAPTER_FILE}


def peft_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters of a policy by the names that PEFT gives them."""
    ends = {DOWN: PEFT_DOWN, UP: PEFT_UP}
    split = {name: name.rpartition(".")[::2] for name in tensors}
    return {f"{PEFT_PREFIX}{layer}{ends[end]}": tensors[name] for name, (layer, end) in split.items() if end in ends}


def merge_adapter(model: nn.Module, adapter: PeftAdapter) -> None:
    for layer, (down, up) in _read_pairs(model, adapter, nn.Linear).items():
        update = up.double() @ down.double() * (adapter.alpha / adapter.rank)
        weight = cast(Tensor, model.get_submodule(layer).weight)
        weight.data = (weight.data.double() + update).to(weight.dtype)


def continue_adapter(model: nn.Module, adapter: PeftAdapter) -> None:
    """Give a model's adapters the values of these, which must be of the same layers."""
    pairs = _read_pairs(model, adapter, AdaptedLinear)
    own = {name for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    if missing := sorted(own - pairs.keys()):
        why = f"have none for {missing[0]}: leave [trainer.lora] out to merge them"
        raise ModelError(f"the adapters in {adapter.folder} {why}")
    for layer, (down, up) in pairs.items():
        module = cast(AdaptedLinear, model.get_submodule(layer))
        module.lora_a.data.copy_(down)
        module.lora_b.data.copy_(up)


def _read_pairs(model: nn.Module, adapter: PeftAdapter, kind: type[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by layer; `ModelError` for one that is not of this model, or whose shape is not the layer's."""
    layers, modules = adapter.layers(), dict(model.named_modules())
    head, tensors = cast(Any, model).get_output_embeddings(), load_file(adapter.folder / PEFT_WEIGHTS)
    found = {
        name: (tensors[f"{PEFT_PREFIX}{name}{PEFT_DOWN}"], tensors[f"{PEFT_PREFIX}{name}{PEFT_UP}"]) for name in layers
    }
    for name, (down, up) in found.items():
        layer = modules.get(name)
        if not isinstance(layer, kind) or layer is head:
            what = "no linear layer" if layer is None or layer is not head else "the output layer"
            raise ModelError(f"the adapters in {adapter.folder} change {name}, {what} of this base: give ADAPTERS+BASE")
        if (up.shape[0], down.shape[1]) != (layer.out_features, layer.in_features):
            own = f"{layer.in_features} to {layer.out_features}"
            theirs = f"{down.shape[1]} to {up.shape[0]}"
            why = f"map {theirs} at {name}, and this base {own}: give ADAPTERS+BASE"
            raise ModelError(f"the adapters in {adapter.folder} {why}")
    return found


def adapted_layers(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The target layers by name, in the model's order, without the output layer; `ModelError` for unknown targets."""
    head = cast(Any, model).get_output_embeddings()
    linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head}
    last = {name: name.rpartition(".")[2] for name in linear}
    refuse_unknown_targets(targets, sorted(set(last.values())))
    return {name: module for name, module in linear.items() if last[name] in targets}
