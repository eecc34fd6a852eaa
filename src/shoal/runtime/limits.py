"""How much of its machine a process may use (memory, disk, bandwidth), and how much there is."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError

FREE_SHARE = 0.8  # of what is free, where nothing else was said
SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LEAST_RATE_BYTES_S = 8_000.0
UNLIMITED_BYTES = 1 << 62
FILES_WANTED = 65_536


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
