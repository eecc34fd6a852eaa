"""Triton kernels of the head, for `models/logprobs.py`: one program per row, or per row and block of the vocabulary. A
row is read once for log-probability and entropy, and once more for their gradients."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def measure_rows(
    logits, targets, logprobs, entropies, logsums, inverse, vocabulary, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Each lane has its own maximum, sum and first moment over the blocks, which are combined at the end. With
    d = score − maximum ≤ 0: entropy = log Σ eᵈ − Σ eᵈ·d / Σ eᵈ, two terms of one sign, so nothing cancels."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        tokens = first + lanes
        scores = tl.load(start + tokens, mask=tokens < vocabulary, other=-float("inf")) * inverse
        raised = tl.maximum(highest, scores)
        shrink, fall = tl.exp(highest - raised), highest - raised
        distance = tl.maximum(scores - raised, -200.0)  # beyond it e to its power is 0, and 0 · −∞ would be NaN
        weight = tl.exp(distance)
        moment = shrink * (moment + fall * total) + weight * distance
        total = shrink * total + weight
        highest = raised
    top = tl.max(highest, axis=0)
    fall = tl.maximum(highest - top, -200.0)
    shrink = tl.exp(fall)
    moment = tl.sum(shrink * (moment + fall * total), axis=0)
    total = tl.sum(shrink * total, axis=0)
    logsum = top + tl.log(total)
    chosen = tl.load(start + tl.load(targets + row)) * inverse
    tl.store(logprobs + row, chosen - logsum)
    tl.store(entropies + row, tl.log(total) - moment / total)
    tl.store(logsums + row, logsum)


@triton.jit
def slope_rows(
    logits, targets, logsums, entropies, logprob_slopes, entropy_slopes, slopes, inverse, vocabulary, stride,
    BLOCK: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    """∂/∂logit of slope·logprob + slope·entropy:  g·(1[target] − p) − h·p·(log p + entropy), over the temperature."""
    row, block = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    within = tokens < vocabulary
    place = row.to(tl.int64) * stride + tokens
    logprob = tl.load(logits + place, mask=within, other=-float("inf")) * inverse - tl.load(logsums + row)
    probability = tl.exp(logprob)
    chosen = tl.load(targets + row)
    slope = tl.load(logprob_slopes + row) * (tl.where(tokens == chosen, 1.0, 0.0) - probability)
    if WITH_ENTROPY:
        bent = tl.maximum(logprob, -200.0) + tl.load(entropies + row)
        slope -= tl.load(entropy_slopes + row) * probability * bent
    out = row.to(tl.int64) * vocabulary + tokens
    tl.store(slopes + out, (slope * inverse).to(slopes.dtype.element_ty), mask=within)
