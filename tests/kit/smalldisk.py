"""A disk of a few megabytes that a test may fill: a tmpfs of its own.

Root mounts it. Anybody else runs the test once more inside a user namespace, where a user is root (`in_own_namespace`).
Where neither is allowed the test is skipped and says so.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit import Request

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
PAGE_BYTES = 4096
TIMEOUT_S = 280


@dataclass(frozen=True)
class SmallDisk:
    """A mounted tmpfs. It can be filled to the last byte, freed again, grown, and made read-only."""

    path: Path

    def fill(self) -> None:
        """Leave not a single page."""
        with (self.path / ".filler").open("wb", buffering=0) as file:
            for size_bytes in (256 * PAGE_BYTES, PAGE_BYTES):
                try:
                    while True:
                        file.write(bytes(size_bytes))
                except OSError:
                    continue
        assert shutil.disk_usage(self.path).free == 0

    def free(self) -> None:
        (self.path / ".filler").unlink()

    def remount(self, option: str) -> None:
        """For instance `size=64m` or `ro`. The options it has are not repeated: a namespace may not set its owner."""
        command = ["mount", "--options-source=disable", "-o", f"remount,{option}", str(self.path)]
        subprocess.run(command, check=True)


@contextmanager
def small_disk(path: Path, size: str = "32m") -> Iterator[SmallDisk]:
    """A disk of its own at `path`, for as long as the block lasts."""
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"this machine lets nobody mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def in_own_namespace(request: Request) -> bool:
    """Whether the test was done elsewhere: run once more, and passed, as the root of a namespace of its own."""
    if os.geteuid() == 0:
        return False
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root or user namespaces (unshare), and this machine allows neither")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own belongs to a root of that name, if there is one
        options = ["-p", "no:cacheprovider", f"--basetemp={folder}/inner"]
        command = [*NAMESPACE, sys.executable, "-m", "pytest", *options, request.node.nodeid]
        ran = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " skipped" not in ran.stdout.splitlines()[-1], ran.stdout
    return True
