"""Stopping from signal handlers: real signals, sent to this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from shoal.runtime.stop import Flag, stop_on_signals

DEADLINE_S = 10.0


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


@pytest.mark.usefixtures("handlers")
def test_a_supervisor_is_stopped_by_the_first_signal_and_hurries_from_the_second_on() -> None:
    stop = stop_on_signals(supervising=True)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.wait(DEADLINE_S)
    assert not stop.hurry.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.hurry.wait(DEADLINE_S)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason == "SIGINT"


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


def test_a_flag_can_be_set_by_whoever_interrupts_its_waiter() -> None:
    """`threading.Event` cannot: `set` would wait for the lock that the interrupted `wait` holds."""
    moments = interrupted(Flag(), 0)
    flags = [Flag() for _ in range(moments)]
    waiters = [
        threading.Thread(target=interrupted, args=(flag, moment), daemon=True) for moment, flag in enumerate(flags, 1)
    ]
    for thread in waiters:
        thread.start()
    end_s = time.monotonic() + DEADLINE_S
    for thread in waiters:
        thread.join(max(0.0, end_s - time.monotonic()))
    assert moments > 3
    assert not any(thread.is_alive() for thread in waiters)
    assert all(flag.is_set() for flag in flags)
