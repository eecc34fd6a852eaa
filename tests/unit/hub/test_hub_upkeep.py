"""Workers that are gone: their leases end soon, nobody else's do, and coming back costs nothing but the work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hubkit import Bench, code_of, fresh_request, ok

SECONDS = 30


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "hub", settings={"lease_s": 600})
    ok(bench.announce(0))
    yield bench
    bench.close()


def pass_time(bench: Bench, seconds: int = SECONDS, heard: bool = False) -> None:
    """Seconds go by with a tick in each, in which alice is or is not heard of."""
    for _ in range(seconds):
        bench.clock.advance(1)
        if heard:
            ok(bench.alice.call("POST", "/heartbeat", {}))
        bench.app.state.hub.upkeep.tick()


def test_the_leases_of_a_worker_that_is_gone_end_long_before_their_deadline(bench: Bench) -> None:
    (lease,) = bench.alice.lease(fresh_request())
    pass_time(bench, 19)
    assert bench.status().units["leased"] == 1
    pass_time(bench, 3)
    (again,) = bench.bob.lease(fresh_request())
    assert again.unit == lease.unit


def test_a_worker_that_is_heard_of_keeps_its_leases(bench: Bench) -> None:
    bench.alice.lease(fresh_request())
    pass_time(bench, heard=True)
    assert bench.status().units["leased"] == 1


def test_who_comes_back_hands_in_what_is_still_free_and_is_told_what_is_not(bench: Bench) -> None:
    first, second = bench.alice.lease(fresh_request(), 2)
    pass_time(bench)
    (taken,) = bench.bob.lease(fresh_request())
    assert taken.unit == first.unit
    late = bench.alice.submit(first)
    assert code_of(late) == (410, "lease.late")
    assert late.json()["message"] == f"lease {first.lease} ran out and unit {first.unit} is leased meanwhile"
    assert bench.alice.submit(second).status_code == 201
    (alice,) = [node for node in bench.status().nodes if node.name == "alice"]
    assert (alice.state, alice.rejected, alice.strikes) == ("active", 0, 0)


def test_after_a_pause_of_its_own_the_hub_gives_everybody_time_to_be_heard(bench: Bench) -> None:
    bench.alice.lease(fresh_request())
    bench.clock.advance(100)
    pass_time(bench, 15)
    assert bench.status().units["leased"] == 1
    pass_time(bench, 10)
    assert bench.status().units["open"] == 1


def test_so_does_a_hub_that_was_just_started(bench: Bench) -> None:
    bench.alice.lease(fresh_request())
    bench.clock.advance(100)
    again = bench.restarted()
    pass_time(again, 15)
    assert again.status().units["leased"] == 1
    again.close()
