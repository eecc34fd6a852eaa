"""The outbox: finished work survives any crash, and is never sent half."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ResourceError
from shoal.protocol import SUBMISSION_FORMAT, BodyLimits, Rollout, Submission, pack, unpack
from shoal.runtime.clock import ManualClock
from shoal.worker.outbox import Outbox, Uploader


def submission(unit: int = 0, run: str = "run-1") -> Submission:
    return Submission(
        format=SUBMISSION_FORMAT, run=run, node="n" * 32, lease=f"lease-{unit}", unit=unit, incarnation=0, version=0,
        policy_digest="a" * 64, prompt=b"\1\0\0\0", rollouts=[Rollout(b"\2\0\0\0", b"\0\0\0\0", "eos")],
    )  # fmt: skip


def units(outbox: Outbox, run: str = "run-1") -> list[int]:
    return [parcel.unit for parcel in outbox.waiting(run)]


def test_next_process_finds_the_same_bytes(tmp_path: Path) -> None:
    body = Outbox(tmp_path).put(submission(4)).path.read_bytes()
    [parcel] = Outbox(tmp_path).waiting("run-1")
    assert (parcel.unit, parcel.lease, parcel.path.read_bytes()) == (4, "lease-4", body)
    assert unpack(body, Submission, BodyLimits()) == submission(4)


def test_oldest_first_and_delivered_ones_are_gone(tmp_path: Path) -> None:
    clock = ManualClock()
    outbox = Outbox(tmp_path, clock)
    for unit in (9, 2, 5):
        outbox.put(submission(unit))
        clock.advance(1)
    assert units(outbox) == [9, 2, 5]
    outbox.remove(outbox.waiting("run-1")[0])
    assert units(outbox) == units(Outbox(tmp_path)) == [2, 5]


def test_parcels_of_another_run_wait_for_that_run(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(submission(1, run="run-2"))
    assert units(outbox) == []
    assert outbox.take("run-1", 0) is None
    assert units(Outbox(tmp_path), run="run-2") == [1]


def test_a_damaged_file_is_not_sent_and_blocks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = Outbox(tmp_path).put(submission(1))
    good.path.with_name("0-0-bad.submission").write_bytes(good.path.read_bytes()[:-3])
    assert units(Outbox(tmp_path)) == [1]
    assert "0-0-bad.submission is damaged and not sent" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [good.path.name]


def test_waiting_wakes_when_something_is_put_and_when_something_goes(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(outbox.take, "run-1", 20)
        parcel = outbox.put(submission(3))
        assert taken.result(20) == parcel
        assert not outbox.wait_until_below("run-1", 1, 0)
        below = threads.submit(outbox.wait_until_below, "run-1", 1, 20)
        outbox.remove(parcel)
        assert below.result(20) is True


class _Crash(BaseException):
    """The power goes out."""


@settings(max_examples=60, deadline=None)
@given(crash_at=st.integers(min_value=0, max_value=12), count=st.integers(min_value=1, max_value=3))
def test_a_crash_at_any_system_call_loses_nothing_that_was_put(tmp_path_factory, crash_at, count):
    """Whatever call the process dies in, every `put` that returned is found whole, and nothing half is."""
    folder = tmp_path_factory.mktemp("outbox")
    outbox = Outbox(folder)
    calls = 0
    promised: list[int] = []

    def dying(real):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls > crash_at:
                raise _Crash
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "replace"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            for unit in range(count):
                outbox.put(submission(unit))
                promised.append(unit)
        except _Crash:
            pass
    found = Outbox(folder)
    assert set(promised) <= set(units(found))
    assert set(units(found)) <= set(range(count))
    for parcel in found.waiting("run-1"):
        assert parcel.path.read_bytes() == pack(submission(parcel.unit))


def test_taken_parcel_is_given_to_one_sender(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    first, second = outbox.put(submission(1)), outbox.put(submission(2))
    assert (outbox.take("run-1", 0), outbox.take("run-1", 0)) == (first, second)
    assert outbox.take("run-1", 0) is None
    outbox.put_back(first)
    assert outbox.take("run-1", 0) == first
    outbox.remove(first)
    assert outbox.waiting("run-1") == [second], "taken, but not delivered: it still waits"
    assert Outbox(tmp_path).take("run-1", 0) == second, "a crash puts everything back"


def test_a_group_that_cannot_be_read_back_ends_the_worker(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    parcel = outbox.put(submission())
    parcel.path.unlink()
    parcel.path.mkdir()
    hub = Mock(run_info=lambda: Mock(run="run-1"))
    uploader = Uploader(hub, outbox, lambda _parcel, _taken: None)
    with uploader:
        assert not uploader.flush(20, lambda: False)
    assert isinstance(uploader.failure, ResourceError)
    assert str(uploader.failure) == f"cannot send {parcel.path}: Is a directory"
