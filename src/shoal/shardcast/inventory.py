"""Which of a version's chunks are here, as two bitmaps that others ask for in order to share the work.

    offered(manifest)   c0 c1 c2 c3 c4 c5 c6 c7 │ c8 …       one bit each, the lowest bit of the first byte is c0
    HAVE                 1  1  0  1  0  0  0  0 │ 0          verified and served now
    SOON                 0  0  1  0  0  0  0  0 │ 0          being fetched from upstream now

Kept up to date chunk by chunk, so that telling it costs a copy of the map and not a walk over the version.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from shoal.protocol import Chunk


class Inventory:
    """The map of one version. One thread adds at a time; any thread may read.

    >>> chunks = [Chunk(hash=character * 64, size_bytes=1) for character in "aba"]
    >>> inventory = Inventory(chunks)
    >>> inventory.add("a" * 64), inventory.count, inventory.body(soon=["b" * 64])
    (True, 2, b'\\x05\\x02')
    """

    def __init__(self, chunks: Sequence[Chunk], here: Container[str] = ()) -> None:
        self._have = bytearray(-(-len(chunks) // 8))
        self._missing: dict[str, list[int]] = {}
        self.count = 0  # bits that are set
        for index, chunk in enumerate(chunks):
            self._missing.setdefault(chunk.hash, []).append(index)
        for chunk_hash in list(self._missing):
            if chunk_hash in here:
                self.add(chunk_hash)

    @property
    def complete(self) -> bool:
        return not self._missing

    def add(self, chunk_hash: str) -> bool:
        """Note that a chunk is here; false if it is none of this version's, or was here already."""
        indices = self._missing.pop(chunk_hash, None)
        if indices is None:
            return False
        for index in indices:
            self._have[index // 8] |= 1 << index % 8
        self.count += len(indices)
        return True

    def body(self, soon: Iterable[str]) -> bytes:
        """HAVE, then SOON."""
        coming = bytearray(len(self._have))
        for chunk_hash in soon:
            for index in self._missing.get(chunk_hash, ()):
                coming[index // 8] |= 1 << index % 8
        return bytes(self._have) + bytes(coming)
