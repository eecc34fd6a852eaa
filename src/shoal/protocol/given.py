"""Spans of a completion that the environment said: how they travel, and which tokens are left to the model.

(start, length) pairs as little-endian uint32, in order, apart from each other. A span never begins a completion, for
the model speaks first, and never ends one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.errors import ProtocolError
from shoal.protocol.submission import pack_tokens, unpack_tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Spans = tuple[tuple[int, int], ...]
PAIR_BYTES = 8


def pack_spans(spans: Iterable[tuple[int, int]]) -> bytes:
    """
    >>> pack_spans([(2, 3)]).hex()
    '0200000003000000'
    """
    flat = [number for span in spans for number in span]
    return pack_tokens(flat) if flat else b""


def unpack_spans(data: bytes, tokens: int) -> Spans:
    """The spans of a completion of so many tokens, or a `ProtocolError` that says why they are none.

    >>> unpack_spans(pack_spans([(2, 3), (7, 1)]), tokens=9)
    ((2, 3), (7, 1))
    """
    if not data:
        return ()
    if len(data) % PAIR_BYTES:
        raise ProtocolError(f"{len(data)} bytes are no pairs of numbers")
    flat = unpack_tokens(data).tolist()
    spans, end = tuple(zip(flat[::2], flat[1::2], strict=True)), 0
    for start, length in spans:
        if length == 0 or start <= end or start + length >= tokens:
            raise ProtocolError(
                f"{length} tokens from token {start} on cannot have been given: they are none, touch what was given "
                f"before, or begin or end the {tokens} tokens"
            )
        end = start + length
    return spans


def drawn_mask(data: bytes, tokens: int) -> npt.NDArray[np.bool_]:
    """Which of a completion's tokens the model drew; the others were given."""
    import numpy as np

    mask = np.ones(tokens, dtype=np.bool_)
    for start, length in unpack_spans(data, tokens):
        mask[start : start + length] = False
    return mask
