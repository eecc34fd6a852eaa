"""Audits by reputation over a real database: depth, pulls, pending credit; over restarts and dead validators too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.hub import Actor, Bench, make_config, ok, policy
from kit.state import node, rules, submission, verdict
from shoal import ledger, protocol
from shoal.hub.state import Moment, NodeRow, RunProgress, SubmissionState, draws, reputation
from shoal.hub.state.credits import due_until_ms
from shoal.hub.state.draws import audit_fraction

SETTINGS, TIMES = {"audit": "reputation"}, {"credit_window_s": 100, "audit_s": 30}
CAUGHT = {"outcome": protocol.Outcome.REJECTED, "reason": "sampling.seed"}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Alice is long proven, bob is new; every draw says light for alice."""
    monkeypatch.setattr(draws, "audit_fraction", lambda *_: 0.99)
    bench = Bench(tmp_path / "hub", {"groups_per_step": 8, "max_staleness": 1}, SETTINGS, changes=TIMES)
    ok(bench.announce(0))
    bench.change(bench.alice, streak=200, passed=200, accepted=200)
    yield bench
    bench.close()


class TestDepth:
    def test_newcomers_are_audited_fully_and_proven_nodes_by_draw(self, bench: Bench) -> None:
        bench.alice.deliver()
        bench.bob.deliver()
        assert [audit.depth for audit in bench.audits()] == ["light", "full"]

    def test_it_is_drawn_once(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        (lease,) = bench.alice.deliver()
        monkeypatch.setattr(draws, "audit_fraction", lambda *_: 0.0)
        assert bench.alice.submit(lease).status_code == 200
        bench.restart()
        assert [audit.depth for audit in bench.audits()] == ["light"]


class TestPulls:
    def fail(self, bench: Bench, severity: protocol.Severity | None) -> list[protocol.Audit]:
        """Alice: two groups accepted lightly, one fully, one waiting, one being audited; then one is caught."""
        bench.alice.deliver(3)
        first, second, third = bench.audits(3)
        for audit in (first, second):
            ok(bench.judge(audit, depth="light"))
        ok(bench.judge(third, depth="full"))
        bench.alice.deliver(3)
        caught, under_way = bench.audits(2)
        ok(bench.judge(caught, depth="light", severity=severity, **CAUGHT))
        return [first, second, third, caught, under_way]

    def states(self, bench: Bench) -> dict[str, int]:
        counts = bench.status().submissions
        return {state: count for state, count in counts.items() if count}

    def test_what_was_audited_lightly_is_pulled_and_generated_again(self, bench: Bench) -> None:
        audits = self.fail(bench, protocol.Severity.STATISTICAL)
        assert self.states(bench) == {"pulled": 2, "accepted": 1, "rejected": 1, "received": 2}
        pulled = bench.stored.submission(audits[0].submission)
        assert (pulled.state, pulled.reason) == (SubmissionState.PULLED, "node.failed")
        assert "failed the audit of unit 3 (sampling.seed)" in pulled.message
        units = bench.status().units
        assert (units["open"], units["accepted"], units["submitted"]) == (3, 1, 2)
        (record,) = [entry for entry in bench.ledger().entries if entry.kind == "pulled"]
        assert record.body["units"] == [0, 1]
        before = protocol.Lease.model_validate(audits[0].lease.document)
        assert bench.alice.lease() == [], "suspended"
        again = bench.bob.lease()[0]
        assert (again.unit, again.task, again.seeds) == (before.unit, before.task, before.seeds)

    def test_a_ban_pulls_what_was_audited_fully_too(self, bench: Bench) -> None:
        self.fail(bench, protocol.Severity.CERTAIN)
        assert self.states(bench) == {"pulled": 3, "rejected": 1, "received": 2}
        assert bench.row(bench.alice).state == protocol.NodeState.BANNED
        kinds = [entry.kind for entry in bench.ledger().entries][-6:]
        assert kinds == ["rejected", "void", "void", "void", "sanction", "pulled"]

    def test_what_is_in_a_batch_stays(self, bench: Bench) -> None:
        bench.alice.deliver(8)
        bench.accept()
        batch = bench.batch(0)
        assert batch is not None
        bench.alice.deliver()
        (caught,) = bench.audits()
        ok(bench.judge(caught, severity=protocol.Severity.CERTAIN, **CAUGHT))
        assert (bench.status().submissions["pulled"], bench.batch(0)) == (0, batch)


class TestPendingCredit:
    def view(self, bench: Bench, actor: Actor) -> tuple[int, int]:
        view = bench.view(actor)
        account = ledger.fold(bench.ledger().entries).by_node[actor.key.node]
        assert (account.credit, account.pending) == (view.credit, view.pending)
        return view.credit, view.pending

    def pass_time(self, bench: Bench, seconds: float) -> None:
        bench.clock.advance(seconds)
        bench.hub.upkeep.tick()

    def test_it_matures_once_also_over_restarts_and_after_the_end(self, bench: Bench) -> None:
        bench.bob.deliver()
        bench.accept()
        assert self.view(bench, bench.bob) == (0, 6)
        self.pass_time(bench, 99)
        assert self.view(bench, bench.bob) == (0, 6)
        for seconds in (2, 1000):
            bench.restart()
            self.pass_time(bench, seconds)
            assert self.view(bench, bench.bob) == (6, 0)

    def test_at_the_end_of_the_run_it_matures_at_once(self, tmp_path: Path) -> None:
        """Nothing is left to judge, so no failed audit can take it any more."""
        bench = Bench(tmp_path / "short", {"steps": 1, "groups_per_step": 2}, SETTINGS, changes=TIMES)
        ok(bench.announce(0))
        bench.bob.deliver(2)
        bench.accept()
        assert bench.batch(0) is not None
        self.pass_time(bench, 1)
        assert self.view(bench, bench.bob) == (0, 12), "not before the last version is out"
        ok(bench.announce(1))
        self.pass_time(bench, 1)
        assert self.view(bench, bench.bob) == (12, 0)
        bench.close()

    def test_but_not_while_a_submission_waits_for_its_verdict(self) -> None:
        over = RunProgress(policy=policy(3), next_step=3)
        rules = make_config(Path()).rules
        assert due_until_ms(Moment(rules, over, 5), is_all_judged=False) == 5
        assert due_until_ms(Moment(rules, over, 5), is_all_judged=True) > 10**15
        going_on = RunProgress(policy=policy(2), next_step=3)
        assert due_until_ms(Moment(rules, going_on, 5), is_all_judged=True) == 5

    def test_after_a_ban_nobody_trains_on_a_group_whose_credit_is_final(self, bench: Bench) -> None:
        bench.alice.deliver()
        bench.accept()
        self.pass_time(bench, 101)
        bench.alice.beat()
        bench.alice.deliver()
        (caught,) = bench.audits()
        assert bench.status().units["accepted"] == 1
        ok(bench.judge(caught, severity=protocol.Severity.CERTAIN, **CAUGHT))
        units = bench.status().units
        assert (units["accepted"], units["void"]) == (0, 1), "paid for, so it is not given out again"
        assert bench.status().submissions["pulled"] == 0
        assert self.view(bench, bench.alice) == (6, 0)


REPUTATION = rules(audit="reputation")


def proven(streak: int, **changes: Any) -> NodeRow:
    return node(1, **{"streak": streak, "passed": streak, **changes})


def passes(row: NodeRow, times: int = 1, depth: protocol.Depth = "full", **tally: Any) -> NodeRow:
    for _ in range(times):
        row = reputation.passed(row, verdict(submission(0), depth=depth, tally=protocol.Tally(**tally)))
    return row


def test_work_of_a_kind_that_nobody_measured_ends_no_probation() -> None:
    row = node(1)
    for _ in range(20):
        row = reputation.passed(row, verdict(submission(0), depth="full", measured=False))
    assert row.on_probation
    assert not row.unproven
    assert not passes(row).on_probation, "one of a measured kind more"
    established = proven(50)
    assert reputation.passed(established, verdict(submission(0), depth="full", measured=False)).passed == 50


class TestProbability:
    @pytest.mark.parametrize(
        ("streak", "expected"), [(0, 1), (8, 1), (10, 1), (11, 10 / 11), (20, 0.5), (200, 0.05), (100_000, 0.05)]
    )
    def test_everything_at_first_then_ten_over_the_streak_and_never_below_one_in_twenty(self, streak, expected):
        assert reputation.full_audit_probability(REPUTATION, proven(streak)) == pytest.approx(expected)

    def test_after_an_unsure_audit_everything_for_a_while_unless_our_own_machinery_failed(self) -> None:
        """In coarse formats a chosen token costs no more than that: before, 95 % of such groups were trained on."""
        open_ = verdict(submission(0), outcome=protocol.Outcome.UNSURE)
        row = reputation.unsure(proven(10_000), open_, own_fault=True)
        assert [reputation.full_audit_probability(REPUTATION, passes(row, n)) for n in (0, 10)] == [1, 0.5]
        ours = reputation.unsure(proven(10_000), open_, own_fault=False)
        assert reputation.full_audit_probability(REPUTATION, ours) == reputation.LEAST
        struck = reputation.failed(node(1), protocol.Severity.STATISTICAL)
        again = passes(reputation.unsure(passes(struck, 500), open_, own_fault=True), 500)
        assert again.statistical == 0, "it does not make a strike last longer"

    def test_the_draw_is_fixed_by_the_bytes_and_the_secret_and_is_fair(self) -> None:
        names = [f"{number:064x}" for number in range(4000)]
        assert audit_fraction(b"secret", names[0]) == audit_fraction(b"secret", names[0])
        assert audit_fraction(b"secret", names[0]) != audit_fraction(b"Secret", names[0])
        fractions = [audit_fraction(b"secret", name) for name in names]
        assert all(0 <= fraction < 1 for fraction in fractions)
        depths = [reputation.depth_for(REPUTATION, proven(200), fraction) for fraction in fractions]
        assert 140 < depths.count("full") < 260, "five per cent of 4000, within four standard deviations"


class TestRecord:
    def test_a_sleeper_needs_two_thousand_submissions_to_be_audited_at_one_in_twenty(self) -> None:
        """Were light audits counted, 200 would do."""
        row, handed_in = node(1), 0
        while reputation.full_audit_probability(REPUTATION, row) > reputation.LEAST:
            fraction = audit_fraction(b"secret", f"{handed_in:064x}")
            row = passes(row, depth=reputation.depth_for(REPUTATION, row, fraction))
            handed_in += 1
        assert 1500 < handed_in < 2600

    def test_rejections_end_the_streak_and_strikes_bring_probation(self) -> None:
        soft = reputation.failed(proven(50), None)
        assert (soft.streak, soft.passed, soft.on_probation, soft.strikes) == (50, 50, False, 0)
        hard = reputation.failed(proven(50), protocol.Severity.STATISTICAL)
        assert (hard.streak, hard.passed, hard.on_probation, hard.strikes) == (0, 0, True, 1)
        assert passes(hard, 7).on_probation
        assert not passes(hard, 8).on_probation

    def test_a_statistical_strike_is_forgiven_after_a_thousand_full_audits_in_a_row(self) -> None:
        struck = reputation.failed(node(1), protocol.Severity.STATISTICAL)
        assert (passes(struck, 999).statistical, passes(struck, 1000).statistical) == (1, 0)
        soft = passes(reputation.failed(passes(struck, 999), None), 1)
        assert soft.statistical == 0, "a soft rejection costs no trust"
        interrupted = passes(reputation.failed(passes(struck, 999), protocol.Severity.STATISTICAL), 999)
        assert interrupted.statistical == 2, "in a row means in a row"
        assert passes(passes(struck, 999), 5, depth="light").statistical == 1
        certain = reputation.failed(node(1), protocol.Severity.CERTAIN)
        assert passes(certain, 1000).certain == 1, "what is certain is not forgiven"

    def test_what_is_above_honest_work_adds_up_and_the_rest_begins_anew(self) -> None:
        above, below = protocol.Sums(seen=3.0, expected=2.0, shared=0.5), protocol.Sums(seen=1.0, expected=2.0)
        row = passes(node(1), 2, tokens=100, channels={"distance": above, "mantissa": below})
        twice = protocol.Sums(seen=6.0, expected=4.0, shared=1.0)
        assert row.record == protocol.Tally(tokens=200, channels={"distance": twice})
        better = passes(row, tokens=1, channels={"distance": protocol.Sums(seen=0.0, expected=3.0)})
        assert better.record == protocol.Tally(tokens=201), "good work ends the stretch, and is not saved up"
