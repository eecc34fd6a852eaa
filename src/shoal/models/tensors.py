"""Raw tensors and numpy: no torch here, so that whoever only moves weights need not import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.protocol import TensorView

__all__ = ["NUMPY_TYPES", "TensorView", "as_numpy", "from_numpy"]

NUMPY_TYPES: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip


def as_numpy(view: TensorView) -> npt.NDArray[Any]:
    """The values without a copy, read-only; bfloat16 as the uint16 that holds its bits (numpy has no such type)."""
    array = np.frombuffer(view.data, dtype=NUMPY_TYPES[view.dtype]).reshape(view.shape)
    array.flags.writeable = False
    return array


def from_numpy(name: str, array: npt.NDArray[Any], dtype: str | None = None) -> TensorView:
    """A view of an array's bytes; `dtype` must be given where numpy's type does not say it (BF16 as uint16)."""
    for known, code in NUMPY_TYPES.items():
        if ((dtype is None and known != "BF16") or dtype == known) and array.dtype == np.dtype(code):
            flat = np.ascontiguousarray(array).reshape(-1)
            return TensorView(name, known, tuple(array.shape), flat.view(np.uint8).data)
    raise ValueError(f"tensor {name}: numpy type {array.dtype} does not travel as {dtype or 'any known type'}")
