"""What the hub does with what branches show: evidence of nodes, owners and newer nodes; strikes, distrust, alarms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubkit import Actor, Bench, code_of, fresh_request, ok, worker_key

from shoal.hub.state.commands import SaveNode
from shoal.hub.state.reputation import NEWER, POOLED_AUDITS, Suspicion, evidence_groups
from shoal.hub.state.rows import NodeRow
from shoal.protocol import Audit, Outcome, Severity
from shoal.protocol.verdict import ENOUGH, Branches, GainEvidence

STEERED = {"outcome": Outcome.REJECTED, "reason": "sampling.steered", "severity": Severity.STATISTICAL, "rewards": ()}
SIXTEEN = (1.0,) * 16


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    run = {"groups_per_step": 40, "group_size": 16, "max_staleness": 2}
    bench = Bench(tmp_path / "hub", run, {"newcomer_share": 1.0})
    ok(bench.announce(0))
    yield bench
    bench.close()


def change(bench: Bench, actor: Actor, **changes: Any) -> None:
    with bench.app.state.hub.context.storage.write() as transaction:
        row = transaction.node(actor.key.node)
        transaction.apply([SaveNode(replace(row, **changes), row.state)])


def row_of(bench: Bench, actor: Actor) -> NodeRow:
    with bench.app.state.hub.context.storage.read() as reader:
        row: NodeRow = reader.node(actor.key.node)
    return row


def newer(bench: Bench) -> Suspicion:
    with bench.app.state.hub.context.storage.read() as reader:
        stored = reader.setting(NEWER)
    return Suspicion() if stored is None else Suspicion.model_validate_json(stored)


def audit_of(bench: Bench, actor: Actor) -> Audit:
    [lease] = actor.lease(fresh_request())
    ok(actor.submit(lease))
    [audit] = bench.audits()
    return audit


def judged(bench: Bench, actor: Actor, differences: Sequence[float], **changes: Any) -> Audit:
    """The next group of a node, with branches that showed these differences."""
    audit = audit_of(bench, actor)
    shown = Branches(looked=len(differences), tokens=3 * len(differences), differences=tuple(differences))
    fields = {"rewards": [0.0, 1.0] * 8, "branches": shown, **changes}
    assert bench.judge(audit, **fields).status_code == 200
    return audit


def test_a_nodes_evidence_grows_and_comes_with_its_next_audit(bench: Bench) -> None:
    first = judged(bench, bench.alice, [1.0, -0.5])
    assert first.gains == GainEvidence()
    assert row_of(bench, bench.alice).gains == GainEvidence().after([1.0, -0.5])
    assert judged(bench, bench.alice, []).gains == GainEvidence().after([1.0, -0.5])
    assert row_of(bench, bench.bob).gains == GainEvidence()


def test_it_is_there_after_a_restart(bench: Bench) -> None:
    judged(bench, bench.alice, [1.0])
    again = bench.restarted()
    assert row_of(again, again.alice).gains.differing == 1
    assert newer(again).evidence.differing == 1
    again.close()


def test_the_same_verdict_again_counts_once(bench: Bench) -> None:
    audit = audit_of(bench, bench.alice)
    verdict = bench.verdict(audit, [0.0, 1.0] * 8, branches=Branches(looked=1, differences=(1.0,)))
    for _ in range(2):
        ok(bench.report(verdict))
    assert row_of(bench, bench.alice).gains.differing == 1
    assert newer(bench).evidence.differing == 1


def test_more_branches_than_rollouts_are_refused(bench: Bench) -> None:
    audit = audit_of(bench, bench.alice)
    for shown in (Branches(looked=17), Branches(looked=1, differences=(1.0, 1.0))):
        assert code_of(bench.judge(audit, [0.0, 1.0] * 8, branches=shown)) == (422, "verdict.branches")


def test_a_strike_begins_the_nodes_evidence_anew_and_is_not_held_against_the_others(bench: Bench) -> None:
    for _ in range(2):
        judged(bench, bench.alice, SIXTEEN)
    assert row_of(bench, bench.alice).gains.suffices
    before = newer(bench).evidence
    judged(bench, bench.alice, [], **STEERED)
    row = row_of(bench, bench.alice)
    assert (row.gains, row.statistical) == (GainEvidence(), 1)
    assert newer(bench).evidence == before.without(ENOUGH)
    assert not newer(bench).distrusted


def test_newcomers_are_distrusted_together_with_an_alarm_until_the_evidence_is_forgotten(bench: Bench) -> None:
    """Two keys bring the evidence; a third, on probation, is distrusted for it, and one that is established is not."""
    for actor in (bench.alice, bench.bob):
        judged(bench, actor, SIXTEEN)
    assert newer(bench).distrusted
    assert [alarm for alarm in bench.status().alarms if "chosen for their reward" in alarm]
    carol = bench.actor(worker_key(3))
    ok(carol.register(name="carol"))
    assert judged(bench, carol, [], outcome=Outcome.UNSURE, reason="sampling.distrusted").distrusted == "newcomers"
    change(bench, bench.bob, passed=20)
    assert judged(bench, bench.bob, []).distrusted == ""
    while newer(bench).distrusted:  # what is unsure is looked at, too
        unsure = {"outcome": Outcome.UNSURE, "reason": "sampling.distrusted", "rewards": ()}
        judged(bench, bench.alice, [-1.0] * 4, **unsure)
    assert newer(bench).evidence.value <= 1_000
    assert judged(bench, carol, []).distrusted == ""


def test_an_owner_answers_for_all_its_nodes(bench: Bench) -> None:
    for actor in (bench.alice, bench.bob):
        change(bench, actor, owner="a" * 64, vouch="{}", passed=POOLED_AUDITS)
    judged(bench, bench.alice, SIXTEEN)
    judged(bench, bench.bob, SIXTEEN)
    assert newer(bench) == Suspicion()
    assert not row_of(bench, bench.alice).gains.suffices
    assert judged(bench, bench.alice, []).distrusted == "its owner"


def test_whose_evidence_a_node_counts_for() -> None:
    row = NodeRow("1" * 32, "1" * 64, "worker", "n", 0)
    assert list(evidence_groups(row)) == [NEWER]
    assert list(evidence_groups(replace(row, owner="ab", passed=POOLED_AUDITS))) == ["gains/ab"]
