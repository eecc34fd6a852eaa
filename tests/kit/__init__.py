"""What tests share, by topic; `tests` is on the path of every test (its conftest), so it is imported as `kit.hub`.

hub, machine, state, storage, asgi            a hub in this process, its services without HTTP, rows made by hand
folder, run, fork, cli, scene                 run folders, real processes of `shoal …`, made-up moments of a run
crash, smalldisk, postgres, s3, sandbox       processes that die, small disks, real servers, a sandbox
attack, door, hostile, liar, miner, trial     for the adversary suite
cast, data, evaluation, evidence, loss,       for the tests of one package
mathematics, reward, sft, worker

Here: short names for the types of pytest's own fixtures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
Request = pytest.FixtureRequest
TempPaths = pytest.TempPathFactory


def eventually(condition: Callable[[], bool], what: str = "the condition", within_s: float = 20.0) -> None:
    """Wait until it is so."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"never saw: {what}"
        time.sleep(0.005)
