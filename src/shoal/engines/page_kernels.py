"""Attention over pages in Triton: a program reads its part of a row's keys once for all query heads that share it."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def attend_pages(
    query, keys, values, table, counts, parts, sums, scale, window, table_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of SPLITS parts of a row's tokens, one: its weighted values, and the logarithm of the sum of its weights."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + row)
    first = tl.where(window > 0, tl.maximum(count - window, 0), 0)
    each = tl.cdiv(tl.cdiv(count - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * each
    end = tl.minimum(begin + each, count)
    heads = tl.arange(0, ROOM)
    size = tl.arange(0, SIZE)
    mine = heads < SHARE
    place = row.to(tl.int64) * HEADS + head * SHARE + heads
    asked = tl.load(query + place[:, None] * SIZE + size[None, :], mask=mine[:, None], other=0.0)
    largest = tl.full([ROOM], -float("inf"), tl.float32)
    total = tl.zeros([ROOM], tl.float32)
    found = tl.zeros([ROOM, SIZE], tl.float32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        live = token < end
        page = tl.load(table + row.to(tl.int64) * table_stride + token // PAGE, mask=live, other=0).to(tl.int64)
        at = ((page * KEY_HEADS + head) * PAGE + token % PAGE) * SIZE
        key = tl.load(keys + at[None, :] + size[:, None], mask=live[None, :], other=0.0)
        if EXACT:
            scores = tl.dot(asked, key, input_precision="ieee") * scale
        else:
            scores = tl.dot(asked, key) * scale
        scores = tl.where(live[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - larger[:, None])
        shrink = tl.exp(largest - larger)
        value = tl.load(values + at[:, None] + size[None, :], mask=live[:, None], other=0.0)
        if EXACT:
            found = found * shrink[:, None] + tl.dot(weights, value, input_precision="ieee")
        else:
            found = found * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * shrink + tl.sum(weights, axis=1)
        largest = larger
    out = place * SPLITS + split
    some = end > begin
    norm = tl.where(some, total, 1.0)
    tl.store(parts + out[:, None] * SIZE + size[None, :], found / norm[:, None], mask=mine[:, None])
    if SPLITS > 1:
        tl.store(sums + out, tl.where(some, largest + tl.log(norm), -float("inf")), mask=mine)


@triton.jit
def store_pages(
    key, value, keys, values, pages, offsets, key_row, key_head, value_row, value_head,
    KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One token's keys and values of one head, to their place."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.arange(0, SIZE)
    at = ((tl.load(pages + row) * KEY_HEADS + head) * PAGE + tl.load(offsets + row)) * SIZE + size
    tl.store(keys + at, tl.load(key + row * key_row + head * key_head + size))
    tl.store(values + at, tl.load(value + row * value_row + head * value_head + size))


@triton.jit
def normalise(values, weight, out, eps, count, heads, outer, inner, ROOM: tl.constexpr, PLUS_ONE: tl.constexpr):
    """RMSNorm of one line of `count` values; line n begins at (n // heads) * outer + n % heads * inner. Rounds where
    transformers does: before the weight, or with 1 + weight only once."""
    line = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, ROOM)
    mine = place < count
    value = tl.load(values + line // heads * outer + line % heads * inner + place, mask=mine, other=0.0)
    scaled = value.to(tl.float32)
    scaled = scaled * tl.rsqrt(tl.sum(scaled * scaled, axis=0) / count + eps)
    factor = tl.load(weight + place, mask=mine, other=0.0).to(tl.float32)
    if PLUS_ONE:
        found = scaled * (1.0 + factor)
    else:
        found = scaled.to(value.dtype).to(tl.float32) * factor
    tl.store(out + line * count + place, found.to(value.dtype), mask=mine)


@triton.jit
def rotate(
    values, cosines, sines, out, row_stride, head_stride, table_stride, HEADS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Rotary positions of one head of one row; products are rounded as transformers rounds them."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = SIZE // 2
    place = tl.arange(0, HALF)
    start = values + row * row_stride + head * head_stride
    first, second = tl.load(start + place), tl.load(start + HALF + place)
    kind = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    table = row * table_stride + place
    cos_x, cos_y = tl.load(cosines + table).to(tl.float32), tl.load(cosines + table + HALF).to(tl.float32)
    sin_x, sin_y = tl.load(sines + table).to(tl.float32), tl.load(sines + table + HALF).to(tl.float32)
    left = (x * cos_x).to(kind).to(tl.float32) - (y * sin_x).to(kind).to(tl.float32)
    right = (y * cos_y).to(kind).to(tl.float32) + (x * sin_y).to(kind).to(tl.float32)
    target = out + (row * HEADS + head) * SIZE + place
    tl.store(target, left.to(kind))
    tl.store(target + HALF, right.to(kind))
