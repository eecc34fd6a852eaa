"""The Triton kernels themselves: one program per row and block of the vocabulary. `kernels` calls them."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _scores(logits, inverse, row, block, vocabulary, BLOCK: tl.constexpr):
    """A block of a row's scores in float64, -inf past the vocabulary's end, and which tokens they are of."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    start = row.to(tl.int64) * vocabulary
    values = tl.load(logits + start + tokens, mask=tokens < vocabulary, other=-float("inf"))
    return values.to(tl.float64) * tl.load(inverse + row), tokens


@triton.jit
def block_sums(
    logits, inverse, parts, vocabulary, count, stride,
    BLOCK: tl.constexpr, LOWEST_MAXIMUM: tl.constexpr, LOWEST_SCORE: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    scores, _ = _scores(logits, inverse, row, block, vocabulary, BLOCK)
    maximum = tl.maximum(tl.max(scores, axis=0), LOWEST_MAXIMUM)
    shifted = scores - maximum
    weights = tl.exp(shifted)
    shifted = tl.where(shifted < LOWEST_SCORE, LOWEST_SCORE, shifted)
    first = weights * shifted
    out = parts + row.to(tl.int64) * count + block
    tl.store(out, maximum)
    tl.store(out + stride, tl.sum(weights, axis=0))
    tl.store(out + 2 * stride, tl.sum(first, axis=0))
    tl.store(out + 3 * stride, tl.sum(first * shifted, axis=0))


@triton.jit
def look_into_block(
    logits, inverse, maxima, scales, blocks, given, found, vocabulary, count, rows,
    BLOCK: tl.constexpr, FIND: tl.constexpr,
):  # fmt: skip
    """FIND: given is a target sum; else given is a token. Found: token or sum before it, and its weight."""
    row = tl.program_id(0)
    block = tl.load(blocks + row)
    scores, tokens = _scores(logits, inverse, row, block, vocabulary, BLOCK)
    place = row.to(tl.int64) * count + block
    weights = tl.exp(scores - tl.load(maxima + place))
    scale = tl.load(scales + place)
    wanted = tl.load(given + row)
    if FIND:
        sums = tl.cumsum(weights, axis=0)
        passed = tl.sum((sums <= wanted).to(tl.int64), axis=0)
        last = tl.max(tl.where(weights > 0.0, tokens, 0).to(tl.int64), axis=0)
        token = tl.minimum(block * BLOCK + passed, last)
        tl.store(found + row, token.to(tl.float64))
    else:
        token = wanted.to(tl.int64)
        before = tl.sum(tl.where(tokens < token, weights, 0.0), axis=0)
        tl.store(found + row, before * scale)
    at = tl.sum(tl.where(tokens == token, weights, 0.0), axis=0)
    tl.store(found + rows + row, at * scale)
