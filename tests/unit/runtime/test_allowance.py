"""When a worker may work: hours of the local time, the load of other programs, a file that pauses it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import Patch
from shoal.errors import ResourceError
from shoal.runtime import ManualClock, limits
from shoal.runtime.limits import Allowance, Hours, OtherLoad

SUMMER, WINTER = 1774746000, 1792890000
"""2026-03-29 01:00 UTC, when clocks of Berlin go from 2:00 to 3:00; 2026-10-25 01:00 UTC, when they go back."""


@pytest.fixture
def berlin(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(("hours", "at_s", "is_open", "opens"), [
    ("22-7", SUMMER - 10 * 3600 - 1, False, "22:00"),  # 15:59:59
    ("22-7", SUMMER - 4 * 3600 - 1, False, "22:00"),  # 21:59:59
    ("22-7", SUMMER - 4 * 3600, True, "22:00"),  # 22:00
    ("22-7", SUMMER + 4 * 3600 - 1, True, "22:00"),  # 6:59:59 of summer time: the night has one hour less
    ("22-7", SUMMER + 4 * 3600, False, "22:00"),
    ("2-3", SUMMER - 1, False, "2:00"), ("2-3", SUMMER, False, "2:00"),  # 1:59:59, then 3:00: there is no 2:30
    ("2:30-4", SUMMER - 1, False, "2:30"), ("2:30-4", SUMMER, True, "2:30"),
    ("2-3", WINTER - 1800, True, "2:00"), ("2-3", WINTER + 1800, True, "2:00"),  # 2:30 comes twice
    ("2-3", WINTER + 3600, False, "2:00"),
    ("12:30-14,20-24", WINTER + 10 * 3600, False, "12:30"),  # 12:00 of winter time
    ("12:30-14,20-24", WINTER + 11 * 3600, True, "20:00"), ("12:30-14,20-24", WINTER + 12 * 3600, False, "20:00"),
    ("12:30-14,20-24", WINTER + 22 * 3600 - 1, True, "12:30"), ("12:30-14,20-24", WINTER + 22 * 3600, False, "12:30"),
    ("0-24", WINTER, True, "0:00"), ("22-0", WINTER + 21 * 3600, True, "22:00"),
])  # fmt: skip
def test_hours_are_of_the_clock_on_the_wall(berlin, hours, at_s, is_open, opens):
    found = Hours.parse(hours)
    assert (found.is_open(at_s), found.opens(at_s)) == (is_open, opens)


def test_others_load_closes_above_a_quarter_and_opens_after_a_quiet_minute(monkeypatch: Patch) -> None:
    """Four processors: in 5 s others use 5 s of 20 (a quarter), then 6 s, then nothing."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    clock, used = ManualClock(), [100.0]
    load = OtherLoad(clock, lambda: used[0])
    assert load.why_not() == "paused until this machine is idle (others use 0% of its processors)", "not measured yet"
    for seconds, of_others, said in (
        (4.9, 20.0, "others use 0%"), (0.1, -15.0, ""), (5, 6.0, "others use 30%"), (59, 0.0, "others use 0%"),
        (1, 1.0, ""), (4, 0.0, ""), (4.9, 12.0, ""), (0.1, 0.0, "others use 60%"),
    ):  # fmt: skip
        clock.advance(seconds)
        used[0] += of_others
        found = load.why_not()
        assert said in found, (seconds, of_others)
        assert bool(found) == bool(said)


def test_time_of_others_leaves_out_niced_programs_and_this_ones_kernel_time(tmp_path: Path, monkeypatch: Patch) -> None:
    """Ticks of 1/100 s: user 300, nice 9000, system 200, idle 5000, iowait 70, irq 4, softirq 6, steal 90."""
    (tmp_path / "stat").write_text("cpu  300 9000 200 5000 70 4 6 90 0 0\ncpu0 300 9000 200 5000 70 4 6 90 0 0\n")
    monkeypatch.setattr(limits, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sysconf", lambda _name: 100)
    monkeypatch.setattr(os, "times", lambda: os.times_result((8.0, 1.5, 0.0, 0.0, 10.0)))
    assert limits.others_busy_s() == pytest.approx(3.0 + 2.0 + 0.04 + 0.06 - 1.5)
    monkeypatch.setattr(limits, "STAT", tmp_path / "none")
    with pytest.raises(ResourceError, match=r"--idle needs .*none of Linux .*: use --hours, or shoal leave RUN"):
        OtherLoad()


@pytest.mark.parametrize(("paused", "hours", "others", "said"), [
    (False, "", 0.0, ""), (False, "10-13", 0.0, ""), (True, "10-13", 0.0, "paused by its owner"),
    (True, "13-14", 9.0, "paused by its owner"), (False, "13-14", 9.0, "paused until 13:00"),
    (False, "10-13", 9.0, "paused until this machine is idle (others use 90% of its processors)"),
])  # fmt: skip
def test_the_first_of_pause_hours_and_load_is_why_not(tmp_path, monkeypatch, paused, hours, others, said):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    clock, used = ManualClock(int(time.mktime((2026, 1, 15, 12, 0, 0, 0, 0, -1))) * 1000), [0.0]
    load = OtherLoad(clock, lambda: used[0])
    clock.advance(10)
    used[0] = others
    if paused:
        (tmp_path / "paused").touch()
    allowed = Allowance(tmp_path, Hours.parse(hours) if hours else Hours(), load, clock)
    assert allowed.why_not() == said
