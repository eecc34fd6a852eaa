"""Weights rounded to few bits and back, as a cheating worker would use: for attacks, and to measure what a profile's
limits catch. Only matrices of linear layers are rounded, not embeddings, the output layer, norms or biases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.models.folder import as_numpy, from_numpy
from shoal.protocol import TensorView

UNTOUCHED = ("embed", "lm_head", "norm")


@dataclass(frozen=True)
class Quantization:
    """`bits` per weight; one scale per `group` weights of a row (0: per row)."""

    bits: int
    group: int = 0

    def round(self, matrix: Any) -> Any:
        """The nearest matrix with such weights, for float32 numpy arrays and tensors on any device."""
        rows, columns = matrix.shape
        group = self.group if self.group and columns % self.group == 0 else columns
        grouped, most = matrix.reshape(rows, columns // group, group), 2 ** (self.bits - 1) - 1
        size = abs(grouped)
        scale = (size.amax(-1, keepdim=True) if hasattr(size, "amax") else size.max(axis=-1, keepdims=True)) / most
        scale[scale == 0] = 1
        return ((grouped / scale).round().clip(-most, most) * scale).reshape(rows, columns)


INT8 = Quantization(bits=8)
INT4 = Quantization(bits=4, group=64)


def is_rounded(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight of this name and shape is the matrix of a linear layer."""
    return len(shape) == 2 and not any(part in name for part in UNTOUCHED)


def quantized(tensors: Mapping[str, TensorView], how: Quantization) -> dict[str, TensorView]:
    """The tensors of a policy with the matrices of linear layers rounded; names, shapes and types are unchanged."""
    found = dict(tensors)
    for name, view in tensors.items():
        if is_rounded(view.name, view.shape) and view.dtype == "F32":
            found[name] = from_numpy(view.name, how.round(as_numpy(view).astype(np.float32)))
        elif is_rounded(view.name, view.shape) and view.dtype == "BF16":
            bits = how.round((as_numpy(view).astype(np.uint32) << 16).view(np.float32)).view(np.uint32)
            narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
            found[name] = from_numpy(view.name, narrow, "BF16")
    return found
