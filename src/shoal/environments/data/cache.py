"""Results of scans, kept in the user's cache folder, so that a data set opens quickly the second time. An entry is
named by path, size, change times and inode of each file, and by the query: a changed file has no entry. Entries contain
their hash; a damaged one is computed again."""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from shoal.errors import EnvironmentSetupError, ResourceError
from shoal.runtime.files import write_atomically

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("shoal.environments")
HASH_BYTES = 32
VERSION = 3  # part of every name: raised when the meaning of entries changes
CHUNK_BYTES = 8 * 2**20


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "shoal" / "data"


def entry_name(kind: str, *about: object) -> str:
    return f"{kind}-{blake3(json.dumps([VERSION, *about]).encode()).hexdigest(16)}"


def identity(path: Path) -> tuple[object, ...]:
    """Values that change when a file changes, without reading it. Only the inode's time cannot be set back."""
    found = path.stat()
    return (str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def load_arrays(name: str) -> tuple[Mapping[str, np.ndarray[Any, Any]], Any] | None:
    import numpy as np

    try:
        content = (cache_folder() / name).read_bytes()
        if blake3(content[HASH_BYTES:]).digest() != content[:HASH_BYTES]:
            return None
        with np.load(io.BytesIO(content[HASH_BYTES:]), allow_pickle=False) as entry:
            arrays = {key: entry[key] for key in entry.files}
        return arrays, json.loads(arrays.pop("json").tobytes())
    except (ValueError, KeyError, AttributeError, EOFError, OSError, SystemError, zipfile.BadZipFile):
        return None  # missing, damaged, or of another version of numpy (whose `ast` fails in two threads)


def store_arrays(name: str, arrays: Mapping[str, np.ndarray[Any, Any]], beside: Any) -> None:
    import numpy as np

    buffer, folder = io.BytesIO(), cache_folder()
    np.savez(buffer, json=np.frombuffer(json.dumps(beside).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(folder / name, blake3(buffer.getvalue()).digest() + buffer.getvalue())
    except (OSError, ResourceError) as error:
        log.debug("cannot cache results of a scan in %s: %s", folder, error)


def data_digest(paths: Sequence[Path]) -> str:
    """Hex BLAKE3 over the bytes of a data set's files, in their order. Their names and places do not matter."""
    return blake3(b"shoal/data/v1\n" + "\n".join(file_digest(path) for path in paths).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Hex BLAKE3 of a file's bytes, remembered until the file changes."""
    name = entry_name("digest", identity(path))
    known = load_arrays(name)
    if known is not None:
        return str(known[1])
    hasher, buffer = blake3(max_threads=blake3.AUTO), bytearray(CHUNK_BYTES)
    try:
        with path.open("rb", buffering=0) as file:  # not mapped: mapped pages count as this process's memory
            while size := file.readinto(buffer):
                hasher.update(memoryview(buffer)[:size])
    except OSError as error:
        raise EnvironmentSetupError(f"cannot read the data {path}: {error.strerror or error}") from None
    if entry_name("digest", identity(path)) == name:  # unchanged while it was read
        store_arrays(name, {}, hasher.hexdigest())
    return hasher.hexdigest()
