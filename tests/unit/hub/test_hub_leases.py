"""Leases through the whole hub: renewal by progress, hoarders, suspension and its end, a pardon."""

from __future__ import annotations

import pytest

from kit.hub import Actor, Bench, code_of, fresh_request, ok
from shoal.hub.state import nodes
from shoal.hub.state.rows import PROBATION_AUDITS
from shoal.protocol import HeartbeatReply, Lease, LeaseReply, NodeState, NodeView, Outcome, Severity

pytestmark = pytest.mark.hub(
    run={"groups_per_step": 16, "max_staleness": 1, "max_new_tokens": 8},
    settings={"lease_s": 10, "lease_hard_s": 25, "leases_per_node": 32, "newcomer_share": 0.25},
)


def establish(bench: Bench, who: Actor) -> None:
    bench.change(who, passed=PROBATION_AUDITS, accepted=PROBATION_AUDITS)


def pass_time(bench: Bench, seconds: int) -> None:
    """Seconds go by with a tick in each, so that the hub was there all the while."""
    for _ in range(seconds):
        bench.clock.advance(1)
        bench.hub.upkeep.tick()


def beat(bench: Bench, who: Actor, **progress: int) -> HeartbeatReply:
    bench.hub.upkeep.tick()
    reply = who.call("POST", "/heartbeat", {"progress": progress})
    return HeartbeatReply.model_validate_json(ok(reply).content)


def view(bench: Bench, who: Actor) -> NodeView:
    return next(node for node in bench.status().nodes if node.node == who.key.node)


def ask(who: Actor, max_units: int = 1) -> LeaseReply:
    body = {"request": fresh_request(), "max_units": max_units}
    return LeaseReply.model_validate_json(ok(who.call("POST", "/leases", body)).content)


class TestRenewal:
    def test_a_lease_lasts_while_its_worker_goes_on_and_not_beyond_the_hard_deadline(self, bench: Bench) -> None:
        establish(bench, bench.alice)
        (lease,) = bench.alice.lease(fresh_request())
        assert (lease.deadline_ms, lease.hard_deadline_ms) == (lease.issued_at_ms + 10_000, lease.issued_at_ms + 25_000)
        ends = []
        for tokens in (3, 6, 9):
            pass_time(bench, 8)
            ends.append(beat(bench, bench.alice, **{lease.lease: tokens}).deadlines[lease.lease])
        assert [end - lease.issued_at_ms for end in ends] == [18_000, 25_000, 25_000]
        pass_time(bench, 2)
        assert beat(bench, bench.alice, **{lease.lease: 12}).deadlines == {}, "it has run out"
        assert bench.bob.lease(fresh_request())[0].unit == lease.unit

    def test_one_cannot_renew_what_is_not_ones_own(self, bench: Bench) -> None:
        (lease,) = bench.alice.lease(fresh_request())
        bench.clock.advance(5)
        assert beat(bench, bench.bob, **{lease.lease: 3, "nonsense": 4}).deadlines == {}
        bench.clock.advance(6)
        assert bench.bob.lease(fresh_request())[0].unit == lease.unit

    def test_a_newcomer_that_only_says_so_gets_no_more_time_and_an_established_node_does(self, bench: Bench) -> None:
        (lease,) = bench.bob.lease(fresh_request())
        bench.clock.advance(5)
        assert beat(bench, bench.bob, **{lease.lease: 2}).deadlines == {lease.lease: lease.deadline_ms}
        establish(bench, bench.alice)
        beat(bench, bench.alice)
        assert beat(bench, bench.bob, **{lease.lease: 3}).deadlines == {lease.lease: lease.deadline_ms}
        (own,) = bench.alice.lease(fresh_request())
        bench.clock.advance(5)
        assert beat(bench, bench.alice, **{own.lease: 3}).deadlines[own.lease] == own.deadline_ms + 5_000


class TestHoarders:
    def test_who_takes_and_never_delivers_ends_with_one_lease_and_suspended(self, bench: Bench) -> None:
        taken = []
        for _ in range(3):
            taken.append(len(ask(bench.alice, 32).leases))
            pass_time(bench, 10)
            beat(bench, bench.alice)
        assert taken == [8, 4, 2]  # a window of one by now, and 14 in a row
        seen = view(bench, bench.alice)
        assert (seen.state, seen.window, seen.suspensions) == (NodeState.SUSPENDED, 1, 1)
        assert seen.until_ms == bench.hub.context.clock.now_ms() + 60_000
        assert len(ask(bench.bob, 32).leases) == 8, "others are served"


class TestSuspension:
    @pytest.fixture
    def suspended(self, bench: Bench) -> list[Lease]:
        """Alice's first group failed a statistical check; her second is judged later, two more she still holds."""
        leases = bench.alice.lease(fresh_request(), 4)
        for lease in leases[:2]:
            ok(bench.alice.submit(lease))
        caught, _ = bench.audits()
        failed = {"outcome": Outcome.REJECTED, "reason": "sampling.drift", "severity": Severity.STATISTICAL}
        ok(bench.judge(caught, (), **failed))
        return leases

    def test_it_is_told_how_long_and_why_and_is_not_refused(self, bench: Bench, suspended: list[Lease]) -> None:
        bench.clock.advance(17.5)
        reply = ask(bench.alice)
        assert (reply.leases, reply.waiting) == ((), "this node is suspended for 43 s more: sampling.drift")
        assert bench.bob.lease(fresh_request())

    def test_what_it_holds_it_may_hand_in(self, bench: Bench, suspended: list[Lease]) -> None:
        assert bench.alice.submit(suspended[2]).status_code == 201

    def test_it_ends_by_itself_and_leaves_the_node_on_probation(self, bench: Bench, suspended: list[Lease]) -> None:
        bench.clock.advance(60.5)
        ok(bench.alice.call("POST", "/heartbeat", {}))
        assert view(bench, bench.alice).state is NodeState.SUSPENDED, "nothing has asked yet"
        assert "until its first group is accepted" in ask(bench.alice).waiting, "the strike took what spoke for it"
        bench.prove(bench.alice)
        assert ask(bench.alice).leases
        seen = view(bench, bench.alice)
        assert (seen.state, seen.until_ms, seen.reason) == (NodeState.ACTIVE, None, "")
        assert (seen.on_probation, seen.strikes, seen.suspensions) == (True, 1, 1)
        with bench.hub.context.storage.read() as reader:
            rows = [entry for entry in reader.ledger_after(-1, 1000) if entry.body.get("node") == seen.node]
        assert rows == [], "nothing of it was ever accepted"

    def test_it_outlives_a_restart_of_the_hub(self, bench: Bench, suspended: list[Lease]) -> None:
        again = bench.restarted()
        assert "suspended" in ask(again.alice).waiting
        again.close()

    def test_a_ban_is_for_good_until_the_owner_pardons(self, bench: Bench, suspended: list[Lease]) -> None:
        (audit,) = bench.audits()
        ok(bench.judge(audit, (), outcome=Outcome.REJECTED, reason="sampling.seed", severity=Severity.CERTAIN))
        body = {"request": fresh_request()}
        assert code_of(bench.alice.call("POST", "/leases", body)) == (403, "node.banned")
        assert code_of(bench.alice.submit(suspended[2])) == (403, "node.banned")
        banned = bench.row(bench.alice)
        with bench.hub.context.decision() as (transaction, moment):
            transaction.apply(nodes.pardon(banned, "a mistake", moment.now_ms))
        assert ask(bench.alice).leases
        seen = view(bench, bench.alice)
        assert (seen.state, seen.strikes, seen.on_probation) == (NodeState.ACTIVE, 0, True)


def test_what_came_too_late_is_counted(bench: Bench) -> None:
    (lease,) = bench.alice.lease(fresh_request())
    bench.clock.advance(11)
    assert bench.bob.lease(fresh_request())[0].unit == lease.unit
    assert code_of(bench.alice.submit(lease)) == (410, "lease.late")
    assert bench.hub.work.late == 1
    assert bench.row(bench.alice).lapsed == 1
