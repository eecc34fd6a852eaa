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
