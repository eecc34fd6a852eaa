"""What was seen of late: a bounded index of digests that makes copied work show, one's own or another's.

Equal completions are ordinary (easy tasks have one answer), so only what dice cannot repeat is remembered:

    a rollout  so improbable that no two seeds give it: its tokens, and the seed that gave them
    a proof    of enough values that no two computations give it: its bytes, and the tokens that it was made from

Something is a copy if it is here already under another seed, or made from other tokens. A unit that is issued again
keeps its seeds, and a submission that is judged again is its own: both find themselves here, and that is no copy.
Only accepted work is remembered: otherwise a cheater could make an honest node look like its copyist.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CAPACITY = 2**18  # entries; about 200 bytes each
DIGEST_BYTES = 16


class Mark(NamedTuple):
    """One thing to remember: what it is, whose it is, and where it is in its submission (rollout, token)."""

    kind: Literal["rollout", "proof"]
    what: bytes
    whose: bytes
    place: tuple[int, int]


def digest(kind: str, *parts: bytes) -> bytes:
    hashed = hashlib.blake2b(kind.encode(), digest_size=DIGEST_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


@dataclass
class Seen:
    """The marks of accepted submissions; beyond its capacity the ones least lately met are forgotten.

    >>> seen = Seen()
    >>> seen.remember([Mark("rollout", b"tokens", b"seed 1", (0, 0))])
    >>> seen.copied([Mark("rollout", b"tokens", b"seed 2", (3, 0))]).place
    (3, 0)
    """

    capacity: int = CAPACITY
    _whose: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict, repr=False)

    def __len__(self) -> int:
        return len(self._whose)

    def copied(self, marks: Iterable[Mark]) -> Mark | None:
        """The first mark that is somebody else's already: of an accepted submission, or earlier in this one."""
        own: dict[bytes, bytes] = {}
        for mark in marks:
            if own.setdefault(mark.what, mark.whose) != mark.whose:
                return mark
            known = self._whose.get(mark.what)
            if known is not None and known != mark.whose:
                return mark
        return None

    def remember(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            self._whose.setdefault(mark.what, mark.whose)
            self._whose.move_to_end(mark.what)
        while len(self._whose) > self.capacity:
            self._whose.popitem(last=False)
