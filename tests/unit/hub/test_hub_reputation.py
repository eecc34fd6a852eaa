"""Audits by reputation over a real database: depth, pulls, pending credit; over restarts and dead validators too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.hub import Actor, Bench, code_of, fresh_request, make_config, ok, policy, worker_key
from shoal import ledger
from shoal.hub.state import draws
from shoal.hub.state.commands import SaveNode
from shoal.hub.state.credits import due_until_ms
from shoal.hub.state.machines import SubmissionState
from shoal.hub.state.rows import Moment, NodeRow, Progress, SubmissionRow
from shoal.protocol import Audit, AuditReply, Lease, LedgerEntry, NodeState, Outcome, Severity, Sums, Tally

SETTINGS = {"audit": "reputation", "credit_window_s": 100, "audit_s": 30}
CAUGHT = {"outcome": Outcome.REJECTED, "reason": "sampling.seed"}

ABOVE = {"outside": Sums(seen=2.0, expected=1.0)}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Alice is long proven, bob is new; every draw says light for alice."""
    monkeypatch.setattr(draws, "audit_fraction", lambda *_: 0.99)
    bench = Bench(tmp_path / "hub", {"groups_per_step": 8, "max_staleness": 1}, SETTINGS)
    ok(bench.announce(0))
    prove(bench, bench.alice)
    yield bench
    bench.close()


def prove(bench: Bench, actor: Actor, streak: int = 200) -> None:
    with bench.app.state.hub.context.storage.write() as transaction:
        row = transaction.node(actor.key.node)
        transaction.apply([SaveNode(replace(row, streak=streak, passed=streak, accepted=streak), row.state)])


def node_of(bench: Bench, actor: Actor) -> NodeRow:
    with bench.app.state.hub.context.storage.read() as reader:
        row: NodeRow = reader.node(actor.key.node)
    return row


def row_of(bench: Bench, audit: Audit) -> SubmissionRow:
    with bench.app.state.hub.context.storage.read() as reader:
        row: SubmissionRow = reader.submission(audit.submission)
    return row


def entries_of(bench: Bench) -> list[LedgerEntry]:
    bench.app.state.hub.posting.post()
    with bench.app.state.hub.context.storage.read() as reader:
        entries: list[LedgerEntry] = reader.ledger_after(-1, 10_000)
    return entries


def hand_in(bench: Bench, actor: Actor, count: int = 1) -> list[Lease]:
    leases = actor.lease(fresh_request(), count)
    for lease in leases:
        ok(actor.submit(lease))
    return leases


def accept(bench: Bench, audits: tuple[Audit, ...], **changes: Any) -> None:
    for audit in audits:
        assert bench.judge(audit, depth=audit.depth, **changes).status_code == 200


class TestDepth:
    def test_newcomers_are_audited_fully_and_proven_nodes_by_draw(self, bench: Bench) -> None:
        hand_in(bench, bench.alice)
        hand_in(bench, bench.bob)
        assert [audit.depth for audit in bench.audits()] == ["light", "full"]

    def test_it_is_drawn_once(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        (lease,) = hand_in(bench, bench.alice)
        monkeypatch.setattr(draws, "audit_fraction", lambda *_: 0.0)
        assert bench.alice.submit(lease).status_code == 200
        again = bench.restarted()
        assert [audit.depth for audit in again.audits()] == ["light"]
        again.close()

    def test_a_light_verdict_does_not_accept_what_is_to_be_audited_fully(self, bench: Bench) -> None:
        hand_in(bench, bench.bob)
        (audit,) = bench.audits()
        assert code_of(bench.judge(audit, depth="light")) == (422, "verdict.depth")
        ok(bench.judge(audit, depth="light", **CAUGHT))
        assert node_of(bench, bench.bob).rejected == 1, "a failed check is a failed check"

    def test_a_full_verdict_on_a_light_one_counts_as_full(self, bench: Bench) -> None:
        hand_in(bench, bench.alice, 2)
        first, second = bench.audits()
        ok(bench.judge(first, depth="full", tally=Tally(tokens=4, channels=ABOVE)))
        ok(bench.judge(second, depth="light", tally=Tally(tokens=4)))
        row = node_of(bench, bench.alice)
        assert (row.streak, row.record) == (201, Tally(tokens=4, channels=ABOVE))
        assert (row_of(bench, first).depth, row_of(bench, second).depth) == ("full", "light")

    def test_the_record_goes_to_the_validator(self, bench: Bench) -> None:
        hand_in(bench, bench.bob)
        accept(bench, bench.audits(), tally=Tally(tokens=6, channels=ABOVE))
        hand_in(bench, bench.bob)
        (audit,) = bench.audits()
        assert audit.record == Tally(tokens=6, channels=ABOVE)
        ok(bench.judge(audit, tally=Tally(tokens=6), **CAUGHT))
        assert node_of(bench, bench.bob).record == audit.record, "a rejection adds nothing"

    def test_what_was_unsure_is_remembered_so_that_accidents_are_not_for_the_asking(self, bench: Bench) -> None:
        hand_in(bench, bench.bob)
        (audit,) = bench.audits()
        seen = {
            "outcome": Outcome.UNSURE,
            "reason": "sampling.accident",
            "tally": Tally(tokens=6, proofs=3, accidents=1),
        }
        ok(bench.judge(audit, (), **seen))
        node = node_of(bench, bench.bob)
        assert (node.record, node.strikes, node.unsure) == (Tally(tokens=6, proofs=3, accidents=1), 0, 1)

    @pytest.mark.parametrize("tally", [Tally(tokens=2 * 16 + 1), Tally(tokens=30, proofs=2, accidents=3)])
    def test_an_impossible_tally_is_refused(self, bench: Bench, tally: Tally) -> None:
        hand_in(bench, bench.bob)
        (audit,) = bench.audits()
        assert code_of(bench.judge(audit, tally=tally)) == (422, "verdict.tally")
        unsure = bench.judge(audit, (), outcome=Outcome.UNSURE, tally=tally)
        assert code_of(unsure) == (422, "verdict.tally"), "it would join the record all the same"


class TestPulls:
    def fail(self, bench: Bench, severity: Severity | None) -> list[Audit]:
        """Alice: two groups accepted lightly, one fully, one waiting, one being audited; then one is caught."""
        hand_in(bench, bench.alice, 3)
        first, second, third = bench.audits(3)
        accept(bench, (first, second))
        ok(bench.judge(third, depth="full"))
        hand_in(bench, bench.alice, 3)
        caught, under_way = bench.audits(2)
        ok(bench.judge(caught, depth="light", severity=severity, **CAUGHT))
        return [first, second, third, caught, under_way]

    def states(self, bench: Bench) -> dict[str, int]:
        counts = bench.status().submissions
        return {state: count for state, count in counts.items() if count}

    def test_what_was_audited_lightly_is_pulled_and_generated_again(self, bench: Bench) -> None:
        audits = self.fail(bench, Severity.STATISTICAL)
        assert self.states(bench) == {"pulled": 2, "accepted": 1, "rejected": 1, "received": 2}
        pulled = row_of(bench, audits[0])
        assert (pulled.state, pulled.reason) == (SubmissionState.PULLED, "node.failed")
        assert "failed the audit of unit 3 (sampling.seed)" in pulled.message
        units = bench.status().units
        assert (units["open"], units["accepted"], units["submitted"]) == (3, 1, 2)
        (record,) = [entry for entry in entries_of(bench) if entry.kind == "pulled"]
        assert record.body["units"] == [0, 1]
        before = Lease.model_validate(audits[0].lease.document)
        assert bench.alice.lease(fresh_request()) == [], "suspended"
        again = bench.bob.lease(fresh_request())[0]
        assert (again.unit, again.task, again.seeds) == (before.unit, before.task, before.seeds)

    def test_what_waits_for_a_light_audit_waits_for_a_full_one(self, bench: Bench) -> None:
        *_, under_way = self.fail(bench, Severity.STATISTICAL)
        assert code_of(bench.judge(under_way, depth="light")) == (422, "verdict.depth")
        assert [audit.depth for audit in bench.audits()] == ["full", "full"]

    def test_a_ban_pulls_what_was_audited_fully_too(self, bench: Bench) -> None:
        self.fail(bench, Severity.CERTAIN)
        assert self.states(bench) == {"pulled": 3, "rejected": 1, "received": 2}
        assert node_of(bench, bench.alice).state == NodeState.BANNED
        kinds = [entry.kind for entry in entries_of(bench)][-6:]
        assert kinds == ["rejected", "void", "void", "void", "sanction", "pulled"]

    def test_a_soft_rejection_costs_nothing_else(self, bench: Bench) -> None:
        self.fail(bench, None)
        assert self.states(bench) == {"accepted": 3, "rejected": 1, "received": 1, "auditing": 1}
        assert node_of(bench, bench.alice).streak > 0
        assert not [entry for entry in entries_of(bench) if entry.kind in ("void", "pulled", "sanction")]

    def test_one_strike_does_not(self, bench: Bench) -> None:
        self.fail(bench, Severity.STATISTICAL)
        assert self.states(bench)["pulled"] == 2
        assert node_of(bench, bench.alice).on_probation

    def test_what_was_leased_before_a_strike_does_not_join_the_record_after_it(self, bench: Bench) -> None:
        self.fail(bench, Severity.STATISTICAL)
        high = Tally(tokens=9, channels={"exponents": Sums(seen=9, expected=1)})
        for audit in bench.audits():
            ok(bench.judge(audit, tally=high))
        assert node_of(bench, bench.alice).record == Tally()

    def test_what_is_in_a_batch_stays(self, bench: Bench) -> None:
        hand_in(bench, bench.alice, 8)
        accept(bench, bench.audits(8))
        batch = bench.batch(0)
        assert batch is not None
        hand_in(bench, bench.alice)
        (caught,) = bench.audits()
        ok(bench.judge(caught, severity=Severity.CERTAIN, **CAUGHT))
        assert bench.status().submissions["pulled"] == 0
        assert bench.batch(0) == batch

    def test_a_group_whose_credit_is_final_stays_so_that_no_unit_is_paid_twice(self, bench: Bench) -> None:
        hand_in(bench, bench.alice, 2)
        accept(bench, bench.audits(2))
        bench.clock.advance(101)
        bench.app.state.hub.upkeep.tick()
        ok(bench.alice.call("POST", "/heartbeat", {}))
        hand_in(bench, bench.alice)
        (caught,) = bench.audits()
        ok(bench.judge(caught, severity=Severity.CERTAIN, **CAUGHT))
        assert self.states(bench) == {"accepted": 2, "rejected": 1}

    def test_the_same_verdict_again_on_what_was_pulled_is_harmless(self, bench: Bench) -> None:
        first, *_ = self.fail(bench, Severity.STATISTICAL)
        assert bench.judge(first, depth="light").status_code == 200
        assert code_of(bench.judge(first, **CAUGHT)) == (409, "verdict.decided")

    def test_where_everything_is_audited_nothing_is_pulled(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path / "all", {"groups_per_step": 8})
        ok(bench.announce(0))
        bench.accept_groups(2)
        hand_in(bench, bench.alice)
        (caught,) = bench.audits()
        ok(bench.judge(caught, severity=Severity.CERTAIN, **CAUGHT))
        assert self.states(bench) == {"accepted": 2, "rejected": 1}
        bench.close()


class TestPendingCredit:
    def view(self, bench: Bench, actor: Actor) -> tuple[int, int]:
        view = next(view for view in bench.status().nodes if view.node == actor.key.node)
        account = ledger.fold(entries_of(bench)).by_node[actor.key.node]
        assert (account.credit, account.pending) == (view.credit, view.pending)
        return view.credit, view.pending

    def pass_time(self, bench: Bench, seconds: float) -> None:
        bench.clock.advance(seconds)
        bench.app.state.hub.upkeep.tick()

    def test_it_matures_once_also_over_restarts_and_after_the_end(self, bench: Bench) -> None:
        hand_in(bench, bench.bob)
        accept(bench, bench.audits())
        assert self.view(bench, bench.bob) == (0, 6)
        self.pass_time(bench, 99)
        assert self.view(bench, bench.bob) == (0, 6)
        again = bench.restarted()
        self.pass_time(again, 2)
        assert self.view(again, again.bob) == (6, 0)
        last = again.restarted()
        self.pass_time(last, 1000)
        assert self.view(last, last.bob) == (6, 0)
        last.close()

    def test_at_the_end_of_the_run_it_matures_at_once(self, tmp_path: Path) -> None:
        """Nothing is left to judge, so no failed audit can take it any more."""
        bench = Bench(tmp_path / "short", {"steps": 1, "groups_per_step": 2}, SETTINGS)
        ok(bench.announce(0))
        hand_in(bench, bench.bob, 2)
        accept(bench, bench.audits())
        assert bench.batch(0) is not None
        self.pass_time(bench, 1)
        assert self.view(bench, bench.bob) == (0, 12), "not before the last version is out"
        ok(bench.announce(1))
        self.pass_time(bench, 1)
        assert self.view(bench, bench.bob) == (12, 0)
        bench.close()

    def test_but_not_while_a_submission_waits_for_its_verdict(self) -> None:
        over = Progress(policy=policy(3), next_step=3)
        rules = make_config(Path()).rules
        assert due_until_ms(Moment(rules, over, 5), is_all_judged=False) == 5
        assert due_until_ms(Moment(rules, over, 5), is_all_judged=True) > 10**15
        going_on = Progress(policy=policy(2), next_step=3)
        assert due_until_ms(Moment(rules, going_on, 5), is_all_judged=True) == 5

    def test_a_failed_audit_voids_what_is_pending_of_that_node_only(self, bench: Bench) -> None:
        hand_in(bench, bench.alice)
        accept(bench, bench.audits())
        self.pass_time(bench, 101)
        ok(bench.alice.call("POST", "/heartbeat", {}))
        hand_in(bench, bench.alice)
        hand_in(bench, bench.bob)
        accept(bench, bench.audits())
        hand_in(bench, bench.alice)
        (caught,) = bench.audits()
        ok(bench.judge(caught, depth="light", severity=Severity.STATISTICAL, **CAUGHT))
        assert self.view(bench, bench.alice) == (6, 0), "what has matured is not taken away"
        assert self.view(bench, bench.bob) == (0, 6)
        self.pass_time(bench, 101)
        assert self.view(bench, bench.alice) == (6, 0)
        accounts = ledger.fold(entries_of(bench))
        assert (accounts.total_credit, accounts.total_earned) == (12, 18)

    def test_after_a_ban_nobody_trains_on_a_group_whose_credit_is_final(self, bench: Bench) -> None:
        hand_in(bench, bench.alice)
        accept(bench, bench.audits())
        self.pass_time(bench, 101)
        ok(bench.alice.call("POST", "/heartbeat", {}))
        hand_in(bench, bench.alice)
        (caught,) = bench.audits()
        assert bench.status().units["accepted"] == 1
        ok(bench.judge(caught, severity=Severity.CERTAIN, **CAUGHT))
        units = bench.status().units
        assert (units["accepted"], units["void"]) == (0, 1), "paid for, so it is not given out again"
        assert self.view(bench, bench.alice) == (6, 0)


class TestDeadValidators:
    def test_a_validator_that_dies_in_the_middle_loses_nothing(self, bench: Bench) -> None:
        """Claimed, hub and validator gone, another validator: the same depths; verdicts, pulls and credit once."""
        hand_in(bench, bench.alice, 2)
        hand_in(bench, bench.bob)
        claimed = bench.audits()
        accept(bench, claimed[:1])
        again = bench.restarted()
        other = again.actor(worker_key(50))
        ok(other.register("validator"))

        def audits() -> tuple[Audit, ...]:
            response = ok(other.call("POST", "/audits", {"max_audits": 8}))
            return AuditReply.model_validate_json(response.content).audits

        assert audits() == (), "still claimed"
        again.clock.advance(31)
        found = audits()
        assert [(audit.submission, audit.depth) for audit in found] == [
            (audit.submission, audit.depth) for audit in claimed[1:]
        ]
        accept(again, claimed)  # the first validator was only slow
        accounts = ledger.fold(entries_of(again))
        assert accounts.total_earned == 18
        again.close()
