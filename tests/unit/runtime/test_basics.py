"""Clocks, back-off, stopping."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ResourceError
from shoal.runtime.clock import Backoff, ManualClock, SteadyClock, SystemClock
from shoal.runtime.files import write_atomically
from shoal.runtime.stop import Flag


def test_a_failed_write_keeps_the_old_bytes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")

    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ResourceError, match="the disk is full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_back_off_doubles_up_to_its_most_and_spreads() -> None:
    backoff = Backoff(first_s=1.0, most_s=6.0)
    for attempt, most in enumerate([1, 2, 4, 6, 6]):
        waits = [backoff.wait_s(attempt) for _ in range(50)]
        assert most / 2 <= min(waits) < max(waits) <= most
    assert backoff.wait_s(10**9) <= 6.0


SIGNALLED = """
from shoal.runtime.stop import stop_on_signals
stop = stop_on_signals()
print("ready", flush=True)
stop.wait(60)
print("stopping:", stop.reason, flush=True)
import time; time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_token_and_a_second_one_ends_a_process_that_hangs(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"stopping: {number.name}\n".encode()
        process.send_signal(number)
        assert process.wait(20) == -number


HOUR_S = 3600.0
MOVES = st.lists(
    st.tuples(st.sampled_from(["advance", "jump"]), st.floats(0, 100), st.booleans()).map(
        lambda move: (move[0], move[1] if move[0] == "advance" else (1 if move[2] else -1) * move[1] * 72)
    ),
    max_size=40,
)


def test_without_jumps_it_is_the_wall_clock_and_continues_from_an_earlier_process() -> None:
    wall = ManualClock()
    steady = SteadyClock(wall)
    for seconds in (0.001, 0.4, 0.0, 3.7, 86_400):
        wall.advance(seconds)
        assert steady.now_ms() == wall.now_ms()
    assert abs(SteadyClock(SystemClock()).now_ms() - SystemClock().now_ms()) < 1000
    wall = ManualClock()
    written_ms = wall.now_ms() + 60_000
    steady = SteadyClock(wall, not_before_ms=written_ms)
    assert steady.now_ms() == written_ms
    wall.advance(10)
    assert steady.now_ms() == written_ms + 9_000, "a tenth slower, until the wall clock has caught up"


@given(MOVES)
def test_it_never_goes_back_and_measures_time_within_a_tenth(moves: list[tuple[str, float]]) -> None:
    wall = ManualClock()
    steady = SteadyClock(wall)
    for kind, seconds in moves:
        before_ms, before_s = steady.now_ms(), wall.monotonic_s()
        (wall.advance if kind == "advance" else wall.jump)(seconds)
        passed_ms = (wall.monotonic_s() - before_s) * 1000
        # two readings are each rounded to a millisecond
        assert abs(steady.now_ms() - before_ms - passed_ms) <= passed_ms / 10 + 1.01
        assert steady.now_ms() >= before_ms


DEADLINE_S = 10.0


def test_a_flag_wakes_everyone_who_waits_and_stays_set() -> None:
    flag = Flag()
    assert not flag.wait(0.0)
    woken = [threading.Thread(target=flag.wait, args=(600.0,), daemon=True) for _ in range(5)]
    for thread in woken:
        thread.start()
    flag.set()
    for thread in woken:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in woken)
    assert flag.is_set()
    assert flag.wait(600.0)


def interrupted(flag: Flag, moment: int) -> int:
    """Wait for the flag, which is set at the given moment of that wait, by the waiting thread; returns the moments."""
    seen = 0

    def hook(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            flag.set()

    sys.setprofile(hook)
    try:
        flag.wait(0.01)
    finally:
        sys.setprofile(None)
    return seen


def test_flag_is_set_by_a_signal_handler_in_its_waiter() -> None:
    """`threading.Event` cannot: `set` would wait for the lock that the interrupted `wait` holds."""
    moments = interrupted(Flag(), 0)
    flags = [Flag() for _ in range(moments)]
    asked = [(flag, moment) for moment, flag in enumerate(flags, 1)]
    waiters = [threading.Thread(target=interrupted, args=each, daemon=True) for each in asked]
    for thread in waiters:
        thread.start()
    end_s = time.monotonic() + DEADLINE_S
    for thread in waiters:
        thread.join(max(0.0, end_s - time.monotonic()))
    assert moments > 3
    assert not any(thread.is_alive() for thread in waiters)
    assert all(flag.is_set() for flag in flags)
