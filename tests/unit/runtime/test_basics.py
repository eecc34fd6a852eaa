"""Clock, files, retry and stop: the small things every role leans on."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.errors import ResourceError
from shoal.runtime.clock import Backoff, ManualClock, SystemClock
from shoal.runtime.files import ensure_folder, write_atomically
from shoal.runtime.stop import StopToken

NO_PAUSE = Backoff(first_s=0.0, most_s=0.0)


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(start_ms=1000)
    assert (clock.now_ms(), clock.monotonic_s()) == (1000, 1.0)
    clock.advance(2.5)
    assert (clock.now_ms(), clock.monotonic_s()) == (3500, 3.5)


def test_the_system_clock_counts_milliseconds_since_1970() -> None:
    clock = SystemClock()
    assert clock.now_ms() > 1_600_000_000_000
    assert clock.monotonic_s() <= clock.monotonic_s()


def test_a_file_is_replaced_whole_with_its_mode_and_nothing_left_over(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"one")
    write_atomically(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_failed_write_keeps_the_old_bytes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    bodies = [bytes([letter]) * 100_000 for letter in b"ab"]
    write_atomically(path, bodies[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(40):
            write_atomically(path, bodies[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_bytes() in bodies
    writer.join()


def test_a_folder_below_a_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert ensure_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="a part of the path is a file") as caught:
        ensure_folder(tmp_path / "file" / "b")
    assert caught.value.exit_code == 3


def test_back_off_doubles_up_to_its_most_and_spreads() -> None:
    backoff = Backoff(first_s=1.0, most_s=6.0)
    for attempt, most in enumerate([1, 2, 4, 6, 6]):
        waits = [backoff.wait_s(attempt) for _ in range(50)]
        assert most / 2 <= min(waits) < max(waits) <= most
    assert backoff.wait_s(10**9) <= 6.0


def test_a_stop_token_keeps_its_first_reason() -> None:
    stop = StopToken()
    assert not stop.wait(0)
    stop.set("first")
    stop.set("second")
    assert stop.wait(3600)
    assert (stop.is_set(), stop.reason) == (True, "first")


SIGNALLED = """
from shoal.runtime.stop import stop_on_signals
stop = stop_on_signals()
print("ready", flush=True)
stop.wait(60)
print("stopping:", stop.reason, flush=True)
{after}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_token(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SIGNALLED.format(after="")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"stopping: {number.name}\n".encode()
        assert process.wait(20) == 0


def test_a_second_signal_ends_a_process_that_hangs() -> None:
    code = SIGNALLED.format(after="import time; time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"stopping: SIGTERM\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
