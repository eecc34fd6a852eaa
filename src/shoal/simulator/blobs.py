"""Submissions in this process only: a simulated hour hands in hundreds of thousands, and trains on none of them."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.errors import ResourceError
from shoal.hub.storage.blobs import Inbox
from shoal.protocol import submission_digest


class MemoryBlobs:
    """Implements `storage.blobs.Blobs`."""

    inbox: Inbox | None = None

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    def put(self, body: bytes) -> str:
        name = submission_digest(body)
        self._bodies[name] = body
        return name

    def get(self, name: str) -> bytes:
        if name not in self._bodies:
            raise ResourceError(f"there is no submission {name}")
        return self._bodies[name]

    def has(self, name: str) -> bool:
        return name in self._bodies

    def names(self) -> Iterator[str]:
        return iter(self._bodies)
