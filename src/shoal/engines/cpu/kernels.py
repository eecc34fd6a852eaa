"""Keys, values and attention over pages on a processor, compiled by numba: a token reads the live keys of its own row
and no padding. Heads are normalised (if there is a weight) and rotated here, too.

N: tokens, Q: query heads, K: key heads, D: size of a head; pages are [pages, K, page, D], `table` [N, pages of a row].
"""

# mypy: ignore-errors

import math

import numba
import numpy as np

compiled = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})


@compiled
def prepare(head, weight, eps, cos, sin, out):
    """One head [D] of one token, normalised and rotated."""
    size, half = len(head), len(cos) // 2
    factor = np.float32(1)
    if len(weight):
        total = np.float32(0)
        for each in range(size):
            total += head[each] * head[each]
        factor = np.float32(1 / math.sqrt(total / size + eps))
        for each in range(size):
            out[each] = head[each] * factor * weight[each]
    else:
        out[:] = head
    for each in range(half):
        low, high = out[each], out[each + half]
        out[each] = low * cos[each] - high * sin[each]
        out[each + half] = high * cos[each + half] + low * sin[each + half]


@compiled
def store_tokens(key, value, weight, eps, cos, sin, positions, table, keys, values):
    """Keys and values [N, K, D] of tokens to the pages of their rows."""
    for token in range(len(key)):
        position = positions[token]
        page, offset = table[token, position // keys.shape[2]], position % keys.shape[2]
        for head in range(key.shape[1]):
            prepare(key[token, head], weight, eps, cos[position], sin[position], keys[page, head, offset])
            source, target = value[token, head], values[page, head, offset]
            for each in range(len(source)):
                target[each] = source[each]


@compiled
def attend_tokens(query, weight, eps, cos, sin, positions, table, keys, values, scale, window, out):
    """Attention of tokens [N, Q, D], each over its row's tokens up to itself, or over the last of them within `window`:
    out [N, Q, D]. Query heads that share their keys read them once."""
    tokens, heads, size = query.shape
    page, share = keys.shape[2], heads // keys.shape[1]
    asked = np.empty((share, size), dtype=np.float32)
    weights = np.empty((share, table.shape[1] * page), dtype=np.float32)
    for token in range(tokens):
        position = positions[token]
        count = position + 1
        first = max(0, count - window) if window > 0 else 0
        for head in range(keys.shape[1]):
            for each in range(share):
                prepare(query[token, head * share + each], weight, eps, cos[position], sin[position], asked[each])
                for place in range(size):
                    asked[each, place] *= scale
            for number in range(first // page, (count + page - 1) // page):
                start, lines = number * page, keys[table[token, number], head]
                for place in range(max(first, start), min(count, start + page)):
                    line = lines[place - start]
                    for each in range(share):
                        total, one = np.float32(0), asked[each]
                        for index in range(size):
                            total += one[index] * line[index]
                        weights[each, place] = total
            for each in range(share):
                scores, found = weights[each], out[token, head * share + each]
                largest, total = scores[first], np.float32(0)
                for place in range(first, count):
                    largest = max(largest, scores[place])
                for place in range(first, count):
                    scores[place] = math.exp(scores[place] - largest)
                    total += scores[place]
                for place in range(first, count):
                    scores[place] /= total
                for index in range(size):
                    found[index] = 0
            for number in range(first // page, (count + page - 1) // page):
                start, lines = number * page, values[table[token, number], head]
                for place in range(max(first, start), min(count, start + page)):
                    line = lines[place - start]
                    for each in range(share):
                        part, found = weights[each, place], out[token, head * share + each]
                        for index in range(size):
                            found[index] += part * line[index]
