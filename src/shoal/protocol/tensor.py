"""A tensor without a tensor library: name, type, shape and raw little-endian bytes, as it travels."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class TensorView:
    """Raw values of one tensor; `data` is borrowed, not copied. Types are named as safetensors names them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name}: unknown type {self.dtype}")
        if self.data.nbytes != ITEM_BYTES[self.dtype] * prod(self.shape):
            raise ValueError(f"tensor {self.name}: {self.data.nbytes} bytes do not fill {self.dtype}{list(self.shape)}")
