"""How much of its machine a process may use (memory, disk, bandwidth), how much there is, and when it may work.

    hours, other programs' use of the processor, FOLDER/paused ─► Allowance.why_not() ─► worker: no leases, no weights;
                                                                                         running work is given back

What is not seen: other programs' use of a GPU, and that of programs with a nice value above 0, such as this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError, ResourceError
from shoal.runtime.clock import Clock, SystemClock

log = logging.getLogger(__name__)

FREE_SHARE = 0.8  # of what is free, where nothing else was said
SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LEAST_RATE_BYTES_S = 8_000.0
UNLIMITED_BYTES = 1 << 62
FILES_WANTED = 65_536
PAUSED = "paused"
DAY_MIN = 24 * 60
HOURS_HELP = "write for example 22-7, or 12:30-14,20-24; without --hours it works all day"
STAT = Path("/proc/stat")
NICE = 10
BUSY_SHARE = 0.25  # of all processors: with more, the machine is in use
LOOK_S = 5.0  # others' use is measured over at least so long
QUIET_S = 60.0  # and must have been small for so long before work resumes


@dataclass(frozen=True)
class MachineLimits:
    """None means a share of what is free (memory, disk), or no limit (bandwidth)."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    bandwidth_bytes_s: float | None = None

    @classmethod
    def of_options(cls, memory: str | None, disk: str | None, bandwidth: str | None) -> MachineLimits:
        return cls(
            None if memory is None else parse_size(memory, "--max-memory"),
            None if disk is None else parse_size(disk, "--max-disk"),
            None if bandwidth is None else parse_rate(bandwidth, "--max-bandwidth"),
        )

    def shared_by(self, count: int, on_processor: bool) -> MachineLimits:
        """The limits of each of `count` processes. They share the processor's memory, so each gets a part of the free
        memory; each GPU has its own."""
        memory, bandwidth = self.memory() if on_processor else self.memory_bytes, self.bandwidth_bytes_s
        if bandwidth is not None and bandwidth < count * LEAST_RATE_BYTES_S:
            raise ConfigError(f"--max-bandwidth is too little for {count} workers: give each at least 64kbit/s")
        return MachineLimits(
            None if memory is None else memory // count,
            None if self.disk_bytes is None else self.disk_bytes // count,
            None if bandwidth is None else bandwidth / count,
        )

    def memory(self) -> int:
        return int(FREE_SHARE * free_memory_bytes()) if self.memory_bytes is None else self.memory_bytes

    def disk(self, folder: Path) -> int:
        """Bytes that `folder` may contain, including those already there; it need not exist yet."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        existing = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
        return folder_bytes(folder) + int(FREE_SHARE * shutil.disk_usage(existing).free)


def parse_size(text: str, option: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([kmgt]?i?)(b?)", text.strip().lower())
    if match is None or match[2] not in SCALES or not (match[2] or match[3]) or float(match[1]) <= 0:
        raise ConfigError(f"{option} {text!r} is no amount of bytes: write for example 500MB, 8GB or 16GiB")
    return int(float(match[1]) * SCALES[match[2]])


def show_bytes(size: float) -> str:
    """For messages: `1.11 MB`, `2.4 GB`, `500 bytes`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def parse_rate(text: str, option: str) -> float:
    """Bytes per second, from bits or bytes: `20Mbit/s` is `2.5 MB/s`."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([kmgt]?i?)(bit|b)(?:/s|ps)?", text.strip().lower())
    if match is None or match[2] not in SCALES:
        raise ConfigError(f"{option} {text!r} is no bandwidth: write for example 20Mbit/s or 2.5MB/s")
    rate = float(match[1]) * SCALES[match[2]] / (8 if match[3] == "bit" else 1)
    if rate < LEAST_RATE_BYTES_S:
        raise ConfigError(f"{option} {text!r} is too little to fetch a model with: give at least 64kbit/s")
    return rate


def folder_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def free_memory_bytes() -> int:
    return min(_machine_bytes(), _container_bytes())


def _machine_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        known = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
        if "MemAvailable:" in known:
            return int(known["MemAvailable:"]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_bytes() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        most, used = int((root / "memory.max").read_text()), int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return UNLIMITED_BYTES
    return max(0, most - used + int(statistics.get("inactive_file", 0)))  # file caches can be dropped


def allow_files() -> int:
    """How many files may be open: more than the usual 1,024, as each of a thousand connections is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if 0 <= soft < wanted:  # -1 is no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted if soft < 0 else max(wanted, soft)


@dataclass(frozen=True)
class Hours:
    """Parts of each day in local time, as minutes from midnight; none: all day. The clock on the wall counts: when it
    is set forward, an hour that does not exist is not worked; when it is set back, one is worked twice.

    >>> Hours.parse("22-7").windows
    ((1320, 420),)
    """

    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Hours:
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
        self._clock, self._read, self._lock = clock, busy_s, threading.Lock()
        self._cores, self._at_s = os.cpu_count() or 1, clock.monotonic_s()
        self._share, self._quiet_at_s = 0.0, self._at_s + LOOK_S
        try:
            self._before_s = busy_s()
        except (OSError, ValueError, IndexError) as error:
            raise ResourceError(
                f"--idle needs {STAT} of Linux ({error}): use --hours, or shoal leave RUN --pause"
            ) from error

    def why_not(self) -> str:
        with self._lock:
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
    """`why_not` says in words why the worker may not work now; empty if it may."""

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
