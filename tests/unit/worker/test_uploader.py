"""The uploader on a disk that is full or fails: the worker hears of it, and the finished group stays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import DiskError, HubRefused, ResourceError
from shoal.protocol import SUBMISSION_FORMAT, Rollout, Submission
from shoal.runtime.files import resource_error
from shoal.worker import Outbox
from shoal.worker.uploader import Uploader

RUN = "run-1"
GROUP = Submission(
    format=SUBMISSION_FORMAT, run=RUN, node="n" * 32, lease="lease-0", unit=0, incarnation=0, version=0,
    policy_digest="a" * 64, prompt=b"\1\0\0\0", rollouts=[Rollout(b"\2\0\0\0", b"\0\0\0\0", "eos")],
)  # fmt: skip


class LateHub:
    """Refuses everything as too late."""

    def run_info(self) -> Any:
        return SimpleNamespace(run=RUN, uploads="hub")

    def submit(self, _lease: str, _body: bytes) -> Any:
        raise HubRefused(410, "lease.late", "lease lease-0 ran out and unit 0 is accepted meanwhile")


def failure_of(outbox: Outbox) -> object:
    uploader = Uploader(LateHub(), outbox, lambda _parcel, _taken: None)  # type: ignore[arg-type]
    with uploader:
        assert not uploader.flush(20, lambda: False)
    return uploader.failure


def test_a_refusal_that_cannot_be_written_down_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox(tmp_path, refused_kept=3)
    outbox.put(GROUP)

    def full(*_arguments: object) -> None:
        raise resource_error("write", tmp_path / "refused", OSError(28, "No space left on device"))

    monkeypatch.setattr(outbox, "refuse", full)
    assert isinstance(failure_of(outbox), DiskError)
    assert [parcel.unit for parcel in Outbox(tmp_path, refused_kept=3).waiting(RUN)] == [0]


def test_a_group_that_cannot_be_read_back_ends_it_too(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, refused_kept=3)
    parcel = outbox.put(GROUP)
    parcel.path.unlink()
    parcel.path.mkdir()
    failure = failure_of(outbox)
    assert isinstance(failure, ResourceError)
    assert str(failure) == f"cannot send {parcel.path}: Is a directory"
