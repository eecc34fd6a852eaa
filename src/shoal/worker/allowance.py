"""When a worker may work: within its hours, while others leave the processor alone, and while nobody has paused it.

    hours, other programs' use of the processor, FOLDER/paused ─► Allowance.why_not() ─► worker: no leases, no weights;
                                                                                         running work is given back

What is not seen: other programs' use of a GPU, and that of programs with a nice value above 0, such as this one.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError, ResourceError
from shoal.runtime import Clock, SystemClock

log = logging.getLogger(__name__)

PAUSED = "paused"
DAY_MIN = 24 * 60
HOURS_HELP = "write for example 22-7, or 12:30-14,20-24; without --hours it works all day"
STAT = Path("/proc/stat")
NICE = 10
BUSY_SHARE = 0.25  # of all processors: with more, the machine is in use
LOOK_S = 5.0  # others' use is measured over at least so long
QUIET_S = 60.0  # and must have been small for so long before work resumes


@dataclass(frozen=True)
class Hours:
    """Parts of each day in local time, as minutes from midnight; none: all day. The clock on the wall counts: when it
    is set forward, an hour that does not exist is not worked; when it is set back, one is worked twice.

    >>> Hours.parse("22-7").windows
    ((1320, 420),)
    """

    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Hours":
        windows = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d\d?)(?::(\d\d))?\s*-\s*(\d\d?)(?::(\d\d))?\s*", part, re.ASCII)
            if match is None:
                raise ConfigError(f"--hours {text!r}: {part.strip()!r} is no part of a day: {HOURS_HELP}")
            first, first_min, end, end_min = (int(number or 0) for number in match.groups())
            begin_min, end_min, valid = 60 * first + first_min, 60 * end + end_min, max(first_min, end_min) < 60
            if not valid or begin_min >= DAY_MIN or end_min > DAY_MIN:
                raise ConfigError(f"--hours {text!r}: a day has 0:00 to 24:00: {HOURS_HELP}")
            if begin_min == end_min:
                raise ConfigError(f"--hours {text!r}: {part.strip()!r} ends when it begins: {HOURS_HELP}")
            windows.append((begin_min, end_min))
        return cls(tuple(windows))

    def is_open(self, at_s: float) -> bool:
        """`at_s`: seconds since 1970."""
        now_min = _minute_of_day(at_s)
        return not self.windows or any(
            begin <= now_min < end if begin < end else now_min >= begin or now_min < end for begin, end in self.windows
        )

    def opens(self, at_s: float) -> str:
        """The next beginning, as `22:00`."""
        now_min = _minute_of_day(at_s)
        begin = min((begin for begin, _ in self.windows), key=lambda begin: (begin - now_min) % DAY_MIN)
        return f"{begin // 60}:{begin % 60:02d}"


ALL_DAY = Hours()


def _minute_of_day(at_s: float) -> int:
    local = time.localtime(at_s)
    return 60 * local.tm_hour + local.tm_min


def others_busy_s() -> float:
    """Processor seconds that other programs without a nice value above 0 have used since the machine started.
    Time in the kernel is not split by niceness."""
    user, _nice, system, _idle, _iowait, irq, softirq = map(int, STAT.read_text().split()[1:8])
    return (user + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - os.times().system


class OtherLoad:
    """Whether others use the processor. To be asked often; it measures every `LOOK_S`."""

    def __init__(self, clock: Clock = SystemClock(), busy_s: Callable[[], float] = others_busy_s) -> None:
        self._clock, self._read = clock, busy_s
        self._cores, self._at_s = os.cpu_count() or 1, clock.monotonic_s()
        self._share, self._quiet_at_s = 0.0, self._at_s + LOOK_S
        try:
            self._before_s = busy_s()
        except (OSError, ValueError, IndexError) as error:
            raise ResourceError(
                f"--idle needs {STAT} of Linux ({error}): use --hours, or shoal leave RUN --pause"
            ) from error

    def why_not(self) -> str:
        now_s = self._clock.monotonic_s()
        if now_s - self._at_s >= LOOK_S:
            used_s = self._read()
            self._share = (used_s - self._before_s) / (now_s - self._at_s) / self._cores
            self._before_s, self._at_s = used_s, now_s
            if self._share > BUSY_SHARE:
                self._quiet_at_s = now_s + QUIET_S
        if now_s >= self._quiet_at_s:
            return ""
        return f"paused until this machine is idle (others use {max(0.0, self._share):.0%} of its processors)"


def give_way() -> None:
    """For `--idle`: a nice value above 0 for this process and those that it will start, so that `others_busy_s` leaves
    them out. `ResourceError` if this machine does not tell."""
    OtherLoad()
    os.nice(max(0, NICE - os.nice(0)))
    log.info(
        "other programs' use of a GPU is not seen, only that of the processor: shoal leave RUN --pause, or --hours"
    )


class Allowance:
    """`why_not` says in words why the worker may not work now; empty if it may. For one thread."""

    def __init__(
        self, folder: Path | None = None, hours: Hours = ALL_DAY, load: OtherLoad | None = None,
        clock: Clock = SystemClock(),
    ) -> None:  # fmt: skip
        self._pause, self._hours, self._load, self._clock = folder and folder / PAUSED, hours, load, clock

    def why_not(self) -> str:
        now_s = self._clock.now_ms() / 1000
        if self._pause is not None and self._pause.exists():
            return "paused by its owner"
        if not self._hours.is_open(now_s):
            return f"paused until {self._hours.opens(now_s)}"
        return self._load.why_not() if self._load is not None else ""
