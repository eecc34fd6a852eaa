"""Calls at the same moment, over real storage: the constraints and the write lock let only one of them win."""

import threading
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import OperationalError

from kit import at_once
from kit.hub import Bench, code_of, fresh_request, submission_body
from shoal.errors import ResourceError
from shoal.hub.http.app import HEADER_REQUEST

pytestmark = pytest.mark.hub(run={"groups_per_step": 12})


def test_no_unit_goes_to_two_nodes(bench: Bench) -> None:
    calls = [lambda who=who: who.lease(2) for who in (bench.alice, bench.bob) for _ in range(4)]
    granted = [lease.unit for leases in at_once(*calls) for lease in leases]
    assert sorted(granted) == list(range(12)), "every unit once, and no more than the cap"


def test_one_request_sent_twice_at_once_gets_one_set_of_leases(bench: Bench) -> None:
    request = fresh_request()
    first, second = at_once(*[lambda: bench.alice.lease(3, request=request)] * 2)
    assert [lease.lease for lease in first] == [lease.lease for lease in second] == ["u0a0", "u1a0", "u2a0"]


def test_two_bodies_for_one_lease(bench: Bench) -> None:
    (lease,) = bench.alice.lease()
    bodies = [submission_body(lease, engine=name) for name in ("a", "b", "a")]
    answers = at_once(*[lambda body=body: bench.alice.submit(lease, body) for body in bodies])
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(201) == 1
    winner = bodies[statuses.index(201)]
    for body, status in zip(bodies, statuses, strict=True):
        assert status in ((201, 200) if body == winner else (409,))


class TestFailures:
    """The hub's own troubles reach the caller as a `Problem`, and promise nothing."""

    def test_a_full_disk(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        (lease,) = bench.alice.lease()

        full = ResourceError("cannot write blobs/x: the disk is full: free some space")
        monkeypatch.setattr(bench.hub.context.blobs, "put", Mock(side_effect=full))
        answer = bench.alice.submit(lease)
        assert code_of(answer) == (503, "hub.resource")
        assert bench.hub.context.failure is None, "a bucket may be there again"
        assert "blobs/x" not in answer.text, "where things are on the hub's machine is nothing for strangers"
        number = answer.headers[HEADER_REQUEST]
        assert answer.json()["message"].endswith(f"its log says more about request {number}")
        [logged] = [line for line in caplog.messages if "disk is full" in line]
        assert number in logged
        monkeypatch.undo()
        assert bench.alice.submit(lease).status_code == 201, "nothing was promised or taken before"

    def test_a_database_that_fails(self, bench: Bench) -> None:
        storage = bench.hub.context.storage

        with pytest.raises(ResourceError, match=r"hub\.db: disk I/O error; check the disk"), storage.write():
            raise OperationalError("COMMIT", {}, Exception("disk I/O error"))
        assert bench.status().units["open"] == 0, "the lock was given back"

    def test_upkeep_goes_on_after_a_failure(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first tick after the patch fails, a later one still runs."""
        upkeep, calls, went_on = bench.hub.upkeep, [], threading.Event()

        def tick() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("once")
            went_on.set()

        monkeypatch.setattr(upkeep, "tick", tick)
        assert went_on.wait(10)
