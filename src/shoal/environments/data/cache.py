"""What was found out about files, kept in the user's cache folder: a data set opens at once the second time.

An entry is named by what it is about (path, size, times of change, inode of each file, and the question asked), so a
changed file finds none. Entries carry their own hash; one that is damaged, or cannot be written, costs time only.
What nobody used for a month, and what a process that was killed left half written, goes when something new is kept.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from shoal.errors import EnvironmentSetupError

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("shoal.environments")
HASH_BYTES = 32
VERSION = 2
"""Part of every name: raised when entries mean something else."""
KINDS = ("digest-", "lines-", "scan-", "check-", "rows-", "unpacked-")
"""How names of entries begin; files of any other name are not touched."""
SCRATCH = ".new-"
SUM = ".sum"
"""Ends the name of the entry that holds the digest of a file that was unpacked."""
TIDIED = ".tidied"
HOUR_S, DAY_S = 3600, 24 * 3600
KEPT_S = 30 * DAY_S
CHUNK_BYTES = 8 * 2**20
SPARE_BYTES = 64 * 2**20
"""What is left free on the disk that holds the cache."""


def cache_folder() -> Path:
    """Where entries lie: $XDG_CACHE_HOME/shoal/data, or ~/.cache/shoal/data."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "shoal" / "data"


def entry_name(kind: str, *about: object) -> str:
    """The name of an entry: its kind, and a hash of everything that it depends on."""
    return f"{kind}-{blake3(json.dumps([VERSION, *about]).encode()).hexdigest(16)}"


def identity(path: Path) -> tuple[object, ...]:
    """What changes when a file does, without reading it.

    The time of modification can be set back (rsync -t, touch -r, a restored backup); that of the inode cannot.
    """
    found = path.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return (str(path.resolve()), found.st_size, *times, found.st_ino, found.st_dev)


def load(name: str) -> bytes | None:
    """An entry's content, or None if there is none that is whole."""
    path = cache_folder() / name
    try:
        content = path.read_bytes()
    except OSError:
        return None
    mark_used(path)
    payload = content[HASH_BYTES:]
    return payload if blake3(payload).digest() == content[:HASH_BYTES] else None


def mark_used(path: Path) -> None:
    """Note that an entry is in use: once a day is enough, and a cache that is only read needs no note."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY_S:
            os.utime(path)


def store(name: str, payload: bytes) -> None:
    """Keep an entry, whole or not at all. A cache that cannot be written is no reason to stop."""
    try:
        with placed(name) as scratch:
            scratch.write_bytes(blake3(payload).digest() + payload)
    except OSError as error:
        log.debug("cannot keep what was found out about the data in %s: %s", cache_folder(), error)


@contextlib.contextmanager
def placed(name: str) -> Iterator[Path]:
    """Where to write a file of the cache: it gets its name when it is whole and on the disk, or it is removed."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    tidy(folder)
    descriptor, scratch_name = tempfile.mkstemp(dir=folder, prefix=SCRATCH)
    scratch = Path(scratch_name)
    try:
        yield scratch
        os.fsync(descriptor)  # of the same file: without it, a crash of the machine may leave the name without content
        scratch.replace(folder / name)
    finally:
        os.close(descriptor)
        scratch.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove what was not used for a month, and half written files of yesterday; looks at most once an hour."""
    now_s, stamp = time.time(), folder / TIDIED
    with contextlib.suppress(OSError):  # never tidied
        if abs(now_s - stamp.stat().st_mtime) < HOUR_S:
            return
    try:
        stamp.touch()
        with os.scandir(folder) as found:
            names = {
                entry.name: entry.stat(follow_symlinks=False).st_mtime
                for entry in found
                if entry.is_file(follow_symlinks=False) and entry.name.startswith((*KINDS, SCRATCH))
            }
        for name, modified_s in names.items():
            used_s = max(modified_s, names.get(name + SUM, 0.0))
            if now_s - used_s > (DAY_S if name.startswith(SCRATCH) else KEPT_S):
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        log.debug("cannot tidy %s: %s", folder, error)


def load_arrays(name: str) -> tuple[Mapping[str, np.ndarray[Any, Any]], Any] | None:
    import numpy as np

    payload = load(name)
    if payload is None:
        return None
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as entry:
            arrays = {key: entry[key] for key in entry.files}
        return arrays, json.loads(arrays.pop("json").tobytes())
    except (ValueError, KeyError, AttributeError, EOFError, OSError, zipfile.BadZipFile):
        return None  # of another version of numpy, or of something else: found out again


def store_arrays(name: str, arrays: Mapping[str, np.ndarray[Any, Any]], beside: Any) -> None:
    import numpy as np

    text = np.frombuffer(json.dumps(beside).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, json=text, **arrays)  # type: ignore[arg-type]
    store(name, buffer.getvalue())


def data_digest(paths: Sequence[Path]) -> str:
    """Hex BLAKE3 over the bytes of a data set's files, in their order. Their names and places do not matter."""
    return blake3(b"shoal/data/v1\n" + "\n".join(file_digest(path) for path in paths).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Hex BLAKE3 of a file's bytes, remembered until the file changes."""
    name = entry_name("digest", identity(path))
    known = load(name)
    if known is not None:
        return known.decode()
    hasher, buffer = blake3(max_threads=blake3.AUTO), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:  # a mapping of the file would count as this process's memory
            while size := file.readinto(buffer):
                hasher.update(view[:size])
    except OSError as error:
        raise EnvironmentSetupError(f"cannot read the data {path}: {error.strerror or error}") from None
    if entry_name("digest", identity(path)) == name:  # it was not changed meanwhile
        store(name, hasher.hexdigest().encode())
    return hasher.hexdigest()


def unpacked(name: str, write: Callable[[Path], None]) -> Path:
    """A file in the cache folder; `write` makes it anew if it is not there, or not as it was written (`OSError`)."""
    path, wanted = cache_folder() / name, load(name + SUM)
    with contextlib.suppress(OSError, EnvironmentSetupError):
        if wanted is not None and file_digest(path).encode() == wanted:
            return path
    with placed(name) as scratch:
        write(scratch)
    store(name + SUM, file_digest(path).encode())
    return path


def is_kept(path: Path) -> bool:
    """Whether an unpacked file that is in use is still there: the cache may be deleted at any time."""
    mark_used(path.with_name(path.name + SUM))
    return path.exists()


def leave_room(folder: Path) -> None:
    """Refuse to continue writing when the disk is about to be full: others need it, too."""
    if shutil.disk_usage(folder).free < SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
