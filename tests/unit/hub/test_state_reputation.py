"""Reputation: how often a node is audited fully, what audits do to its record, and how pending credit moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.state import NOW_MS, moment, node, nodes_in, of_type, rules, submission, submissions_in, verdict
from shoal.hub.state import credits, reputation
from shoal.hub.state.commands import Record
from shoal.hub.state.draws import audit_fraction
from shoal.hub.state.machines import SubmissionState
from shoal.hub.state.rows import NodeRow
from shoal.protocol import Depth, Outcome, Severity, Sums, Tally, document_hash

REPUTATION = rules(audit="reputation")


def proven(streak: int, **changes: Any) -> NodeRow:
    return node(1, **{"streak": streak, "passed": streak, **changes})


def passes(row: NodeRow, times: int = 1, depth: Depth = "full", **tally: Any) -> NodeRow:
    for _ in range(times):
        row = reputation.passed(row, verdict(submission(0), depth=depth, tally=Tally(**tally)))
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
    def test_everything_at_first_then_ten_over_the_streak_and_never_below_one_in_twenty(
        self, streak: int, expected: float
    ) -> None:
        assert reputation.full_audit_probability(REPUTATION, proven(streak)) == pytest.approx(expected)

    def test_everything_by_default_and_on_probation(self) -> None:
        assert reputation.full_audit_probability(rules(), proven(10_000)) == 1
        assert reputation.full_audit_probability(REPUTATION, proven(10_000, passed=7)) == 1

    def test_after_an_unsure_audit_everything_for_a_while_unless_our_own_machinery_failed(self) -> None:
        """In coarse formats a chosen token costs no more than that: before, 95 % of such groups were trained on."""
        open_ = verdict(submission(0), outcome=Outcome.UNSURE)
        row = reputation.unsure(proven(10_000), open_, own_fault=True)
        assert [reputation.full_audit_probability(REPUTATION, passes(row, n)) for n in (0, 10)] == [1, 0.5]
        ours = reputation.unsure(proven(10_000), open_, own_fault=False)
        assert reputation.full_audit_probability(REPUTATION, ours) == reputation.LEAST
        struck = reputation.failed(node(1), Severity.STATISTICAL)
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

    def test_a_full_audit_is_what_lies_below_the_probability(self) -> None:
        assert reputation.depth_for(REPUTATION, proven(20), 0.499) == "full"
        assert reputation.depth_for(REPUTATION, proven(20), 0.5) == "light"


class TestRecord:
    def test_only_full_audits_lengthen_the_streak(self) -> None:
        row = passes(passes(node(1, passed=0), 3), 5, depth="light", tokens=9)
        assert (row.streak, row.passed, row.accepted, row.record) == (3, 3, 8, Tally())

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
        hard = reputation.failed(proven(50), Severity.STATISTICAL)
        assert (hard.streak, hard.passed, hard.on_probation, hard.strikes) == (0, 0, True, 1)
        assert passes(hard, 7).on_probation
        assert not passes(hard, 8).on_probation

    def test_trusted_roles_are_never_on_probation(self) -> None:
        assert not node(1, role="validator").on_probation

    def test_a_statistical_strike_is_forgiven_after_a_thousand_full_audits_in_a_row(self) -> None:
        struck = reputation.failed(node(1), Severity.STATISTICAL)
        assert passes(struck, 999).statistical == 1
        assert passes(struck, 1000).statistical == 0
        soft = passes(reputation.failed(passes(struck, 999), None), 1)
        assert soft.statistical == 0, "a soft rejection costs no trust"
        interrupted = passes(reputation.failed(passes(struck, 999), Severity.STATISTICAL), 999)
        assert interrupted.statistical == 2, "in a row means in a row"
        assert passes(passes(struck, 999), 5, depth="light").statistical == 1
        certain = reputation.failed(node(1), Severity.CERTAIN)
        assert passes(certain, 1000).certain == 1, "what is certain is not forgiven"

    def test_what_is_above_honest_work_adds_up_and_the_rest_begins_anew(self) -> None:
        above, below = Sums(seen=3.0, expected=2.0, shared=0.5), Sums(seen=1.0, expected=2.0)
        row = passes(node(1), 2, tokens=100, channels={"distance": above, "mantissa": below})
        twice = Sums(seen=6.0, expected=4.0, shared=1.0)
        assert row.record == Tally(tokens=200, channels={"distance": twice})
        better = passes(row, tokens=1, channels={"distance": Sums(seen=0.0, expected=3.0)})
        assert better.record == Tally(tokens=201), "good work ends the stretch, and is not saved up"


class TestCredit:
    def accepted(self, number: int = 0, **changes: Any) -> Any:
        fields = {"state": SubmissionState.ACCEPTED, "generated_tokens": 7, "validator": "v"}
        return submission(number, **{**fields, **changes})

    def test_it_is_given_at_once_where_everything_is_audited(self) -> None:
        assert credits.matures_at_ms(moment()) is None
        row, record = credits.earn(node(1), self.accepted(), "{}", NOW_MS)
        assert (row.credit, row.pending, record.kind) == (7, 0, "credit")

    def test_by_reputation_it_is_pending_for_the_window(self) -> None:
        until_ms = credits.matures_at_ms(moment(audit="reputation", credit_window_ms=5000))
        assert until_ms == NOW_MS + 5000
        row, record = credits.earn(node(1), self.accepted(matures_at_ms=until_ms), "{}", NOW_MS)
        assert (row.credit, row.pending, record.kind) == (0, 7, "pending")
        assert record.body["matures_at_ms"] == until_ms

    def test_what_is_due_becomes_credit_one_row_per_submission_one_save_per_node(self) -> None:
        due = [self.accepted(0, matures_at_ms=1), self.accepted(1, matures_at_ms=2, generated_tokens=5)]
        row = node(1, pending=20, credit=1)
        commands = credits.mature(due, {row.node: row}, {each.submission: "{}" for each in due}, NOW_MS)
        records = of_type(commands, Record)
        assert [record.kind for record in records] == ["credit", "credit"]
        assert {record.body["verdict"] for record in records} == {document_hash("{}")}
        assert nodes_in(commands) == [replace(row, pending=8, credit=13)]
        assert [after.matures_at_ms for after in submissions_in(commands)] == [None, None]

    def test_void_takes_what_is_pending_and_leaves_what_was_credited(self) -> None:
        row, commands = credits.void(node(1, pending=7, credit=30), [self.accepted(matures_at_ms=1)], "why", NOW_MS)
        assert (row.pending, row.credit) == (0, 30)
        (record,) = of_type(commands, Record)
        assert (record.kind, record.body["credit"], record.body["reason"]) == ("void", 7, "why")
