"""A real trainer process hit while it writes a checkpoint beside training: by SIGKILL, and by SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kit import TempPaths

CHILD = Path(__file__).parent / "saving_child.py"
HALFWAY = 2
DEADLINE_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def trainer(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    with (folder / "said").open("ab") as said:
        process = subprocess.Popen([sys.executable, str(CHILD), str(folder), *arguments], stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def complete(folder: Path) -> dict[str, str]:
    """Run it to its end; the digests that it has announced, by incarnation and version."""
    with trainer(folder) as process:
        assert process.wait(DEADLINE_S) == 0, (folder / "said").read_text()
    return {str(place): digest for place, digest in json.loads((folder / "hub.json").read_text())}


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, (path.parent / "said").read_text()
        assert time.monotonic() < end_s
        time.sleep(0.02)  # polling with a deadline: the other side is another process


def saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "trainer" / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: TempPaths) -> dict[str, str]:
    return complete(tmp_path_factory.mktemp("whole") / "run")


def test_killed_during_a_save_the_run_goes_on_bit_for_bit(tmp_path: Path, whole: dict[str, str]) -> None:
    folder = tmp_path / "run"
    with trainer(folder, str(HALFWAY)) as process:
        wait_for(folder / "saving", process)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert {"1.0", f".saving-{HALFWAY}.0"} <= saved(folder), "what is half-written is not in place"
    assert f"{HALFWAY}.0" not in saved(folder)
    assert complete(folder) == whole
    assert not [name for name in saved(folder) if name.startswith(".")], "and is swept away"


def test_told_to_stop_during_a_save_it_completes_it_first(tmp_path: Path, whole: dict[str, str]) -> None:
    folder = tmp_path / "run"
    with trainer(folder, str(HALFWAY)) as process:
        wait_for(folder / "saving", process)
        process.send_signal(signal.SIGTERM)
        (folder / "go").touch()
        assert process.wait(DEADLINE_S) == 0, (folder / "said").read_text()
    assert f"{HALFWAY}.0" in saved(folder)
    assert not [name for name in saved(folder) if name.startswith(".")]
    assert complete(folder) == whole
