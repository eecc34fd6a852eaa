"""What tests share, by topic; `tests` is on the path of every test (its conftest), so it is imported as `kit.hub`.

hub, machine, state, storage, asgi            a hub in this process, its services without HTTP, rows made by hand
roles, folder, run, fork, cli                 roles as threads, run folders, real processes of `shoal …`, made-up views
crash, smalldisk, postgres, s3, sandbox       processes that die, small disks, real servers, a sandbox
deploy, nginx                                 the files under deploy/, as their programs read them; a web server
tables                                        tables of cases in tests/data
attack, trial, served_hub, hostile, forged    for the adversary suite
cast, data, engines, evaluation, evidence,    for the tests of one package; stubs: in place of a client
reward, sft

Here: short names for the types of pytest's own fixtures, waiting for what another thread or process does, and calls at
the same moment.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
Request = pytest.FixtureRequest
TempPaths = pytest.TempPathFactory


def eventually(
    condition: Callable[[], object], within_s: float = 60.0, otherwise: object = "it did not come about in time"
) -> None:
    """Poll until it holds; fail with `otherwise`, or with what that says when it is called, if it does not in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.01)  # polling with a deadline


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that start together, each in a thread."""
    barrier = threading.Barrier(len(calls))
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: (barrier.wait(10), call())[1], calls, timeout=30))
