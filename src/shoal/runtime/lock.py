"""One process per folder: two trainers writing one checkpoint folder would ruin it.

The lock is the operating system's (`flock`): it goes away with the process that held it, however that ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from shoal.errors import ResourceError
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.files import ensure_folder, open_in_place, resource_error
from shoal.runtime.stop import StopToken

POLL_S = 0.1


class FolderLock:
    """Held from `acquire` to `release` (or the end of the process). The file contains the pid of the holder."""

    def __init__(self, folder: Path, clock: Clock = SystemClock()) -> None:
        self._path, self._clock, self._descriptor = folder / ".lock", clock, -1

    def acquire(self, stop: StopToken, wait_s: float = 0.0) -> FolderLock:
        """Take the lock, waiting up to `wait_s` for a holder that is just ending."""
        ensure_folder(self._path.parent)
        end = self._clock.monotonic_s() + wait_s
        while not self._try():
            if self._clock.monotonic_s() >= end or stop.wait(POLL_S):
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

    def __enter__(self) -> FolderLock:
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
