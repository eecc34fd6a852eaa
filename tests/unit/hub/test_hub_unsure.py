"""Work that nobody can judge, by as many throwaway keys as there are: no unit is void, and no step waits for ever."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.hub import Actor, Bench, ok, worker_key
from kit.machine import Play
from kit.storage import apply, changed
from shoal.hub.service.measuring import CALIBRATION
from shoal.hub.service.reporting import read_figures
from shoal.hub.state import calibrations
from shoal.hub.state.calibrations import InForce
from shoal.hub.state.reputation import NEWER, POOLED_AUDITS, Suspicion
from shoal.protocol import ENOUGH, Audit, Batch, Branches, GainEvidence, NodeState, Outcome, Severity

GROUPS = 3


@pytest.fixture
def play(tmp_path: Path) -> Play:
    play = Play(tmp_path, {"steps": 2, "groups_per_step": GROUPS, "max_staleness": 0}, {"lease_s": 60})
    play.announce(0)
    return play


def judge_all(play: Play, outcome: Outcome, trusted: Outcome = Outcome.ACCEPTED) -> None:
    for audit in play.claim(16):
        play.judge(audit, trusted if audit.trusted else outcome, (0.0, 1.0))


def let_pass(play: Play, seconds: int) -> None:
    for _ in range(0, seconds, 4):  # after a longer pause it was the hub that was away
        play.clock.advance(4)
        play.hub.upkeep.tick()


def state_of(play: Play, unit: int) -> tuple[str, int]:
    row = play.stored.unit(unit)
    return row.state.value, row.failures


def test_fresh_keys_whose_every_group_is_unsure_stop_no_step(play: Play) -> None:
    """Before, four such groups voided a unit: steps took what was left, down to nothing."""
    for step in range(2):
        for _ in range(2 * GROUPS):
            play.work(play.join(), outcome=Outcome.UNSURE)
        assert play.lease(play.join(), 4) == [], "workers do not get what was unsure twice"
        for lease in play.entrust():
            play.submit(lease)
        judge_all(play, Outcome.UNSURE)
        batch = play.batch(step)
        assert isinstance(batch, Batch)
        assert [group.unit for group in batch.groups] == [GROUPS * step + number for number in range(GROUPS)]
        play.announce(step + 1)
    status = play.hub.reporting.status()
    assert (status.units["void"], status.units["trained"]) == (0, 2 * GROUPS)
    rows = [play._node(worker.node) for worker in play.workers]
    assert {(row.credit, row.strikes, row.state) for row in rows} == {(0, 0, NodeState.ACTIVE)}
    assert {node.credit for node in status.nodes} == {0}, "the validator earns nothing either"


def test_a_validator_that_dies_with_a_unit_is_not_blamed_and_the_unit_comes_again(play: Play) -> None:
    for _ in range(2):
        play.work(play.join(), outcome=Outcome.UNSURE)
    (first,) = play.entrust()
    let_pass(play, 24)  # it is not heard of any more
    assert state_of(play, first.unit) == ("open", 3)
    (second,) = play.entrust()
    assert (second.unit, second.seeds, second.attempt) == (first.unit, first.seeds, first.attempt + 1)
    row = play._node(play.validator.node)
    assert (row.state, row.lapsed, row.window) == (NodeState.ACTIVE, 0, 0)


def test_a_kind_that_fails_together_is_unsure_and_the_alarm_names_it(play, caplog):
    """Three established machines of one kind fail one check: the first two are struck, from the third on nobody is.
    The alarm is in the status, in the hub's log once, among the metrics, and in what `shoal why` says of the third."""
    workers = [play.join(streak=8) for _ in range(3)]
    for worker in workers:
        play.stored.touch_presence(worker.node, play.hub.context.clock.now_ms())
    for worker in workers:
        (lease,) = play.lease(worker, 1)
        play.submit(lease)
        (audit,) = [each for each in play.claim(4) if each.lease.document["node"] == worker.node]
        apply(play.storage, changed(play._node(worker.node), accepted=8))
        assert play.judge(audit, Outcome.REJECTED, (0.0, 1.0), Severity.STATISTICAL) is None
    rows = [play._node(worker.node) for worker in workers]
    assert [row.strikes for row in rows] == [1, 1, 0]
    assert rows[2].unsure == 1
    (alarm,) = [each for each in play.hub.reporting.status().alarms if "most machines of kind" in each]
    assert "torch/cpu/float32 fail test" in alarm
    play.hub.upkeep.tick()
    play.hub.upkeep.tick()
    assert caplog.messages.count(f"alarm: {alarm}") == 1
    figures = {figure.name: figure.values for figure in read_figures(play.hub.context)}
    assert figures["alarms"] == {("kind",): 1}
    (refused,) = play.hub.stories.node(workers[2].node).refused
    assert refused.rule.startswith("most machines of its kind fail this check")


def test_the_kind_that_fails_is_that_of_the_lease_whatever_its_node_asks_for_since(play: Play) -> None:
    """Three keys of a kind that most pass ask as a rarer one before their verdicts come: all three are struck."""
    rare = "scripted/cpu/float32"
    keys, honest = ([play.join(streak=8) for _ in range(3)] for _ in range(2))
    for worker in [*honest, *keys]:
        for lease in play.lease(worker, 1):
            play.release(lease)
        apply(play.storage, changed(play._node(worker.node), accepted=8))
    for worker in keys:
        (lease,) = play.lease(worker, 1)
        play.submit(lease)
        play.lease(worker, 1, profile=rare)
        assert play._node(worker.node).kind == rare
        (audit,) = [each for each in play.claim(4) if each.lease.document["node"] == worker.node]
        assert play.judge(audit, Outcome.REJECTED, (0.0, 1.0), Severity.STATISTICAL) is None
    assert [play._node(worker.node).strikes for worker in keys] == [1, 1, 1]


def test_who_works_as_a_kind_that_nobody_measured_is_a_newcomer_and_audited_fully(tmp_path: Path) -> None:
    """By limits of a number format alone nobody is struck: a good name of another kind must buy no light audits."""
    other = "torch/cpu/bfloat16"
    run, hub = {"steps": 2, "groups_per_step": 8, "max_staleness": 0}, {"lease_s": 60, "audit": "reputation"}
    play = Play(tmp_path, run, hub, measurable=(other, "torch/cuda/bfloat16"))
    play.announce(0)
    in_force = InForce(digest="c" * 64, kinds=("torch/cuda/bfloat16",))
    play.stored.put_setting(CALIBRATION, in_force.model_dump_json())
    worker = play.join(streak=10_000)
    play.lease(worker, 1)
    assert not play._node(worker.node).on_probation
    (lease,) = play.lease(worker, 1, profile=other)
    row = play._node(worker.node)
    assert (row.on_probation, row.streak) == (True, 0)
    play.submit(lease)
    assert [audit.depth for audit in play.claim(4)] == ["full"]


def test_a_refused_path_is_closed_while_the_other_path_of_its_format_is_open() -> None:
    """Limits of the open path are not those of the refused one: no leases by them."""
    paged, plain = "torch/cuda/bfloat16", "torch-plain/cuda/bfloat16"
    in_force = InForce(digest="c" * 64, kinds=(paged,), refused={plain: "int8 passes"})
    assert calibrations.taken(in_force, (), (paged, plain)) == (paged,)
    assert calibrations.terms(in_force, paged, ()).calibration == "c" * 64
    refused = calibrations.terms(in_force, plain, ())
    assert (refused.calibration, "int8 passes" in refused.waiting) == ("", True)


STEERED = {"outcome": Outcome.REJECTED, "reason": "sampling.steered", "severity": Severity.STATISTICAL, "rewards": ()}
SIXTEEN = (1.0,) * 16

pytestmark = pytest.mark.hub(
    run={"groups_per_step": 40, "group_size": 16, "max_staleness": 2}, settings={"newcomer_share": 1.0}
)


def newer(bench: Bench) -> Suspicion:
    stored = bench.stored.setting(NEWER)
    return Suspicion() if stored is None else Suspicion.model_validate_json(stored)


def judged(bench: Bench, actor: Actor, differences: Sequence[float], **changes: Any) -> Audit:
    """The next group of a node, with branches that showed these differences."""
    audit = bench.audit_of(actor)
    shown = Branches(looked=len(differences), tokens=3 * len(differences), differences=tuple(differences))
    fields = {"rewards": [0.0, 1.0] * 8, "branches": shown, **changes}
    assert bench.judge(audit, **fields).status_code == 200
    return audit


def test_a_nodes_evidence_grows_comes_with_its_next_audit_and_the_same_verdict_again_counts_once(bench: Bench) -> None:
    first = judged(bench, bench.alice, [1.0, -0.5])
    assert first.gains == GainEvidence()
    assert bench.row(bench.alice).gains == GainEvidence().after([1.0, -0.5])
    assert judged(bench, bench.alice, []).gains == GainEvidence().after([1.0, -0.5])
    assert bench.row(bench.bob).gains == GainEvidence()

    audit = bench.audit_of(bench.bob)
    verdict = bench.verdict(audit, [0.0, 1.0] * 8, branches=Branches(looked=1, differences=(1.0,)))
    for _ in range(2):
        ok(bench.report(verdict))
    assert (bench.row(bench.bob).gains.differing, newer(bench).evidence.differing) == (1, 3)


def test_a_strike_begins_the_nodes_evidence_anew_and_is_not_held_against_the_others(bench: Bench) -> None:
    for _ in range(2):
        judged(bench, bench.alice, SIXTEEN)
    assert bench.row(bench.alice).gains.suffices
    before = newer(bench).evidence
    judged(bench, bench.alice, [], **STEERED)
    row = bench.row(bench.alice)
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
    bench.change(bench.bob, passed=20)
    assert judged(bench, bench.bob, []).distrusted == ""
    while newer(bench).distrusted:  # what is unsure is looked at, too
        unsure = {"outcome": Outcome.UNSURE, "reason": "sampling.distrusted", "rewards": ()}
        judged(bench, bench.alice, [-1.0] * 4, **unsure)
    assert newer(bench).evidence.value <= 1_000
    assert judged(bench, carol, []).distrusted == ""


def test_an_owner_answers_for_all_its_nodes(bench: Bench) -> None:
    for actor in (bench.alice, bench.bob):
        bench.change(actor, owner="a" * 64, vouch="{}", passed=POOLED_AUDITS)
    judged(bench, bench.alice, SIXTEEN)
    judged(bench, bench.bob, SIXTEEN)
    assert newer(bench) == Suspicion()
    assert not bench.row(bench.alice).gains.suffices
    assert judged(bench, bench.alice, []).distrusted == "its owner"
