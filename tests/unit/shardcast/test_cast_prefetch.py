"""Fetching ahead ends with a line when the machine says no, with a traceback only when it is a bug."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from shoal.errors import DiskError
from shoal.protocol import PolicyRef
from shoal.runtime.stop import StopToken
from shoal.shardcast import Downloader, Prefetch


class Failing:
    """A downloader, and its own follower, that knows of a newer version and cannot fetch it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def follower(self) -> Failing:
        return self

    def newer(self, _wait_s: float) -> PolicyRef:
        return PolicyRef(incarnation=0, version=1, digest="ab" * 32)

    def fetch(self, *_arguments: Any, **_options: Any) -> None:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("error", "traced"), [(DiskError("the disk is full"), False), (KeyError("oops"), True)])
def test_it_ends_and_says_why(error: Exception, traced: bool, caplog: pytest.LogCaptureFixture) -> None:
    prefetch = Prefetch(cast("Downloader", Failing(error)), StopToken())
    with caplog.at_level(logging.INFO, "shoal"):
        prefetch._run()  # in this thread: it ends by itself
    (record,) = caplog.records
    assert "fetching ahead has ended" in record.getMessage()
    assert bool(record.exc_info) is traced
    assert traced or "the disk is full" in record.getMessage()
