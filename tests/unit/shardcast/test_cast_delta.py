"""Deltas: any old and new bytes come out right; any damage is refused, before memory is spent on it."""

import contextlib
import io

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import DeltaRefused
from shoal.protocol import Entry
from shoal.shardcast.delta import BLOCK_BYTES, HEADER, SIZE, Change, blocks_of, encode_block

WIDTHS = st.sampled_from([1, 2, 4])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Old and new of one size: from equal to wholly different."""
    width = draw(WIDTHS)
    old = draw(st.binary(max_size=400).map(lambda data: data[: len(data) // width * width]))
    new = bytearray(old)
    if new and draw(st.booleans()):
        return old, draw(st.binary(min_size=len(old), max_size=len(old))), width
    for at in draw(st.lists(st.integers(0, max(0, len(old) - 1)), max_size=12)) if new else ():
        new[at] = draw(st.integers(0, 255))
    return old, bytes(new), width


def apply_block(target: memoryview, block: bytes, width: int, fast: bool = False) -> None:
    Change.read(io.BytesIO(block), target.nbytes // width, width).apply(target, width, fast)


def applied(old: bytes, block: bytes, width: int, fast: bool = False) -> bytes:
    target = bytearray(old)
    apply_block(memoryview(target), block, width, fast)
    return bytes(target)


def check(old: bytes, new: bytes, width: int) -> None:
    """By numpy and by the compiled loops: the same delta, and the new bytes from it."""
    block = encode_block(memoryview(old), memoryview(new), width)
    assert encode_block(memoryview(old), memoryview(new), width, fast=True) == block
    assert applied(old, block, width) == applied(old, block, width, fast=True) == new


@settings(deadline=None)
@given(pairs())
def test_applying_a_delta_gives_the_new_bytes(pair: tuple[bytes, bytes, int]) -> None:
    check(*pair)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_a_block_of_full_size_comes_out_right(width: int, share: float) -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
    new = np.where(rng.random(BLOCK_BYTES) < share, rng.integers(0, 256, BLOCK_BYTES), old).astype(np.uint8)
    check(old.tobytes(), new.tobytes(), width)


def test_special_values_of_floating_point_survive() -> None:
    """Zeros of both signs, infinities, quiet and signalling NaNs, the smallest and the largest numbers."""
    special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x7F7F], np.uint16)
    old, new = np.repeat(special, len(special)), np.tile(special, len(special))
    check(old.tobytes(), new.tobytes(), 2)


def test_step_of_one_unit_is_small_across_zero_and_exponents() -> None:
    """What makes deltas cheap: neighbours on the line of numbers differ by one, whatever their bits look like."""
    old = np.array([0x0000, 0x8000, 0x3F7F, 0xBF80], np.uint16)
    new = np.array([0x8000, 0x0000, 0x3F80, 0xBF7F], np.uint16)
    block = encode_block(memoryview(old).cast("B"), memoryview(new).cast("B"), 2)
    assert block == block_of(4, [frame(bytes(4)), frame(bytes([0, 1, 1, 1]))]), "-1, 1, 1, 1"


def small_update(count: int = 1 << 19) -> tuple[bytes, bytes]:
    rng = np.random.default_rng(0)
    old = rng.integers(0x3C00, 0x3D00, count).astype(np.uint16)
    moved = rng.random(count) < 0.01
    return old.tobytes(), (old + moved).astype(np.uint16).tobytes()


def test_a_training_step_costs_less_than_xor_and_zstd() -> None:
    old, new = small_update()
    block = encode_block(memoryview(old), memoryview(new), 2)
    xor = (np.frombuffer(old, np.uint16) ^ np.frombuffer(new, np.uint16)).tobytes()
    assert len(block) < 0.6 * len(zstandard.ZstdCompressor(level=1).compress(xor))


def entry(name: str, offset: int, size: int, dtype: str | None = None) -> Entry:
    if dtype is None:
        return Entry(name=name, type="file", offset=offset, size_bytes=size)
    items = {"BF16": 2, "F32": 4, "U8": 1, "I64": 8}[dtype]
    return Entry(name=name, type="tensor", offset=offset, size_bytes=size, dtype=dtype, shape=(size // items,))


def test_blocks_cover_the_payload_and_never_mix_widths() -> None:
    entries = [
        entry("a", 0, 6, "BF16"), entry("b", 6, 10, "BF16"), entry("c", 16, 12, "F32"), entry("d", 28, 16, "I64"),
        entry("e", 44, 3, "U8"), entry("f.json", 47, 5), entry("g.json", 52, 0), entry("h.bin", 52, 4),
    ]  # fmt: skip
    found = [(block.offset, block.size_bytes, block.width) for block in blocks_of(entries)]
    assert found == [(0, 16, 2), (16, 28, 4), (44, 8, 1), (52, 4, 2)]


# What a delta from somebody evil can look like; bombs and whole deltas: adversary/test_cast_deltas.


def block_of(changes: int, planes: list[bytes], gap_planes: int = 1) -> bytes:
    sizes = b"".join(SIZE.pack(len(plane)) for plane in planes)
    return HEADER.pack(changes, gap_planes, len(planes) - gap_planes) + sizes + b"".join(planes)


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


@pytest.mark.parametrize(("block", "words"), [
    (b"", "ends in the middle"),
    (HEADER.pack(1, 1, 1), "ends in the middle"),
    (block_of(5, [frame(bytes(5)), frame(bytes(5))]), "says more"),  # of four values
    (block_of(1, [frame(b"\x04"), frame(b"\x00")]), "changes value 4 of 4"),
    (block_of(2, [frame(b"\x00\x03"), frame(bytes(2))]), "changes value 4 of 4"),
    (block_of(1, [frame(b"\x00"), frame(b"\xff"), frame(b"\xff"), frame(b"\xff")]), "off the end of the line"),
    (block_of(1, [frame(b"\x00")] * 5), "says more"),  # four planes of steps: a 16-bit value never needs them
    (block_of(1, [frame(b"\x00")] * 5, gap_planes=4), "says more"),
    (block_of(0, [frame(b""), frame(b"")]), "says more"),
    (block_of(1, [frame(b"\x00"), frame(b"\x00")])[:-1], "ends in the middle"),
    (block_of(1, [b"garbage", frame(b"\x00")]), "damaged"),
    (block_of(1, [frame(b"\x00\x00"), frame(b"\x00")]), "damaged"),
    (block_of(1, [frame(b"\x00") + b"?", frame(b"\x00")]), "damaged"),
])  # fmt: skip
def test_a_malformed_block_is_refused_by_name(block: bytes, words: str) -> None:
    target = bytearray(8)
    with pytest.raises(DeltaRefused, match=words):
        apply_block(memoryview(target), block, 2)
    assert target == bytes(8)
    with pytest.raises(DeltaRefused, match="a delta"):
        apply_block(memoryview(target), block, 2, fast=True)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_block_is_refused_or_gives_other_bytes_without_other_errors(data: st.DataObject) -> None:
    old, new = small_update(500)
    block = bytearray(encode_block(memoryview(old), memoryview(new), 2))
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(block)))
    for fast in (False, True):
        with contextlib.suppress(DeltaRefused):
            applied(old, bytes(block[:cut]), 2, fast)
