"""Bulk bodies: msgpack inside zstd; every limit is checked before memory is allocated.

    bytes ─► compressed limit ─► zstd header: limit of the declared size ─► bounded inflate ─► typed, strict msgpack

A frame without a declared size, with a size over the limit, or with trailing bytes is refused unread.
"""

from dataclasses import dataclass
from math import prod
from typing import TypeVar

import msgspec
import zstandard

from shoal.errors import CodecError

T = TypeVar("T")

MIB = 1024 * 1024


@dataclass(frozen=True)
class BodyLimits:
    compressed_bytes: int = 16 * MIB
    inflated_bytes: int = 64 * MIB


def pack(value: msgspec.Struct, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(msgspec.msgpack.encode(value))


def unpack(data: bytes, kind: type[T], limits: BodyLimits) -> T:
    """Decode `data` as `kind`, or raise `CodecError`; never uses more memory than the limits."""
    raw = _inflate(data, limits)
    try:
        return msgspec.msgpack.decode(raw, type=kind, strict=True)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise CodecError(f"the body is not a valid {kind.__name__}: {error}") from error


def inflate_exactly(data: bytes, size_bytes: int) -> bytes:
    """The content of one zstd frame that declares and has exactly `size_bytes`; `CodecError` if it is another."""
    return _inflate(data, BodyLimits(compressed_bytes=len(data), inflated_bytes=size_bytes), exactly=True)


def _inflate(data: bytes, limits: BodyLimits, exactly: bool = False) -> bytes:
    if len(data) > limits.compressed_bytes:
        raise CodecError(f"the body has {len(data)} bytes; at most {limits.compressed_bytes} are allowed")
    try:
        frame = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        raise CodecError(f"the body is not a zstd frame: {error}") from error
    if (declared := frame.content_size) == zstandard.CONTENTSIZE_UNKNOWN:
        raise CodecError("the zstd frame does not declare its size")
    if declared > limits.inflated_bytes or (exactly and declared != limits.inflated_bytes):
        most = "exactly" if exactly else "at most"
        raise CodecError(f"the body inflates to {declared} bytes; {most} {limits.inflated_bytes} are allowed")
    if frame.dict_id:
        raise CodecError("the zstd frame needs a dictionary")
    # One call into one buffer of the declared size: the streaming interface lets a frame inflate past what it declares.
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=max(1, declared), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"the zstd frame is damaged, or there are bytes after the zstd frame: {error}") from error
    if len(raw) != declared:
        raise CodecError("the zstd frame is truncated, or its size is not the one declared")
    return raw


ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class TensorView:
    """A tensor as it travels: raw little-endian bytes, borrowed. Types are named as in safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name}: unknown type {self.dtype}")
        if self.data.nbytes != ITEM_BYTES[self.dtype] * prod(self.shape):
            raise ValueError(f"tensor {self.name}: {self.data.nbytes} bytes do not fill {self.dtype}{list(self.shape)}")
