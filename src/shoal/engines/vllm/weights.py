"""Where the weights of a policy are in vLLM's model, so that they can be written in place.

vLLM packs query, key and value into one parameter, gate and up into another. Its own loader knows where each weight of
a checkpoint goes: here the loader runs without data, and the targets of its copies are recorded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.errors import ModelError

LOADER_ERRORS = (AttributeError, AssertionError, LookupError, TypeError, ValueError, RuntimeError)


class _Destinations(TorchFunctionMode):
    """Copies are recorded instead of made. Padding, which is filled with zeros, is recorded and filled."""

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.filled = list[Tensor](), list[Tensor]()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.copied.append(args[0])
            return args[0]
        if func is Tensor.fill_:
            self.filled.append(args[0])
        return func(*args, **(kwargs or {}))


def places(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """For each weight of a policy, by name, the part of a parameter that holds it. `ModelError` if vLLM stores one in
    another layout, or has parameters that no weight fills."""
    found, written = dict[str, Tensor](), dict[int, int]()
    for name, shape in shapes.items():
        seen = _Destinations()
        with torch.no_grad(), suppress(*LOADER_ERRORS), seen:
            model.load_weights([(name, torch.empty(shape))])
        if [tuple(each.shape) for each in seen.copied] != [tuple(shape)]:
            raise ModelError(f"vLLM does not keep weight {name} as it is: generate with --engine torch")
        found[name] = seen.copied[0].detach()
        for each in (*seen.copied, *seen.filled):
            where = each.untyped_storage().data_ptr()
            written[where] = written.get(where, 0) + each.numel()
    for name, parameter in model.named_parameters():
        if written.get(parameter.untyped_storage().data_ptr(), 0) < parameter.numel():
            raise ModelError(f"no weight of the policy fills vLLM's {name}: generate with --engine torch")
    return found


@contextmanager
def plain_linear() -> Iterator[None]:
    """While vLLM builds a model: on a processor it would pack weights for its own kernels and forget the plain ones, so
    that nothing could be written in place, and a tied head would still compute with the packed copy of the old
    embeddings. Plain layers read the weights where they lie."""
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm

    def plain(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing
