"""What comes with every request, a nonce and a sign of life: noted in memory, written with what comes next.

request ─► Arrived ─┬─ SQLite: with the next transaction, so a nonce is on disk no later than what its request did
                     └─ PostgreSQL: signs of life once a second; nonces at once, as other hubs may get them (`auth`)
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.hub.storage.tables import Presence

SPAN_MS = 10_000

Nonce = tuple[str, str, int]
"""Node, nonce, and until when it is kept."""


@dataclass
class Noted:
    """Nonces, times when a node was last heard of, and what it said of itself then."""

    nonces: list[Nonce] = field(default_factory=list)
    heard: dict[str, int] = field(default_factory=dict)
    said: dict[str, Presence] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nonces or self.heard or self.said)


class Arrived:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, set[Nonce]] = {}  # by the span in which they are forgotten
        self.noted = Noted()

    def take_nonce(self, node: str, nonce: str, until_ms: int, lasting: bool) -> bool:
        """False if it was taken before. One that is not `lasting` is never written down."""
        named = (node, nonce, until_ms)  # a copy of the request has the same date, and so the same three
        with self._lock:
            taken = self._taken.setdefault(until_ms // SPAN_MS, set())
            if named in taken:
                return False
            taken.add(named)
            if lasting:
                self.noted.nonces.append(named)
            return True

    def remember(self, nonces: Iterable[Nonce]) -> None:
        """Those that were written before this process began."""
        for node, nonce, until_ms in nonces:
            self.take_nonce(node, nonce, until_ms, lasting=False)

    def forget_nonces(self, before_ms: int) -> None:
        with self._lock:
            for span in [span for span in self._taken if (span + 1) * SPAN_MS <= before_ms]:
                del self._taken[span]

    def heard(self, node: str, now_ms: int) -> None:
        with self._lock:
            self.noted.heard[node] = now_ms

    def said(self, presence: Presence) -> None:
        with self._lock:
            self.noted.said[presence.node] = presence

    def waiting(self) -> set[str]:
        """Nodes whose signs of life are not written yet."""
        with self._lock:
            return {*self.noted.heard, *self.noted.said}

    def take(self) -> Noted:
        """All that is to be written. A caller that could not write it gives it `back`."""
        with self._lock:
            noted, self.noted = self.noted, Noted()
            return noted

    def back(self, noted: Noted) -> None:
        with self._lock:
            self.noted.nonces[:0] = noted.nonces
            self.noted.heard = noted.heard | self.noted.heard
            self.noted.said = noted.said | self.noted.said

    def write_again(self) -> None:
        """What was written is lost: write all nonces that are remembered."""
        with self._lock:
            self.noted.nonces = [each for taken in self._taken.values() for each in taken]
