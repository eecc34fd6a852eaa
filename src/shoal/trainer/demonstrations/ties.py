"""Which demonstrations belong together because they share a question: validation has all of them, or none.

Conversations are tied by everything that the user asks in them, wherever it is asked, and so are those that are tied to
the same one. What is asked in more than 16 different conversations ("thanks", "go on") says nothing and ties nothing,
or all of them would hang together. Conversations that ask the same, all of it in the same order, are always one.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

COMMON = 16
"""In more conversations than this, a question says nothing."""


class Ties:
    """Takes the questions of one demonstration after the other; `groups` says which belong together."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # conversation → one that it is tied to, in the end the group's
        self._asked_in: dict[bytes, list[int]] = {}

    def add(self, turns: Sequence[bytes]) -> int:
        """A number for the conversation that asks this, for `groups`."""
        digest = turns[0] if len(turns) == 1 else sha256(b"".join(turns)).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        if key not in self._known:
            self._known[key] = key
            for turn in set(turns):
                places = self._asked_in.setdefault(turn[:8], [])
                if len(places) <= COMMON:
                    places.append(key)
        return key

    def groups(self) -> dict[int, int]:
        """Of each conversation the number of its group, which is the lowest of its conversations."""
        for places in self._asked_in.values():
            if len(places) <= COMMON:
                for other in places[1:]:
                    self._tie(places[0], other)
        return {key: self._first(key) for key in self._known}

    def _tie(self, one: int, other: int) -> None:
        low, high = sorted((self._first(one), self._first(other)))
        self._known[high] = low

    def _first(self, key: int) -> int:
        while self._known[key] != key:
            self._known[key] = self._known[self._known[key]]
            key = self._known[key]
        return key
