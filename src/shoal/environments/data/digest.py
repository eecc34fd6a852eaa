"""Which data it is: BLAKE3 over the files' bytes, in their order. Names and places of files do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from shoal.environments.data.cache import entry_name, identity, load, store
from shoal.errors import EnvironmentSetupError

CHUNK_BYTES = 8 * 2**20
PREFIX = b"shoal/data/v1\n"


def data_digest(paths: Sequence[Path]) -> str:
    """Hex digest of a data set that consists of these files."""
    return blake3(PREFIX + "\n".join(file_digest(path) for path in paths).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Hex BLAKE3 of a file's bytes, remembered until the file changes."""
    name = entry_name("digest", identity(path))
    known = load(name)
    if known is not None:
        return known.decode()
    digest = _read(path)
    if entry_name("digest", identity(path)) == name:  # it was not changed meanwhile
        store(name, digest.encode())
    return digest


def _read(path: Path) -> str:
    """Read into one buffer: a mapping of the file would count as this process's memory."""
    hasher, buffer = blake3(max_threads=blake3.AUTO), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                hasher.update(view[:size])
    except OSError as error:
        raise EnvironmentSetupError(f"cannot read the data {path}: {error.strerror or error}") from None
    return hasher.hexdigest()
