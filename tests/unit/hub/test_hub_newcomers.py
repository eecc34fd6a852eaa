"""Newcomers' share through the services: who is here, who asks, what goes back to whom, whose audits come first."""

from pathlib import Path

import pytest

from kit.hub import fresh_request
from kit.machine import Play
from shoal.hub.service.turns import Place
from shoal.hub.state.rows import NodeRow
from shoal.protocol import Heartbeat, Lease, LeaseRequest, Outcome, PolicyRef

PROVEN = 8


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """8 units may be alive, 2 of them in newcomers' hands. Alice is established, bob and carol are new."""
    play = Play(tmp_path, {"groups_per_step": 8}, {"leases_per_node": 16})
    play.join(streak=PROVEN)
    play.join()
    play.join()
    play.announce(0)
    return play


def units(play: Play, who: int, count: int) -> list[int]:
    return [lease.unit for lease in play.lease(play.workers[who], count)]


def waiting(play: Play, who: int) -> str:
    return play.hub.work.lease(play.workers[who], LeaseRequest(request="request-waiting")).waiting


def submit(play: Play, *numbers: int) -> None:
    for lease in play.leases:
        if lease.unit in numbers:
            play.submit(lease)


def test_a_unit_that_was_tried_goes_to_the_established_node_while_it_asks_and_delivers(play: Play) -> None:
    units(play, 0, 1)
    submit(play, 0)
    assert (units(play, 0, 1), units(play, 1, 1)) == ([1], [2])
    play.release(play.leases[-1])
    assert units(play, 2, 1) == [3], "not the one that bob had"
    assert units(play, 0, 1) == [2]


def test_an_established_node_at_its_limit_is_not_asking(play: Play) -> None:
    small = Play(play.config.folder / "small", {"groups_per_step": 8}, {"leases_per_node": 1})
    small.join(streak=PROVEN)
    small.join()
    small.announce(0)
    assert (units(small, 0, 1), units(small, 1, 1)) == ([0], [1])
    small.release(small.leases[-1])
    small.restart()  # forgets that alice asked
    assert units(small, 0, 1) == []
    assert units(small, 1, 1) == [1], "alice holds all that she may, so somebody else must have it"


def test_a_key_that_asks_with_an_unknown_policy_keeps_no_newcomer_waiting(tmp_path: Path) -> None:
    """32 units are free. An honest newcomer loses its first lease in a restart and works well from then on."""
    play = Play(tmp_path, {"groups_per_step": 16, "max_staleness": 1, "steps": 50}, {"lease_s": 10})
    honest, second, idle = (play.join(passed=0) for _ in range(3))
    play.announce(0)
    unknown = PolicyRef(incarnation=0, version=0, digest="f" * 64)

    def asks(worker: NodeRow, network: str, policy: PolicyRef | None = None) -> int:
        request = LeaseRequest(request=fresh_request(), held=(), policy=policy)
        return len(play.hub.work.lease(worker, request, network).leases)

    assert asks(honest, "203.0.113.0/24") == 1
    for _ in range(10):
        play.clock.advance(2)
        assert asks(idle, "198.51.100.0/24", unknown) == 0
    place = Place("203.0.113.0/24", "", honest.node)
    assert play.hub.context.turns.ahead(place, play.hub.context.clock.now_ms(), 10_000) == (0, 0)
    assert asks(honest, "203.0.113.0/24") == 1
    assert asks(idle, "198.51.100.0/24", unknown) == 0
    assert asks(second, "203.0.113.0/24") == 1, "another machine behind the same router"


def test_what_comes_free_in_a_flooded_network_goes_to_the_address_that_had_none_and_stays_with_who_delivers(tmp_path):
    """16 units may be alive, 4 of them with newcomers, 2 with the new keys of a network: two sitters have these."""
    play = Play(tmp_path, {"groups_per_step": 16, "steps": 50}, {"lease_s": 60})
    play.join(streak=PROVEN)
    sitters, honest = [play.join(passed=0) for _ in range(3)], play.join(passed=0)
    play.announce(0)
    units(play, 0, 1)

    def asks(worker: NodeRow, address: str) -> list[Lease]:
        play.hub.membership.heartbeat(play.workers[0], Heartbeat())
        request = LeaseRequest(request=fresh_request())
        reply = play.hub.work.lease(worker, request, "203.0.113.0/24", address)
        return [Lease.model_validate(signed.document) for signed in reply.leases]

    (long,), (brief,) = asks(sitters[0], "203.0.113.1"), asks(sitters[1], "203.0.113.3")
    assert (long.hard_deadline_ms - brief.hard_deadline_ms) == 180_000
    assert asks(honest, "203.0.113.2") == []
    for _ in range(12):
        play.clock.advance(5)
        assert asks(sitters[2], "203.0.113.1") == []
        got = asks(honest, "203.0.113.2")
    assert len(got) == 1, "the brief lease is over"
    play.submit(got[0])
    (audit,) = play.claim()
    play.judge(audit, Outcome.ACCEPTED, (0.0, 1.0))
    assert asks(sitters[2], "203.0.113.1") == [], "its place is kept for it"
    assert len(asks(honest, "203.0.113.2")) == 1
