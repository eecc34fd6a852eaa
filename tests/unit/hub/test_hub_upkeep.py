"""Workers that are gone: their leases end soon, nobody else's do, and coming back costs nothing but the work."""

from unittest.mock import Mock

import pytest

from kit.hub import Bench, code_of
from shoal.errors import ResourceError

SECONDS = 30
LEASE_S = 600

pytestmark = pytest.mark.hub(settings={"lease_s": LEASE_S, "requests_per_key_s": 0})


def pass_time(bench: Bench, seconds: int = SECONDS, heard: bool = False) -> None:
    """Seconds go by with a tick in each, in which alice is or is not heard of."""
    for _ in range(seconds):
        bench.clock.advance(1)
        if heard:
            bench.alice.beat()
        bench.hub.upkeep.tick()


def test_the_leases_of_a_worker_that_is_gone_end_long_before_their_deadline(bench: Bench) -> None:
    (lease,) = bench.alice.lease()
    pass_time(bench, 19)
    assert bench.status().units["leased"] == 1
    pass_time(bench, 3)
    (again,) = bench.bob.lease()
    assert again.unit == lease.unit


def test_who_comes_back_hands_in_what_is_still_free_and_is_told_what_is_not(bench: Bench) -> None:
    first, second = bench.alice.lease(2)
    pass_time(bench)
    (taken,) = bench.bob.lease()
    assert taken.unit == first.unit
    late = bench.alice.submit(first)
    assert code_of(late) == (410, "lease.late")
    assert late.json()["message"] == f"lease {first.lease} ran out and unit {first.unit} is leased meanwhile"
    assert bench.alice.submit(second).status_code == 201
    alice = bench.view(bench.alice)
    assert (alice.state, alice.rejected, alice.strikes) == ("active", 0, 0)


def test_after_a_pause_of_its_own_the_hub_gives_everybody_time_to_be_heard(bench: Bench) -> None:
    bench.alice.lease()
    bench.clock.advance(100)
    pass_time(bench, 15)
    assert bench.status().units["leased"] == 1
    pass_time(bench, 10)
    assert bench.status().units["open"] == 1


@pytest.mark.parametrize("how", ["suspended", "restarted"])
def test_what_runs_out_while_the_hub_is_away_has_a_little_longer_and_costs_nobody_anything(bench, how):
    first, second = bench.alice.lease(2)
    bench.clock.advance(LEASE_S + 100)
    if how == "restarted":
        bench.restart()
    pass_time(bench, 15, heard=True)
    assert bench.status().units["leased"] == 2
    assert not [lease for lease in bench.bob.lease() if lease.unit in (first.unit, second.unit)]
    assert bench.alice.submit(first).status_code == 201
    pass_time(bench, 10, heard=True)
    assert bench.status().units["open"] == 1, "for a little: then it is somebody else's turn"
    assert bench.row(bench.alice).lapsed == 0


def test_what_had_run_out_before_is_not_spared(bench: Bench) -> None:
    bench.alice.lease()
    pass_time(bench, LEASE_S - 10, heard=True)
    for _ in range(11):  # nobody ticks, but the hub hears: written down later than the deadline
        bench.clock.advance(1)
        bench.alice.beat()
    bench.restart()
    bench.hub.upkeep.tick()
    assert (bench.status().units["open"], bench.row(bench.alice).lapsed) == (1, 1)


def test_while_its_database_is_away_the_hub_is_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.alice.lease()
    pass_time(bench, 1, heard=True)

    with monkeypatch.context() as outage:
        outage.setattr(bench.hub.context.storage, "lead", Mock(side_effect=ResourceError("the database is away")))
        for _ in range(LEASE_S + 60):
            bench.clock.advance(1)
            with pytest.raises(ResourceError, match="is away"):
                bench.hub.upkeep.tick()
    pass_time(bench, 15)
    assert bench.status().units["leased"] == 1
    pass_time(bench, 10)
    assert (bench.status().units["open"], bench.row(bench.alice).lapsed) == (1, 0)


def test_one_part_that_fails_does_not_keep_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = bench.app.hub

    monkeypatch.setattr(hub.upkeep, "_end_overdue", Mock(side_effect=ResourceError("cannot end anything")))
    with pytest.raises(ResourceError, match="cannot end anything"):
        hub.upkeep.tick()
    with hub.context.storage.read() as reader:
        assert reader.outbox_length() == 0, "the ledger was posted all the same"


def test_nonces_are_kept_until_no_hub_would_take_the_request_again(bench: Bench) -> None:
    """Its own clock may be behind the leader's, by as much as a request's may."""
    bench.clock.advance(60)
    bench.alice.lease()
    bench.clock.advance(200)
    bench.hub.upkeep.tick()
    assert bench.stored.forget_nonces(10**15, 99) > 0
