"""Batches and policies: what a step consists of, and what a new version or incarnation changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kit.state import NOW_MS, lease, leases_in, moment, of_type, policy, submission, unit, units_in
from shoal.hub.state import AddBatch, AddPolicy, Command, Record, Refusal, batches
from shoal.hub.state.rows import LeaseState, RunProgress, SubmissionState, UnitRow, UnitState
from shoal.protocol import Batch


def accepted(number: int, version: int = 0, **changes: Any) -> UnitRow:
    return unit(number, UnitState.ACCEPTED, version=version, incarnation=0, submission=f"{number:064x}", **changes)


@dataclass(frozen=True)
class Chosen:
    batch: Batch | None = None
    commands: Sequence[Command] = ()
    waiting: str = ""


def choose(alive: list[UnitRow], step: int = 0, version: int = 0, **changes: Any) -> Chosen:
    counts = {key: changes.pop(key) for key in ("dropped", "failed") if key in changes}
    lost = changes.pop("lost", ())
    progress = RunProgress(policy=policy(version), next_step=changes.pop("next_step", step), alive=len(alive), **counts)
    judged = {"state": SubmissionState.ACCEPTED, "rewards": (0.0, 1.0)}
    filled = [row for row in alive if row.state == UnitState.ACCEPTED]
    rows = {f"{row.unit:064x}": submission(row.unit, version=row.version, **judged) for row in filled}
    now = moment(progress=progress, **changes)
    chosen, waiting = batches.choose(now, alive, step)
    if chosen is None:
        return Chosen(waiting=waiting)
    return Chosen(*batches.write_down(now, alive, chosen, batches.Sampled(rows, lost)))


class TestSynchronous:
    def test_a_full_step_is_written_down_in_order_of_unit(self) -> None:
        choice = choose([accepted(number) for number in (5, 2, 3, 7)])
        assert [group.unit for group in choice.batch.groups] == [2, 3, 5, 7]
        assert choice.batch.groups[0].rewards == (0.0, 1.0)
        assert choice.batch.written_at_ms == NOW_MS
        assert of_type(choice.commands, AddBatch) == [AddBatch(choice.batch)]
        after = units_in(choice.commands)
        assert {row.step for row in after.values()} == {0}
        assert {row.state for row in after.values()} == {UnitState.ACCEPTED}, "trained once the next version is out"
        (record,) = of_type(choice.commands, Record)
        assert (record.kind, record.body["units"]) == ("batch", [2, 3, 5, 7])
        assert record.body["digest"] == batches.batch_digest(choice.batch)

    def test_it_waits_for_a_lower_number_that_can_still_come_in(self) -> None:
        rows = [unit(0, UnitState.SUBMITTED), *(accepted(number) for number in (1, 2, 3, 4))]
        choice = choose(rows)
        assert choice.batch is None
        assert "lower-numbered" in choice.waiting

    def test_what_it_waits_for_in_words(self) -> None:
        rows = [accepted(0), unit(1, UnitState.LEASED), unit(2, UnitState.LEASED), unit(3, UnitState.SUBMITTED)]
        assert choose(rows).waiting == "step 0: 1 of 4 groups (2 leased, 1 submitted)"
        assert choose([]).waiting == "step 0: 0 of 4 groups (no unit is given out: no worker is asking)"


class TestAsynchronous:
    def test_only_groups_within_the_bound(self) -> None:
        rows = [accepted(0, version=1), *(accepted(number, version=2) for number in (1, 2, 3, 4))]
        choice = choose(rows, step=3, version=3, max_staleness=1)
        assert [group.unit for group in choice.batch.groups] == [1, 2, 3, 4]
        assert {group.policy.version for group in choice.batch.groups} == {2}

    def test_what_is_left_over_and_too_old_for_the_next_step_is_void(self) -> None:
        rows = [
            *(accepted(number, version=2) for number in range(6)), accepted(6, version=3), unit(7, UnitState.LEASED),
        ]  # fmt: skip
        choice = choose(rows, step=3, version=3, max_staleness=1)
        after = units_in(choice.commands).items()
        assert {n: row.reason for n, row in after if row.state == UnitState.VOID} == {4: "stale", 5: "stale"}

    def test_what_is_still_being_generated_or_checked_and_will_be_too_old_holds_no_place(self) -> None:
        rows = [*(accepted(number, version=3) for number in range(4)), unit(5, UnitState.LEASED)]
        rows += [
            unit(6, UnitState.LEASED), unit(7, UnitState.SUBMITTED, version=2), unit(8, UnitState.SUBMITTED, version=3),
        ]  # fmt: skip
        rows += [unit(9), accepted(4, version=3)]
        held = [lease(5, version=2), lease(6, version=3), lease(7, version=2, state=LeaseState.SUBMITTED)]
        now = moment(progress=RunProgress(policy=policy(3), next_step=3, alive=len(rows)), max_staleness=1)
        assert [row.unit for row in batches.too_old(now.rules, 4, rows, held)] == [5, 7]
        sampled = batches.Sampled({f"{number:064x}": submission(number, version=3) for number in range(4)})
        _, commands = batches.write_down(now, rows, rows[:4], sampled, held)
        voided = [row.unit for row in units_in(commands).values() if row.state == UnitState.VOID]
        assert voided == [5, 7]
        assert leases_in(commands) == {}, "the work was asked for: it is taken, judged and paid"


def test_the_digest_of_a_batch_is_about_its_groups_alone() -> None:
    rows = [accepted(number) for number in range(4)]
    without, with_lost = choose(rows).batch, choose(rows, lost=[submission(8, rewards=(1.0, 1.0))]).batch
    assert without.sampled_reward != with_lost.sampled_reward
    assert batches.batch_digest(without) == batches.batch_digest(with_lost)


def announce(new: Any, known: Any = None, standing: dict[str, Any] | None = None, **changes: Any) -> list[Any]:
    progress = RunProgress(**{"policy": policy(3), "next_step": 4, **changes})
    return batches.announce(moment(progress=progress), new, known, **(standing or {}))


class TestPolicies:
    def test_a_new_version_is_recorded_and_marks_its_batch_trained(self) -> None:
        rows = [accepted(0, step=2), accepted(1, step=3), accepted(2, step=4)]
        commands = announce(policy(4), standing={"batched": rows, "alive": [accepted(3)], "leases": [lease(5)]})
        assert of_type(commands, AddPolicy) == [AddPolicy(policy(4), NOW_MS)]
        assert of_type(commands, Record)[0].body == {"incarnation": 0, "version": 4, "digest": "d" * 64}
        trained = dict.fromkeys((0, 1), UnitState.TRAINED)
        assert {number: row.state for number, row in units_in(commands).items()} == trained
        assert leases_in(commands) == {}, "leases under the old version go on"

    @pytest.mark.parametrize(("new", "changes", "code"), [
        (policy(2), {}, "policy.order"), (policy(5), {}, "policy.order"),
        (policy(5, incarnation=1), {}, "policy.order"),
        (policy(4), {"policy": policy(3, incarnation=1)}, "policy.incarnation"),
    ])  # fmt: skip
    def test_versions_follow_batches_and_an_old_incarnation_is_over(self, new, changes, code):
        with pytest.raises(Refusal) as refusal:
            announce(new, **changes)
        assert refusal.value.code == code

    def test_a_new_incarnation_voids_what_is_in_no_batch(self) -> None:
        alive = [unit(0), unit(1, UnitState.LEASED), unit(2, UnitState.SUBMITTED), accepted(3)]
        standing = {"alive": alive, "leases": [lease(1)], "batched": [accepted(9, step=2), accepted(10, step=3)]}
        commands = announce(policy(3, incarnation=1), standing=standing)
        after = units_in(commands)
        assert {number: (after[number].state, after[number].reason) for number in range(4)} == dict.fromkeys(
            range(4), (UnitState.VOID, "incarnation")
        )
        assert leases_in(commands) == {"u1a0": LeaseState.VOID}
        assert after[9].state == UnitState.TRAINED
        assert 10 not in after, "a batch that is written down stays"
