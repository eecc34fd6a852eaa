"""Processes of a broadcast that are started, told to go, watched and ended by a benchmark.

    parent                         child (roles.py, or package_roles.py in another environment)
      ├─ start ───────────────────► … imports, listens
      │ ◄── {"ready": url} ────────┤
      ├─ "go" ────────────────────► publishes, or fetches
      │ ◄── {"done": seconds} ─────┤   a moment of the monotonic clock, which all processes of a machine share
      └─ end of its input ────────► stops; its times and memory are read

A child whose parent dies sees the end of its input, too, and ends: nothing is left behind.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
END_S = 15.0
POLL_S = 0.01


class Stalled(Exception):
    """A child did not say what was expected of it in time, or ended."""


@dataclass(frozen=True)
class Cost:
    """What a process, with the children that it waited for, has used."""

    cpu_s: float
    start_cpu_s: float
    peak_mb: float


class Child:
    """One process of a broadcast."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._log = log
        self._ready_cpu_s = 0.0
        self._usage: resource.struct_rusage | None = None
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, key: str, seconds: float) -> Any:
        """What the child says under `key`."""
        return self.hear(key, seconds)[key]

    def hear(self, key: str, seconds: float) -> dict[str, Any]:
        """The first saying with this key; others are skipped."""
        deadline_s = time.monotonic() + seconds
        while True:
            try:
                said = self._said.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise Stalled(f"{self.name} did not say {key!r} within {seconds:.0f} s") from None
            if said is None:
                raise Stalled(f"{self.name} ended:\n{self._log.read_text()[-2000:]}")
            if key in said:
                return said

    def ready(self, seconds: float = 60.0) -> str:
        url: str = self.expect("ready", seconds)
        self._ready_cpu_s = self._cpu_s()
        return url

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def end(self) -> Cost:
        """End the process, by force if need be; what it has cost."""
        peak_mb, cpu_s = self._peak_mb(), self._cpu_s()
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._reaped(END_S):
            os.kill(self.pid, signal.SIGKILL)
            self._reaped(END_S)
        if self._usage is not None:  # the kernel's own sum, descendants included
            cpu_s = self._usage.ru_utime + self._usage.ru_stime
        return Cost(cpu_s - self._ready_cpu_s, self._ready_cpu_s, peak_mb)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _reaped(self, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while self._usage is None and time.monotonic() < deadline_s:
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid:
                self._usage = usage
                self._process.returncode = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(POLL_S)
        return self._usage is not None

    def _cpu_s(self) -> float:
        """Processor time of the process and of the children that it has waited for."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(int(field) for field in fields[11:15]) / TICKS_PER_S

    def _peak_mb(self) -> float:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0.0
        peak = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peak[0]) / 1000 if peak else 0.0
