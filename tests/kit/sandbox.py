"""What the tests of the sandbox share: whether there is one, short limits, and what is left on the machine."""

import os
import shutil
import time
from pathlib import Path

import pytest

from shoal.environments.sandbox import Limits, Ran, Sandbox

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap (bwrap) is not installed")

SHORT = Limits(cpu_s=1, test_cpu_s=1, memory_mb=256, output_bytes=1_000_000)


def run(code: str, given: str = "", limits: Limits = SHORT) -> Ran:
    """One test of a program in a sandbox of its own."""
    with Sandbox(code.encode(), limits) as sandbox:
        return sandbox.run(given.encode())


def said(code: str, given: str = "") -> str:
    """What a program printed that ended well."""
    ran = run(code, given)
    assert ran.ended == "well", (ran.ended, ran.errors.decode())
    return ran.output.decode().strip()


def sandboxed() -> set[int]:
    """The processes on this machine whose command line is that of a sandbox's interpreter or of bubblewrap."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--as-pid-1" in words or b"int_max_str_digits=0" in words:
                found.add(int(folder.name))
    return found


def children() -> set[int]:
    """Processes of sandboxes below this one: other tests' do not count."""
    return {process for process in sandboxed() if _descends(process, os.getpid())}


def gone(processes: set[int], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while processes & sandboxed():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _descends(process: int, ancestor: int) -> bool:
    while process > 1:
        if process == ancestor:
            return True
        try:
            process = int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False
