"""Newcomers' share through the services: who is here, who asks, what goes back to whom, whose audits come first."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.hub import fresh_request
from kit.machine import Play
from shoal.hub.service.turns import Place
from shoal.hub.state.rows import NodeRow
from shoal.protocol import Heartbeat, Lease, LeaseReply, LeaseRequest, Outcome, PolicyRef, Severity

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


def test_at_the_start_newcomers_take_all(play: Play) -> None:
    assert units(play, 1, 4) == [0, 1, 2, 3]
    assert units(play, 2, 4) == [4, 5, 6, 7]


def test_with_an_established_node_here_they_share_a_quarter_leased_or_waiting_to_be_judged(play: Play) -> None:
    assert units(play, 0, 1) == [0]
    assert units(play, 1, 4) == [1, 2]
    assert units(play, 2, 4) == []
    submit(play, 1, 2)
    assert "nodes on probation have 2 units in hand" in waiting(play, 2)
    (audit, _) = play.claim()
    play.judge(audit, Outcome.ACCEPTED, (0.0, 1.0))
    assert units(play, 2, 4) == [3]


def test_when_the_established_node_is_gone_they_take_all_again(play: Play) -> None:
    assert units(play, 0, 1) == [0]
    assert units(play, 1, 4) == [1, 2]
    play.clock.advance(31)
    assert units(play, 2, 4) == [3, 4, 5, 6]


def test_a_banned_node_is_not_established(play: Play) -> None:
    units(play, 0, 1)
    submit(play, 0)
    (audit,) = play.claim()
    play.judge(audit, Outcome.REJECTED, (), Severity.CERTAIN)
    assert units(play, 1, 4) == [0, 1, 2, 3]


def test_a_unit_that_was_tried_goes_to_the_established_node_while_it_asks_and_delivers(play: Play) -> None:
    units(play, 0, 1)
    submit(play, 0)
    assert units(play, 0, 1) == [1]
    assert units(play, 1, 1) == [2]
    play.release(play.leases[-1])
    assert units(play, 2, 1) == [3], "not the one that bob had"
    assert units(play, 0, 1) == [2]


def test_an_established_node_that_only_asks_keeps_nothing_from_others(play: Play) -> None:
    units(play, 0, 1)
    assert units(play, 1, 1) == [1]
    play.release(play.leases[-1])
    assert units(play, 2, 1) == [1], "the first node has delivered nothing"


def test_an_established_node_at_its_limit_is_not_asking(play: Play) -> None:
    with_all = {"leases_per_node": 1}
    small = Play(play.config.folder / "small", {"groups_per_step": 8}, with_all)
    small.join(streak=PROVEN)
    small.join()
    small.announce(0)
    assert units(small, 0, 1) == [0]
    assert units(small, 1, 1) == [1]
    small.release(small.leases[-1])
    small.restart()  # forgets that alice asked
    assert units(small, 0, 1) == []
    assert units(small, 1, 1) == [1], "alice holds all that she may, so somebody else must have it"


def test_audits_are_shared_and_nothing_is_left_undone(play: Play) -> None:
    assert units(play, 1, 4) == [0, 1, 2, 3]
    assert units(play, 0, 4) == [4, 5, 6, 7]
    submit(play, *range(8))
    judged = []
    for _ in range(4):
        audits = play.claim(4)
        judged.append([audit.lease.document["unit"] for audit in audits])
        for audit in audits:
            play.judge(audit, Outcome.ACCEPTED, (0.0, 1.0))
    assert judged == [[0, 4, 5, 6], [1, 2, 3, 7], [], []]


def test_an_audit_says_whether_its_node_is_a_newcomer_and_the_hub_how_many_tokens_it_has(play: Play) -> None:
    units(play, 0, 1)
    units(play, 1, 1)
    submit(play, 0, 1)
    audits = play.claim()
    assert [audit.newcomer for audit in audits] == [False, True]
    lease = Lease.model_validate(audits[0].lease.document)
    with play.storage.read() as reader:
        row = reader.submission(audits[0].submission)
    assert row is not None
    assert row.tokens == len(lease.seeds) * (len(lease.prompt_ids) + 3)


def test_a_new_key_of_a_flooded_network_waits_and_one_of_another_network_is_served(play: Play) -> None:
    """8 units may be alive in this young run: 4 for the new keys of one network, 2 for those of one address."""

    def asks(network: str, address: str = "") -> LeaseReply:
        worker = play.join(passed=0)
        return play.hub.work.lease(worker, LeaseRequest(request=fresh_request(), max_units=8), network, address)

    for address in ("192.0.2.1", "192.0.2.2"):
        assert [len(asks("192.0.2.0/24", address).leases) for _ in range(3)] == [1, 1, 0]
    refused = asks("192.0.2.0/24", "192.0.2.3")
    assert (refused.leases, refused.held_back) == ((), True)
    assert len(asks("2001:db8:1::/48").leases) == 1


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


def test_in_a_flooded_network_what_comes_free_goes_to_the_address_that_had_nothing_and_stays_with_who_delivers(
    tmp_path: Path,
) -> None:
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
