"""Audits, verdicts, strikes and bans."""

from dataclasses import replace
from typing import Any

import pytest

from kit import state
from kit.state import NOW_MS, moment, node, nodes_in, of_type, submission, submissions_in, unit, units_in, verdict
from shoal.hub.state import AddVerdict, Command, RaiseAlarm, Record, Refusal, audits, nodes
from shoal.hub.state.audits import Ruling, VerdictCase
from shoal.hub.state.rows import LeaseState, NodeRow, RunProgress, SubmissionState, UnitState
from shoal.protocol import Branches, NodeState, Outcome, RolloutReward, Severity, Sums, Tally, document_hash

VALIDATOR = "f" * 32
SIGNED = '{"kind": "verdict"}'


def case(**changes: Any) -> VerdictCase:
    row = submission(0)
    filled = unit(0, UnitState.SUBMITTED, attempt=1, incarnation=0, version=0, submission=row.submission)
    fields: dict[str, Any] = {"submission": row, "unit": filled, "node": node(1)}
    return VerdictCase(**{**fields, **changes})


def judge(subject: VerdictCase, now: Any = None, rewards: tuple[float, ...] = (0, 1), **changes: Any) -> list[Command]:
    ruling = Ruling(verdict(subject.submission, rewards, **changes), VALIDATOR, SIGNED)
    return audits.judge(now or moment(), subject, ruling)


class TestAccepted:
    def test_credit_ledger_and_unit_in_one_go(self) -> None:
        commands = judge(case())
        assert units_in(commands)[0].state == UnitState.ACCEPTED
        (row,) = submissions_in(commands)
        assert (row.state, row.rewards, row.generated_tokens) == (SubmissionState.ACCEPTED, (0, 1), 7)
        (paid,) = nodes_in(commands)
        assert (paid.accepted, paid.credit) == (1, 7)
        joined, record = of_type(commands, Record)
        assert (joined.kind, joined.body["public_key"]) == ("node", node(1).public_key), "before what it earns"
        assert (record.kind, record.body["credit"], record.body["node"]) == ("credit", 7, node(1).node)
        assert record.body["receipt"] == document_hash(row.receipt)
        assert record.body["verdict"] == document_hash(SIGNED)
        assert of_type(commands, AddVerdict) == [AddVerdict(row.submission, SIGNED)]

    def test_the_first_work_of_a_banned_node_brings_its_owner_and_ban_into_the_ledger(self) -> None:
        vouched = {"owner": "0a" * 32, "vouch": '{"kind": "vouch"}'}
        commands = judge(case(node=node(1, state=NodeState.BANNED, reason="sampling.seed", **vouched)))
        records = of_type(commands, Record)
        assert [record.kind for record in records] == ["node", "vouch", "sanction", "credit"]
        assert records[1].body["vouch"] == {"kind": "vouch"}
        assert (records[2].body["state"], records[2].body["reason"]) == ("banned", "sampling.seed")

    def test_equal_rewards_drop_the_group_but_pay_for_the_work(self) -> None:
        commands = judge(case(), rewards=(0.5, 0.5))
        dropped = units_in(commands)[0]
        assert (dropped.state, dropped.lost_step) == (UnitState.DROPPED, 0)
        assert (nodes_in(commands)[0].credit, of_type(commands, RaiseAlarm)) == (7, [])

    def test_the_tasks_part_decides_what_is_equal(self) -> None:
        def reward(value: float, **parts: float) -> RolloutReward:
            return RolloutReward(value=value, parts=parts)

        assert audits.has_equal_rewards([reward(0.9, task=1, length=-0.1), reward(1, task=1)])
        assert not audits.has_equal_rewards([reward(1, task=1), reward(1, task=0, bonus=1)])
        assert audits.has_equal_rewards([reward(0.5), reward(0.5)])
        assert not audits.has_equal_rewards([reward(0.5)]), "a group of one has nothing to compare with"
        assert not audits.has_equal_rewards([reward(0.5, task=1), reward(1)]), "the whole, unless all have the part"
        assert audits.has_equal_rewards([reward(1, task=0), reward(1)])
        judged = [RolloutReward(value=1, parts={"task": 1, "judge.rm": rank}) for rank in (0.0, 1.0)]
        assert not audits.has_equal_rewards(judged), "a judge saw a difference"
        assert audits.has_equal_rewards(judged[:1] * 2)

    @pytest.mark.parametrize(("drop_equal", "state"), [("task", UnitState.DROPPED), ("total", UnitState.ACCEPTED)])
    def test_a_group_that_differs_in_length_only_is_dropped_by_task_and_kept_by_total(self, drop_equal, state):
        rewards = tuple(RolloutReward(value=1 - cost, parts={"task": 1, "length": -cost}) for cost in (0.1, 0.2))
        row = case()
        ruling = Ruling(verdict(row.submission, rewards=()).model_copy(update={"rewards": rewards}), "v", "{}")
        commands = audits.judge(moment(drop_equal=drop_equal), row, ruling)
        assert units_in(commands)[0].state is state
        (decided,) = submissions_in(commands)
        assert decided.rewards == (0.9, 0.8), "what is trained on, were it trained on, is the whole"
        assert decided.pass_rate == 1.0

    def test_a_group_that_became_too_stale_is_void_and_paid(self) -> None:
        commands = judge(case(), moment(progress=RunProgress(policy=state.policy(1), next_step=1)))
        after = units_in(commands)[0]
        assert (after.state, after.reason, after.lost_step) == (UnitState.VOID, "stale", None)
        assert nodes_in(commands)[0].credit == 7


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_same_outcome_again_changes_nothing(outcome: Outcome) -> None:
    decided = case(submission=submission(0, state=SubmissionState(outcome.value)))
    assert judge(decided, outcome=outcome) == []


class TestUnsure:
    def test_nobody_is_paid_or_punished_and_the_unit_is_open_again(self) -> None:
        commands = judge(case(), outcome=Outcome.UNSURE)
        (row,) = nodes_in(commands)
        assert (row.unsure, row.strikes, row.credit) == (1, 0, 0)
        after = units_in(commands)[0]
        assert (after.state, after.submission, after.version, after.failures) == (UnitState.OPEN, None, None, 1)
        assert of_type(commands, Record) == []

    @pytest.mark.parametrize("reason", ["reward.machinery", "machinery.policy", "machinery.kind"])
    def test_the_owner_is_told_once_a_step_that_nothing_can_be_judged(self, reason: str) -> None:
        texts = [f"unit {number}: ConnectError" for number in range(2)]
        first, second = (
            of_type(judge(case(), outcome=Outcome.UNSURE, reason=reason, message=text), RaiseAlarm) for text in texts
        )
        assert first == second, "the same words for every group"
        assert first[0].code == f"unjudged.{reason}"
        assert f"({reason}); the validators' logs say why" in first[0].message
        assert "ConnectError" not in first[0].message

    def test_only_attempts_of_validators_can_give_a_unit_up_and_the_owner_is_told(self) -> None:
        row, now = replace(case().unit, failures=2), moment(progress=RunProgress(policy=state.policy(), dropped=8))
        for _ in range(4):
            commands = judge(case(unit=row, node=trusted()), now, outcome=Outcome.UNSURE, reason="reward.machinery")
            (row,) = units_in(commands).values()
            last, row = row, replace(row, state=UnitState.SUBMITTED, submission=case().submission.submission)
        assert (last.state, last.reason, last.lost_step, last.failures) == (UnitState.VOID, "attempts", 0, 6)
        codes = [alarm.code for alarm in of_type(commands, RaiseAlarm)]
        assert codes == ["unjudged.reward.machinery", "unit.attempts", "refill.exhausted"]

    def test_a_node_that_is_always_unsure_gets_one_lease_at_a_time_after_four(self) -> None:
        row, allowed = node(1, window=8), []
        for _ in range(5):
            allowed.append(nodes.window(state.rules(), row))
            (row,) = nodes_in(judge(case(node=row), outcome=Outcome.UNSURE, reason="sampling.accident"))
        assert allowed == [8, 8, 8, 8, 1]
        for _ in range(64):  # 4.5 - 64/64 = 3.5
            (row,) = nodes_in(judge(case(node=row)))
        assert nodes.window(state.rules(), row) == 1
        (row,) = nodes_in(judge(case(node=row)))
        assert nodes.window(state.rules(), row) > 1

    def test_who_is_always_unsure_is_doubted_whatever_the_formats_rate(self) -> None:
        """Groups of 16 x 8,192 tokens have 4,096 parts: by limits of 2e-3 each the rate is 1, and doubt never grew."""
        row = node(1, window=8)
        for _ in range(7):
            commands = judge(case(node=row), outcome=Outcome.UNSURE, reason="sampling.accident", unsure_rate=1.0)
            (row,) = nodes_in(commands)
        assert nodes.window(state.rules(), row) == 1


def trusted(**changes: Any) -> NodeRow:
    return node(1, role="validator", passed=0, **changes)


@pytest.mark.parametrize("severity", [None, *Severity])
def test_rejection_of_a_validators_group_sanctions_nobody_and_is_an_alarm(severity: Severity | None) -> None:
    commands = judge(case(node=trusted()), outcome=Outcome.REJECTED, severity=severity, reason="shape.tokens")
    (row,) = nodes_in(commands)
    assert (row.state, row.strikes, row.rejected) == (NodeState.ACTIVE, 0, 1)
    assert [alarm.code for alarm in of_type(commands, RaiseAlarm)] == ["trusted.shape.tokens"]
    assert (units_in(commands)[0].state, units_in(commands)[0].failures) == (UnitState.OPEN, 1)


@pytest.mark.parametrize(("stands", "says", "alarms"), [
    (SubmissionState.ACCEPTED, Outcome.REJECTED, 1), (SubmissionState.PULLED, Outcome.REJECTED, 1),
    (SubmissionState.REJECTED, Outcome.ACCEPTED, 1), (SubmissionState.ACCEPTED, Outcome.UNSURE, 0),
    (SubmissionState.UNSURE, Outcome.ACCEPTED, 0), (SubmissionState.ACCEPTED, Outcome.ACCEPTED, 0),
])  # fmt: skip
def test_accepted_against_rejected_is_an_alarm(stands: SubmissionState, says: Outcome, alarms: int) -> None:
    row = submission(0, state=stands, validator="a" * 32)
    ruling = Ruling(verdict(row, outcome=says, reason="proofs.drift"), VALIDATOR, SIGNED)
    found = audits.disagreement(moment(), row, ruling)
    assert [alarm.code for alarm in of_type(found, RaiseAlarm)] == ["verdict.disagreement"] * alarms


STRIKE: dict[str, Any] = {"outcome": Outcome.REJECTED, "severity": Severity.STATISTICAL, "reason": "proofs.drift"}


def same_kind(count: int, **changes: Any) -> tuple[NodeRow, ...]:
    return tuple(node(number, kind="torch/cuda/bfloat16", **changes) for number in range(10, 10 + count))


FAILED: dict[str, Any] = {"failed_check": "proofs.drift", "failed_at_ms": NOW_MS - 1}


class TestKinds:
    def outcome(self, *others: NodeRow, **changes: Any) -> SubmissionState:
        subject = case(node=node(1, network="10.1.1", kind="torch/cuda/bfloat16"), same_kind=others)
        commands = judge(subject, **{**STRIKE, **changes})
        (row,) = submissions_in(commands)
        struck = nodes_in(commands)[0]
        assert struck.strikes == (row.state == SubmissionState.REJECTED)
        codes = [alarm.code for alarm in of_type(commands, RaiseAlarm)]
        assert codes == ([] if struck.strikes else ["kind.proofs.drift.torch/cuda/bfloat16"])
        assert struck.failed_check == "proofs.drift", "counts for the next one of its kind"
        assert struck.record == Tally()
        return row.state

    def test_the_third_of_three_machines_of_a_kind_that_fail_is_unsure(self) -> None:
        assert self.outcome(*same_kind(1, accepted=8, **FAILED)) == SubmissionState.REJECTED
        assert self.outcome(*same_kind(2, accepted=8, **FAILED)) == SubmissionState.UNSURE

    def test_as_many_machines_that_pass_outweigh_those_that_fail(self) -> None:
        failing = same_kind(2, accepted=8, **FAILED)
        passing = [node(number, accepted=8, passed=8) for number in range(50, 53)]
        assert self.outcome(*failing, *passing[:2]) == SubmissionState.UNSURE
        assert self.outcome(*failing, *passing) == SubmissionState.REJECTED

    def test_another_check_or_one_long_ago_does_not_count(self) -> None:
        other = same_kind(5, accepted=8, passed=0, failed_check="sampling.seed", failed_at_ms=NOW_MS)
        old = same_kind(5, accepted=8, passed=0, failed_check="proofs.drift", failed_at_ms=NOW_MS - 3_600_001)
        assert (self.outcome(*other), self.outcome(*old)) == (SubmissionState.REJECTED, SubmissionState.REJECTED)

    def test_a_certain_failure_bans_whatever_others_fail(self) -> None:
        subject = case(same_kind=same_kind(9, accepted=8, **FAILED))
        (row,) = nodes_in(judge(subject, outcome=Outcome.REJECTED, severity=Severity.CERTAIN, reason="proofs.drift"))
        assert row.state == NodeState.BANNED

    def test_tokens_chosen_for_their_reward_are_a_strike_however_many_of_the_kind_choose(self) -> None:
        """No driver knows the reward. Before, three such keys of a rare kind had their evidence begin anew for ever."""
        failed = {"failed_check": "sampling.steered", "failed_at_ms": NOW_MS - 1}
        subject = case(same_kind=same_kind(9, accepted=8, **failed))
        (row, *_) = nodes_in(judge(subject, **{**STRIKE, "reason": "sampling.steered"}))
        assert (row.strikes, row.state) == (1, NodeState.SUSPENDED)


class TestRejected:
    def test_one_certain_failure_bans(self) -> None:
        holding = state.held(4)
        commands = judge(
            case(holdings=(holding,), node=node(1, accepted=3)), outcome=Outcome.REJECTED, severity=Severity.CERTAIN,
            reason="sampling.seed", message="token 3",
        )  # fmt: skip
        (row,) = nodes_in(commands)
        assert (row.state, row.rejected, row.certain, row.credit) == (NodeState.BANNED, 1, 1, 0)
        assert row.reason == "sampling.seed: token 3"
        assert [record.kind for record in of_type(commands, Record)] == ["rejected", "sanction"]
        assert state.leases_in(commands) == {"u4a0": LeaseState.VOID}
        after = units_in(commands)
        assert (after[4].state, after[4].failures) == (UnitState.OPEN, 0)
        assert (after[0].state, after[0].failures) == (UnitState.OPEN, 0), "the node failed, not the unit"

    def test_two_statistical_failures_ban(self) -> None:
        first = nodes_in(judge(case(), outcome=Outcome.REJECTED, severity=Severity.STATISTICAL))[0]
        assert (first.state, first.strikes, first.on_probation) == (NodeState.SUSPENDED, 1, True)
        assert first.until_ms == NOW_MS + 60_000
        fresh = case(node=first, leased_at_ms=NOW_MS + 1)
        second = nodes_in(judge(fresh, outcome=Outcome.REJECTED, severity=Severity.STATISTICAL))[0]
        assert (second.state, second.strikes) == (NodeState.BANNED, 2)

    @pytest.mark.parametrize("outcome", [Outcome.ACCEPTED, Outcome.UNSURE])
    def test_what_was_leased_before_a_strike_does_not_join_the_record_after_it(self, outcome: Outcome) -> None:
        """Before, groups of the same round were in the record that a second strike rests on."""
        high = Tally(tokens=9, channels={"exponents": Sums(seen=9, expected=1)})
        gained = Branches(looked=1, differences=(1.0,))
        row = node(1, statistical=1, failed_check="proofs.drift", failed_at_ms=NOW_MS)
        for leased_at_ms, record, pairs in ((NOW_MS, Tally(), 0), (NOW_MS + 1, high, 1)):
            of = case(node=row, leased_at_ms=leased_at_ms)
            (after,) = nodes_in(judge(of, outcome=outcome, tally=high, branches=gained))
            assert (after.record, after.gains.differing) == (record, pairs)

    def test_a_strike_empties_the_record_and_what_was_leased_before_it_is_no_second_strike(self) -> None:
        """Before, two groups of one round banned: the second rested on the same machine, state and record."""
        row = node(1, record=Tally(tokens=900))
        (row,) = nodes_in(judge(case(node=row), outcome=Outcome.REJECTED, severity=Severity.STATISTICAL))
        assert row.record == Tally()
        for leased_at_ms in (NOW_MS - 5, NOW_MS):
            old = case(node=row, leased_at_ms=leased_at_ms)
            commands = judge(old, outcome=Outcome.REJECTED, severity=Severity.STATISTICAL)
            (row,) = nodes_in(commands)
            assert (row.state, row.strikes) == (NodeState.SUSPENDED, 1)
            assert submissions_in(commands)[0].state == SubmissionState.REJECTED
            assert units_in(commands)[0].state == UnitState.OPEN

    def test_without_a_severity_it_costs_the_credit_only(self) -> None:
        row = node(1, streak=7, passed=9)
        for _ in range(3):
            (row,) = nodes_in(judge(case(node=row), outcome=Outcome.REJECTED))
        assert (row.state, row.rejected, row.strikes) == (NodeState.ACTIVE, 3, 0)
        assert (row.streak, row.passed, row.until_ms) == (7, 9, None)

    def test_four_in_a_row_suspend_and_cost_no_trust(self) -> None:
        row = node(1, streak=7, passed=9, soft=3)
        (after,) = nodes_in(judge(case(node=row), outcome=Outcome.REJECTED, reason="reward.late"))
        assert (after.state, after.until_ms, after.suspensions) == (NodeState.SUSPENDED, NOW_MS + 60_000, 1)
        assert (after.streak, after.passed) == (7, 9)
        assert after.reason == "4 groups in a row were rejected, the last for reward.late"

    def test_what_was_handed_in_before_a_suspension_can_make_it_longer_and_ban(self) -> None:
        waiting = node(1, state=NodeState.SUSPENDED, statistical=1, suspensions=1, until_ms=NOW_MS + 5)
        (soft,) = nodes_in(judge(case(node=replace(waiting, soft=9)), outcome=Outcome.REJECTED))
        assert (soft.state, soft.until_ms) == (NodeState.SUSPENDED, NOW_MS + 5), "it is out already"
        (struck,) = nodes_in(judge(case(node=waiting), outcome=Outcome.REJECTED, severity=Severity.CERTAIN))
        assert (struck.state, struck.until_ms) == (NodeState.BANNED, None)


@pytest.mark.parametrize(("changes", "code"), [
    ({"unit": 1}, "verdict.mismatch"), ({"node": "0" * 31 + "2"}, "verdict.mismatch"),
    ({"rewards": (1.0,)}, "verdict.rewards"), ({"branches": Branches(looked=3)}, "verdict.branches"),
    ({"depth": "light"}, "verdict.depth"), ({"generated_tokens": 33}, "verdict.tokens"),
    ({"generated_tokens": -1}, "verdict.tokens"), ({"tally": Tally(tokens=33)}, "verdict.tally"),
    ({"tally": Tally(tokens=30, proofs=2, accidents=3)}, "verdict.tally"),
    ({"tally": Tally(tokens=33), "outcome": Outcome.UNSURE}, "verdict.tally"),  # it would join the record, too
])  # fmt: skip
def test_a_verdict_that_does_not_fit_changes_nothing(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(Refusal) as refusal:
        judge(case(), **changes)
    assert (refusal.value.status, refusal.value.code) == (422, code)
