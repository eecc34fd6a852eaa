"""`shoal doctor`: is this machine fit for shoal, and can it reach a hub? One line per finding, with the remedy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import httpx

from shoal.client import split_join_url
from shoal.errors import ShoalError
from shoal.protocol import RunStatus
from shoal.protocol.signing import MAX_SKEW_MS
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.files import ensure_folder

GIB = 2**30
LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 11)
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_DISK_BYTES = 2 * GIB
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str

    @property
    def line(self) -> str:
        return f"{'ok     ' if self.ok else 'problem'}  {self.name:<8} {self.text}"


def examine(url: str | None, folder: Path, clock: Clock = SystemClock()) -> list[Finding]:
    """Look at everything; a check that cannot be made is a problem, not a crash."""
    findings = [
        check() for check in (_python, _torch, _cores, _memory, lambda: _disk(folder), lambda: _writable(folder))
    ]
    return [*findings, *(_hub(url, clock) if url is not None else [])]


def _python() -> Finding:
    text = f"{platform.python_version()} ({sys.executable})"
    return _judged("python", sys.version_info[:2] >= LEAST_PYTHON, text, "install Python 3.11 or newer")


def _torch() -> Finding:
    """Read from the package's metadata: importing torch takes seconds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding(
            "torch", False, "not installed; install it (see README), unless this machine is only a relay or hub"
        )
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return _judged(
        "torch", numbers >= LEAST_TORCH, version, f"install torch {'.'.join(map(str, LEAST_TORCH))} or newer"
    )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _judged("cores", cores >= 2, str(cores), "a whole run on one core is slow: start fewer roles here")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _judged("memory", total >= LEAST_MEMORY_BYTES, f"{total / GIB:.1f} GiB", "torch and a tiny model need 2 GiB")


def _disk(folder: Path) -> Finding:
    existing = next(
        (parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()), Path("/")
    )
    free = shutil.disk_usage(existing).free
    text = f"{free / GIB:.1f} GiB free at {existing}"
    return _judged("disk", free >= LEAST_DISK_BYTES, text, "free some space, or use another folder")


def _writable(folder: Path) -> Finding:
    try:
        return Finding("folder", True, f"{ensure_folder(folder.absolute())} is writable")
    except ShoalError as error:
        return Finding("folder", False, str(error))


def _hub(url: str, clock: Clock) -> Iterator[Finding]:
    """Can the hub be reached, and do the clocks agree? Signed requests are refused when they differ too much."""
    try:
        base, _ = split_join_url(url)
        answer = httpx.get(f"{base}/status", timeout=TIMEOUT_S)
        status = RunStatus.model_validate_json(answer.raise_for_status().content)
    except (ShoalError, httpx.HTTPError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        yield Finding("hub", False, f"{url} does not answer as a hub ({reason}); check the address and your network")
        return
    yield Finding("hub", True, f"{base} runs {status.run}, step {status.step} of {status.steps}")
    skew_s = (clock.now_ms() - status.now_ms) / 1000
    text = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the hub"
    yield _judged(
        "clock", abs(skew_s) * 1000 < MAX_SKEW_MS / 2, text, "set this machine's clock, for instance with NTP"
    )


def _judged(name: str, ok: bool, text: str, remedy: str) -> Finding:
    return Finding(name, ok, text if ok else f"{text}; {remedy}")
