"""A model's weights for publishing and loading: parameters and persistent buffers by name, in the model's own order.
Weights that share storage (tied embeddings) appear once, under the first name."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.protocol import TensorView

TORCH_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}
TYPE_NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}

NARROWER = (
    ": weights are never rounded when they are loaded, so bfloat16 needs a run that publishes in bfloat16 "
    "(trainer.publish_dtype)"
)


def policy_state(model: nn.Module) -> dict[str, Tensor]:
    """Names and tensors of a model, detached but not copied; tied weights once."""
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in persistent}


def policy_views(model: nn.Module) -> dict[str, TensorView]:
    return {name: to_view(name, tensor) for name, tensor in policy_state(model).items()}


def apply_state(model: nn.Module, tensors: Mapping[str, TensorView] | Mapping[str, Tensor]) -> None:
    """Overwrite all weights in place, unless some name, shape or type is wrong. A type is right if it is the model's
    own, or a narrower one whose values the model's own can represent."""
    overwrite(policy_state(model), tensors)


def overwrite(state: Mapping[str, Tensor], tensors: Mapping[str, TensorView] | Mapping[str, Tensor]) -> None:
    """`apply_state` for another state, such as vLLM's weights."""
    check_fit(state, tensors)
    with torch.no_grad():
        for name, target in state.items():
            source = tensors[name]
            target.copy_(source if isinstance(source, Tensor) else to_torch(source))


def check_fit(state: Mapping[str, Tensor], tensors: Mapping[str, Any]) -> None:
    """Raise `ModelError` unless tensors (`TensorView`, `Entry`) are those of `state` by name, shape and type."""
    missing, unknown = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    if missing or unknown:
        raise ModelError(f"these weights are for another model: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, target in state.items():
        source = tensors[name]
        dtype = source.dtype if isinstance(source.dtype, torch.dtype) else TORCH_TYPES.get(source.dtype or "")
        shape = tuple(source.shape or ())
        if shape != tuple(target.shape) or dtype is None or not _holds(target.dtype, dtype):
            raise ModelError(
                f"weight {name} is {dtype}{list(shape)}, the model's is {target.dtype}{list(target.shape)}"
                + (NARROWER if shape == tuple(target.shape) else "")
            )


def _holds(target: torch.dtype, source: torch.dtype) -> bool:
    """Whether `target` can represent all values of `source`: bfloat16 policies may be computed in float32."""
    return target == source or (target == torch.float32 and source in (torch.bfloat16, torch.float16))


def change_state(model: nn.Module, changes: Iterable[Any]) -> None:
    """Overwrite only the values that differ, in place. `changes` (`shardcast.ChangedValues`) have positions in units of
    `width` bytes, and the new bits."""
    change_values(policy_state(model), changes)


def change_values(state: Mapping[str, Tensor], changes: Iterable[Any]) -> None:
    """`change_state` for another state."""
    with torch.no_grad():
        for change in changes:
            if change.name not in state:
                raise ModelError(f"these changes are for another model: it has no weight {change.name}")
            whole = state[change.name]
            target = whole.contiguous().view(-1)  # the same memory, unless it is transposed
            values = torch.from_numpy(change.values.view(SIGNED[change.width]))
            where = torch.from_numpy(change.where).to(target.device)
            source = TORCH_TYPES[change.dtype]
            if not _holds(target.dtype, source):
                raise ModelError(f"the changes of weight {change.name} are {source}, the model's is {target.dtype}")
            if source == target.dtype:
                target.view(BIT_TYPES[change.width])[where] = values.to(target.device)
            else:
                target[where] = values.view(source).to(target.device, target.dtype)
            if not whole.is_contiguous():
                whole.copy_(target.view(whole.shape))


def to_torch(view: TensorView) -> Tensor:
    """A copy: the bytes may be read-only or be released."""
    if view.data.nbytes == 0:
        return torch.empty(view.shape, dtype=TORCH_TYPES[view.dtype])
    return torch.frombuffer(bytearray(view.data), dtype=TORCH_TYPES[view.dtype]).reshape(view.shape)


def to_view(name: str, tensor: Tensor) -> TensorView:
    return lent_view(name, tensor.detach().to("cpu", copy=True))


def lent_view(name: str, tensor: Tensor) -> TensorView:
    """A view without a copy, if the tensor is contiguous and on the CPU: it changes with the tensor."""
    if tensor.dtype not in TYPE_NAMES:
        raise ModelError(f"weight {name}: type {tensor.dtype} does not travel")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return TensorView(name, TYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)
