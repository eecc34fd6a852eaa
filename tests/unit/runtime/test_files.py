"""Locks of folders, full disks, and the rows of metrics.jsonl."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.smalldisk import SmallDisk, in_own_namespace, small_disk
from shoal.errors import DiskError, ResourceError
from shoal.runtime.files import FolderLock, is_full, resource_error, write_atomically
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken
from shoal.runtime.supervise import last_line

HOLD = """
import sys
from pathlib import Path
from shoal.runtime.files import FolderLock
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
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ResourceError, match=f"process {holder.pid}"):
            FolderLock(tmp_path).acquire(StopToken())
        holder.kill()
        FolderLock(tmp_path).acquire(StopToken(), wait_s=10).release()


def test_a_lock_removed_with_its_folder_meanwhile_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two want a folder; the first removes it and makes it anew: the second must not hold what no longer lies there."""
    flock = fcntl.flock

    def replaced_meanwhile(descriptor: int, operation: int) -> None:
        (tmp_path / ".lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    with pytest.raises(ResourceError, match="in use"):
        FolderLock(tmp_path).acquire(StopToken())


DEV_FULL = Path("/dev/full")
SENTENCE = "the disk is full: free some space"
LOGGING = """
import logging
from pathlib import Path
from shoal.runtime import logs
logs.setup("hub", Path("/dev/full"))
logging.getLogger("shoal.hub").warning("a sentence")
"""


@pytest.mark.parametrize(("error", "kind", "hint"), [
    (OSError(errno.ENOSPC, "No space left"), DiskError, SENTENCE),
    (RuntimeError("I/O error: No space left on device (os error 28)"), DiskError, SENTENCE),
    (OSError(errno.EROFS, "Read-only"), DiskError, "the file system is read-only: choose another folder"),
    (OSError(errno.EIO, "I/O"), DiskError, "the disk fails"),
    (OSError(errno.EACCES, "no"), ResourceError, "permission denied: choose a folder that this user may write to"),
    (OSError(errno.EMFILE, "Too many open files"), ResourceError, "Too many open files"),
    (RuntimeError("the header is too long"), ResourceError, "the header is too long"),
])  # fmt: skip
def test_full_disk_has_one_message_for_every_library(error: Exception, kind: type[ResourceError], hint: str) -> None:
    said = resource_error("write", Path("/data/x"), error)
    assert type(said) is kind
    assert str(said).startswith(f"cannot write /data/x: {hint}")
    assert said.exit_code == 3


WRITES: dict[str, Callable[[Path], object]] = {
    "a lock": lambda folder: FolderLock(folder).acquire(StopToken()),
    "a row": lambda folder: MetricsLog(folder / "metrics.jsonl").append(1, {"loss": 1.0}),
    "a file": lambda folder: write_atomically(folder / "metrics.jsonl", b"new" * 5000),
}


@pytest.mark.parametrize("what", WRITES)
def test_failed_write_keeps_the_old_file(tmp_path: Path, request: pytest.FixtureRequest, what: str) -> None:
    if in_own_namespace(request):
        return
    with small_disk(tmp_path / "disk", "64k") as disk:
        metrics = MetricsLog(disk.path / "metrics.jsonl")
        metrics.append(0, {"loss": 2.0})
        disk.fill()
        fill_last_page(disk, metrics.path)
        with pytest.raises(DiskError, match=SENTENCE):
            WRITES[what](disk.path)
        disk.free()
        assert metrics.rows() == [{"step": 0, "loss": 2.0}]
        WRITES[what](disk.path)


def fill_last_page(disk: SmallDisk, path: Path) -> None:
    """A file's last page has room although the disk has none: take that too, with blank lines."""
    with path.open("ab", buffering=0) as file:
        file.write(b"\n" * (-path.stat().st_size % 4096))
    assert is_full(disk.path)


@pytest.mark.skipif(not DEV_FULL.exists(), reason="this system has no /dev/full")
class TestNowhereToSayIt:
    def test_a_log_that_cannot_be_written_shows_nothing_but_its_line(self) -> None:
        ran = subprocess.run([sys.executable, "-c", LOGGING], capture_output=True, text=True, timeout=60, check=True)
        assert ran.stderr.count("\n") == 1
        assert ran.stderr.endswith("WARN  hub        a sentence\n")

    @pytest.mark.parametrize("supervised", [{}, {"SHOAL_SUPERVISED": "1"}])
    def test_a_command_ends_with_the_right_code_although_nobody_hears_why(self, tmp_path, supervised):
        command = [sys.executable, "-m", "shoal.cli", "hub", str(tmp_path / "none")]
        with DEV_FULL.open("wb") as full:
            ran = subprocess.run(command, stdin=subprocess.PIPE, stdout=full, stderr=full, env=supervised, timeout=60)
        assert ran.returncode == 2


def test_a_log_that_could_not_say_why_does_not_stand_for_it(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if in_own_namespace(request):
        return
    with small_disk(tmp_path / "logs", "64k") as disk:
        (disk.path / "hub.log").write_text("12:00:00.000 INFO  hub        all is well\n")
        disk.fill()
        assert f"the disk of {disk.path} is full" in last_line(disk.path / "hub.log")
        disk.free()
        assert last_line(disk.path / "hub.log").endswith("all is well")


def test_a_rewind_forgets_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.rewind(0)  # nothing there: nothing to forget
    for step in range(4):
        log.append(step, {"loss": float(step)})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    log.rewind(2)
    log.append(2, {"loss": 9.0})
    assert [(row["step"], row["loss"]) for row in log.rows()] == [(0, 0.0), (1, 1.0), (2, 9.0)]


def test_a_rewind_keeps_what_a_row_says_of_its_version_until_the_row_is_written_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"loss": 0.5})
    log.append(1, {"held_out": 0.9, "loss": 0.4})
    log.append(2, {"held_out": 0.8})
    log.rewind(1, keep=("held_out",))
    assert log.rows() == [{"step": 0, "loss": 0.5}, {"step": 1, "held_out": 0.9}]
    again = MetricsLog(log.path)  # another crash before the row is written
    again.rewind(1, keep=("held_out",))
    assert again.append(1, {"loss": 0.3}) == {"step": 1, "held_out": 0.9, "loss": 0.3}
    assert again.append(2, {"loss": 0.2}) == {"step": 2, "loss": 0.2}
    assert [row["step"] for row in again.rows()] == [0, 1, 2]
    again.rewind(1, keep=("held_out",))
    again.append(1, {"held_out": 0.7})  # what is measured anew counts
    assert again.rows()[1:] == [{"step": 1, "held_out": 0.7}]
    again.rewind(0, keep=("held_out",))
    assert again.rows() == []


def test_amend_adds_to_the_row_of_its_step_and_nan_is_never_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append(0, {"loss": float("nan")})
    assert log.rows() == []
    for step in range(3):
        log.append(step, {"loss": float(step)})
    assert log.amend(1, {"held_out": 0.5}) == {"step": 1, "loss": 1.0, "held_out": 0.5}
    assert log.rows() == [{"step": 0, "loss": 0.0}, {"step": 1, "loss": 1.0, "held_out": 0.5}, {"step": 2, "loss": 2.0}]
    assert log.amend(1, {"held_out": 0.5}) is None, "it says so already"
    assert log.amend(7, {"held_out": 0.5}) is None, "there is no such row"


def test_a_row_that_a_rewind_left_in_part_can_be_added_to(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"loss": 1.0, "held_out": 0.25})
    log.rewind(0, keep=("held_out",))
    log.amend(0, {"extra": 2.0})
    assert log.append(0, {"loss": 3.0}) == {"step": 0, "held_out": 0.25, "extra": 2.0, "loss": 3.0}
    assert len(log.rows()) == 1


@pytest.mark.parametrize("value", ["null", '"fast"', "NaN", "-Infinity", "true", "[1]", '{"a": 1}', "1" + "0" * 400])
def test_values_that_are_not_numbers_are_skipped(tmp_path: Path, value: str) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.path.write_text(f'{{"step": 0, "loss": 0.5, "rate_factor": {value}}}\n{{"step": {value}, "loss": 0.25}}\n')
    assert log.rows() == [{"step": 0, "loss": 0.5}]
    log.rewind(1)
    assert log.append(1, {"loss": 0.1}) == {"step": 1, "loss": 0.1}


@pytest.mark.parametrize("use", [MetricsLog.rows, lambda log: log.rewind(1), lambda log: log.append(0, {})])
def test_a_folder_in_its_place_is_one_clear_error(tmp_path: Path, use: Callable[[MetricsLog], object]) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ResourceError, match=r"cannot (read|write) .*metrics\.jsonl: Is a directory"):
        use(MetricsLog(tmp_path / "metrics.jsonl"))
