"""Files that were unpacked into the cache folder, because a row in the middle of a packed one cannot be reached.

Beside each lies its digest: one that is not what was written (a crash, a full disk, a hand in the folder) is made anew.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.environments.data.cache import SUM, cache_folder, load, mark_used, placed, store
from shoal.environments.data.digest import file_digest
from shoal.errors import EnvironmentSetupError

SPARE_BYTES = 64 * 2**20
"""What is left free on the disk that holds the cache."""
Write = Callable[[Path], None]


def whole(name: str) -> Path | None:
    """The unpacked file of that name, if it is there as it was written. Its digest is computed when it changed."""
    wanted = load(name + SUM)
    try:
        path = cache_folder() / name
        return path if wanted is not None and file_digest(path).encode() == wanted else None
    except (OSError, EnvironmentSetupError):
        return None


def unpack(name: str, write: Write) -> Path:
    """Have a file written into the cache folder; `OSError` if that fails."""
    with placed(name) as scratch:
        write(scratch)
    path = cache_folder() / name
    store(name + SUM, file_digest(path).encode())
    return path


def is_kept(path: Path) -> bool:
    """Whether an unpacked file that is in use is still there: the cache may be deleted at any time."""
    mark_used(path.with_name(path.name + SUM))
    return path.exists()


def leave_room(folder: Path) -> None:
    """Refuse to go on writing when the disk is about to be full: others need it, too."""
    if shutil.disk_usage(folder).free < SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
