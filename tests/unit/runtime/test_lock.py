"""One process per folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import ResourceError
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken

HOLD = """
import sys
from pathlib import Path
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
lock = FolderLock(Path(sys.argv[1])).acquire(StopToken())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_holder_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    with (
        FolderLock(tmp_path).acquire(StopToken()),
        pytest.raises(ResourceError, match=f"in use by process {os.getpid()}"),
    ):
        FolderLock(tmp_path).acquire(StopToken())
    FolderLock(tmp_path).acquire(StopToken()).release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ResourceError, match=f"process {holder.pid}"):
            FolderLock(tmp_path).acquire(StopToken())
        holder.kill()
        FolderLock(tmp_path).acquire(StopToken(), wait_s=10).release()


def test_a_stop_ends_the_waiting(tmp_path: Path) -> None:
    stop = StopToken()
    stop.set("SIGTERM")
    with FolderLock(tmp_path).acquire(StopToken()), pytest.raises(ResourceError):
        FolderLock(tmp_path).acquire(stop, wait_s=3600)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write to the folder"):
        FolderLock(tmp_path / "file" / "x").acquire(StopToken())


def test_a_lock_removed_with_its_folder_meanwhile_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two want a folder; the first removes it and makes it anew: the second must not hold what no longer lies there."""
    flock = fcntl.flock

    def replaced_meanwhile(descriptor: int, operation: int) -> None:
        (tmp_path / ".lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    with pytest.raises(ResourceError, match="in use"):
        FolderLock(tmp_path).acquire(StopToken())
