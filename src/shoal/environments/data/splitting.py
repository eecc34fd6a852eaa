"""Which rows are trained on, and which are held out: by the digest of the prompt, so that no question is in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.environments.data.scanning import Scan

if TYPE_CHECKING:
    import numpy as np

    Rows = np.ndarray[Any, np.dtype[np.int64]]

LARGEST_SHARE = 5
"""At most a fifth of the questions is held out, of a data set that is small."""


@dataclass(frozen=True)
class Splits:
    """Row numbers of each split, ascending. `shared` rows are in neither: their question is a held-out one."""

    train: Rows
    held_out: Rows
    shared: int


def split_one(found: Scan, held_out_size: int) -> Splits:
    """Hold out the questions with the lowest digests, each by its first row; rows that repeat one are in no split."""
    import numpy as np

    rows = np.flatnonzero(found.usable & found.kept)
    keys = _keys(found)[rows]
    questions, firsts = np.unique(keys, return_index=True)
    size = min(held_out_size, len(questions) // LARGEST_SHARE)
    held_out = np.sort(rows[firsts[:size]])
    aside = np.isin(keys, questions[:size])
    return Splits(train=rows[~aside], held_out=held_out, shared=int(aside.sum()) - len(held_out))


def split_two(found: Scan, held_out: Scan, held_out_size: int) -> Splits:
    """Train on one data set and hold out another; rows of the first whose question the second has are left out.

    All questions of the second count, also those beyond `held_out_size`: nobody can say later that they were clean.
    """
    import numpy as np

    rows = np.flatnonzero(found.usable & found.kept)
    aside = np.isin(_keys(found)[rows], _keys(held_out)[held_out.usable])
    others = np.flatnonzero(held_out.usable)[:held_out_size]
    return Splits(train=rows[~aside], held_out=others, shared=int(aside.sum()))


def _keys(found: Scan) -> np.ndarray[Any, Any]:
    """The first 64 bits of each digest as a number: two of a million questions share them with odds of 1 to 10^7."""
    import numpy as np

    return np.ascontiguousarray(found.digests[:, :8]).view(">u8").ravel().astype(np.uint64)
