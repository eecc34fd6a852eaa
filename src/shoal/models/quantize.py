"""Weights rounded to few bits and back: what a machine that runs a cheaper model than it says would compute with.

Used to attack, and to measure what a threshold profile catches; nothing here saves memory. As is usual, only the
matrices of linear layers are rounded; embeddings, the output layer, norms and biases stay as they are.

(Weights that were dequantised from some format lie on its grid: rounding them to that format again changes nothing.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.models.tensors import TensorView, as_numpy, from_numpy

Matrix = npt.NDArray[np.float32]

UNTOUCHED = ("embed", "lm_head", "norm")


@dataclass(frozen=True)
class Quantization:
    """`bits` per weight; one scale per `group` weights of a row (0: per row), `offset` if the zero point is free."""

    bits: int
    group: int = 0
    offset: bool = False

    def round(self, matrix: Matrix) -> Matrix:
        """The nearest matrix that such weights can hold."""
        rows, columns = matrix.shape
        group = self.group if self.group and columns % self.group == 0 else columns
        grouped = matrix.reshape(rows, columns // group, group)
        rounded = self._with_offset(grouped) if self.offset else self._symmetric(grouped)
        return rounded.reshape(rows, columns).astype(np.float32)

    def _symmetric(self, grouped: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        most = 2 ** (self.bits - 1) - 1
        scale = np.abs(grouped).max(axis=-1, keepdims=True) / most
        scale[scale == 0] = 1
        values: npt.NDArray[np.float32] = np.clip(np.rint(grouped / scale), -most, most) * scale
        return values

    def _with_offset(self, grouped: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        least = grouped.min(axis=-1, keepdims=True)
        scale = (grouped.max(axis=-1, keepdims=True) - least) / (2**self.bits - 1)
        scale[scale == 0] = 1
        values: npt.NDArray[np.float32] = np.rint((grouped - least) / scale) * scale + least
        return values


INT8 = Quantization(bits=8)
INT4 = Quantization(bits=4, group=64)


def quantized(tensors: Mapping[str, TensorView], how: Quantization) -> dict[str, TensorView]:
    """All tensors of a policy, the matrices of its linear layers rounded; names, shapes and types are unchanged."""
    return {name: _rounded(view, how) for name, view in tensors.items()}


def _rounded(view: TensorView, how: Quantization) -> TensorView:
    if len(view.shape) != 2 or any(part in view.name for part in UNTOUCHED) or view.dtype not in ("F32", "BF16"):
        return view
    if view.dtype == "F32":
        return from_numpy(view.name, how.round(as_numpy(view).astype(np.float32)))
    wide = (as_numpy(view).astype(np.uint32) << 16).view(np.float32)
    bits = how.round(wide).view(np.uint32)
    narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    return from_numpy(view.name, narrow, "BF16")
