"""Files that survive a crash: written completely or not at all, and on the disk when the call returns.

A failed write is reported to people with one kind of message (`resource_error`), whichever library noticed it.

One process per folder (`FolderLock`): two trainers writing one checkpoint folder would ruin it. The lock is the
operating system's (`flock`): it goes away with the process that held it, however that ended.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Self

from shoal.errors import DiskError, ResourceError
from shoal.runtime.stop import StopToken

_HINTS = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "permission denied: choose a folder that this user may write to"),
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EIO: "the disk fails (input/output error): save what is on it",
    errno.ELOOP: "it is a link, or no plain file: remove it",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a part of the path is a file, not a folder"),
}
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
POLL_S = 0.1  # between two looks at a lock
FULL_BYTES = 16 * 1024  # with less free space, a log line or a database page may not fit


def resource_error(action: str, path: Path, error: Exception) -> ResourceError:
    """The operating system's error as one sentence that says what to do."""
    lost = _RUST_ERROR.search(str(error))  # the text of errors from Rust has the number
    number = (error.errno or 0) if isinstance(error, OSError) else int(lost[1]) if lost else 0
    message = getattr(error, "strerror", None) or str(error)
    kind = DiskError if number in _DISK else ResourceError
    return kind(f"cannot {action} {path}: {_HINTS.get(number, message)}")


def is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path).free < FULL_BYTES
    except OSError:
        return False


def ensure_folder(path: Path, private: bool = False) -> Path:
    """Make the folder if needed, and prove that it is writable. A private one is closed to other users."""
    probe = path / f".write-test-{os.urandom(8).hex()}"
    try:
        path.mkdir(mode=PRIVATE_FOLDER if private else 0o777, parents=True, exist_ok=True)
        if private and path.stat().st_mode & 0o077:
            path.chmod(PRIVATE_FOLDER)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise resource_error("write to the folder", path, error) from error
    return path


def make_private(path: Path) -> None:
    """Make a file that no other user may read, empty if it is new."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
    except FileExistsError:
        with contextlib.suppress(OSError):  # a file of another user, or a read-only disk
            if path.stat().st_mode & 0o077:
                path.chmod(PRIVATE)
    except OSError as error:
        raise resource_error("write", path, error) from error


def open_in_place(path: Path, flags: int) -> int:
    """A descriptor for writing a file in place; links and devices are refused."""
    descriptor = os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return descriptor


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a rename is on disk only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to `path`: readers see the old or the new bytes; after the return a crash keeps the new ones."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # report the first error
            temporary.unlink(missing_ok=True)
        raise resource_error("write", path, error) from error


def home() -> Path:
    """The folder of identities, known hubs and kept ledger heads: `~/.shoal`, or SHOAL_HOME."""
    given = os.environ.get("SHOAL_HOME")
    try:
        return Path(given).absolute() if given else Path.home() / ".shoal"
    except RuntimeError as error:
        raise ResourceError(f"this user has no home folder ({error}): name a folder in SHOAL_HOME") from error


class FolderLock:
    def __init__(self, folder: Path) -> None:
        self._path, self._descriptor = folder / ".lock", -1

    def acquire(self, stop: StopToken, wait_s: float = 0.0) -> Self:
        """Take the lock, waiting up to `wait_s` for a holder that is just ending."""
        ensure_folder(self._path.parent)
        end_s = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= end_s or stop.wait(POLL_S):
                holder = "unknown"
                with contextlib.suppress(OSError):
                    holder = self._path.read_text().strip() or holder
                advice = "stop that one first, or use another folder"
                raise ResourceError(f"the folder {self._path.parent} is in use by process {holder}; {advice}")
        return self

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try(self) -> bool:
        try:
            self._descriptor = open_in_place(self._path, os.O_RDWR)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed with its folder meanwhile.
            if os.path.samestat(os.fstat(self._descriptor), self._path.stat()):
                os.ftruncate(self._descriptor, 0)
                os.write(self._descriptor, f"{os.getpid()}\n".encode())
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            self.release()
            raise resource_error("lock", self._path, error) from error
        self.release()
        return False
