"""Leases and submissions: who gets what, what ends it, and which answer a submission gets."""

from dataclasses import replace

import pytest

from kit.state import NOW_MS, Granted, grant, held, leases_in, moment, node, nodes_in, policy, rows_in, unit, units_in
from shoal.hub.state import Command, Refusal, leases, nodes, submissions
from shoal.hub.state.leases import Demand
from shoal.hub.state.pacing import Tempo
from shoal.hub.state.rows import Holding, LeaseRow, LeaseState, Moment, RunProgress, SubmissionRow, UnitState
from shoal.hub.state.submissions import Arrival
from shoal.protocol import NodeState


def ask(max_units: int = 1, held_leases: int = 0, **changes: object) -> Demand:
    return Demand(node=node(1, **changes), request="request-1", max_units=max_units, held=held_leases)


class TestGrant:
    def test_open_units_come_first_lowest_first_then_new_ones(self) -> None:
        now = moment(progress=RunProgress(policy=policy(), next_unit=6, alive=2))
        found = grant(now, [unit(5, attempt=2), unit(3)], ask(4, window=4))
        assert [row.lease for row in found.leases] == ["u3a0", "u5a2", "u6a0", "u7a0"]
        after = units_in(found.commands)
        assert {row.state for row in after.values()} == {UnitState.LEASED}
        assert (after[5].attempt, after[5].task) == (3, "task-5")
        assert after[6].task == "drawn-6"
        assert (found.leases[0].document, found.leases[0].deadline_ms) == ("signed u3a0", NOW_MS + 60_000)
        assert {row.hard_deadline_ms for row in found.leases} == {NOW_MS + 600_000}
        assert {row.granted for row in found.leases} == {4}

    def test_a_node_holds_only_so_many(self) -> None:
        now = moment()
        assert len(grant(now, [], ask(4, held_leases=1, window=2)).leases) == 1
        assert "holds 2 leases" in grant(now, [], ask(4, held_leases=2, window=2)).plan.waiting

    def test_a_slow_node_gets_what_it_can_have_back_in_time(self) -> None:
        progress = RunProgress(policy=policy(3), next_step=3)
        now = moment(progress=progress, groups_per_step=16, max_staleness=1, leases_per_node=64)
        slow = replace(ask(8, pace_ms=3_000), tempo=Tempo(10_000, NOW_MS))
        assert len(grant(now, [], slow).leases) == 5
        full = grant(now, [], replace(slow, held=5))
        assert full.leases == ()
        assert full.plan.waiting.startswith("a group takes this node 3.0 s and it holds 5")


class TestExpiry:
    def test_overdue_leases_end_and_their_units_are_open_again(self) -> None:
        commands = leases.end(moment(), [held(0, deadline_ms=NOW_MS)], {node(1).node: node(1)})
        assert leases_in(commands) == {"u0a0": LeaseState.EXPIRED}
        (after,) = units_in(commands).values()
        # No failure of the unit: whoever sits on leases cannot void work.
        assert (after.state, after.failures, after.task, after.attempt) == (UnitState.OPEN, 0, "task-0", 1)
        assert rows_in(commands, LeaseRow)[0].ended_at_ms == NOW_MS

    def test_each_node_pays_once_for_all_that_lapses_at_a_time(self) -> None:
        holdings = [held(0, who=2), held(1, who=1), held(2, who=2), held(3, who=2)]
        known = {row.node: row for row in (node(1, window=8), node(2, window=8))}
        after = {row.node: row for row in nodes_in(leases.end(moment(), holdings, known))}
        assert [(after[node(n).node].window, after[node(n).node].lapsed) for n in (1, 2)] == [(4, 1), (4, 3)]


class TestRenewal:
    def renewed(self, tokens: int, now_ms: int = NOW_MS + 50_000, **changes: object) -> list[LeaseRow]:
        row = held(0, hard_deadline_ms=NOW_MS + 100_000, **changes)
        return [save.row for save in leases.renew(moment(now_ms), [row.lease], {"u0a0": tokens})]

    def test_progress_gives_more_time_up_to_the_hard_deadline(self) -> None:
        (row,) = self.renewed(7)
        assert (row.progress, row.deadline_ms) == (7, NOW_MS + 100_000)
        (row,) = self.renewed(7, NOW_MS + 10_000)
        assert row.deadline_ms == NOW_MS + 70_000
        assert row.issued_at_ms == NOW_MS, "nothing else changes"

    def test_nobody_has_more_tokens_than_a_group_has(self) -> None:
        (row,) = self.renewed(10**9)
        assert row.progress == 2 * 16
        assert self.renewed(10**9 + 1, progress=2 * 16) == []


def test_what_its_node_no_longer_knows_ends_and_is_open_again() -> None:
    commands = leases.abandon(moment(), node(1), [held(0), held(1)], "request-2", {"u1a0"})
    assert leases_in(commands) == {"u0a0": LeaseState.EXPIRED}, "late work is still taken; a release refuses it"
    assert units_in(commands) == {0: unit(0, attempt=1)}
    assert [(row.window, row.lapses) for row in nodes_in(commands)] == [(1, 1)]


def test_a_release_is_no_failure_of_the_unit() -> None:
    commands = leases.release(moment(), node(1, window=8, lapses=7), [held(0), held(1)])
    assert leases_in(commands) == {"u0a0": LeaseState.RELEASED, "u1a0": LeaseState.RELEASED}
    assert units_in(commands)[0] == unit(0, attempt=1)
    (after,) = nodes_in(commands)
    assert (after.window, after.lapses, after.state) == (4, 7, NodeState.ACTIVE), "it halves, it never suspends"


ARRIVAL = Arrival(node=node(1).node, lease="u0a0", submission="a" * 64, size_bytes=12)


def receive(
    holding: Holding, existing: SubmissionRow | None = None, now: Moment | None = None
) -> tuple[int, list[Command]]:
    worker = node(1, lapses=3)
    status, row = submissions.receive(now or moment(), worker, holding, existing, ARRIVAL)
    if status == submissions.SAME_AGAIN:
        assert row is existing
        return status, []
    return status, submissions.received(worker, holding, replace(row, receipt="signed"), NOW_MS)


class TestReceive:
    def test_what_is_too_old_by_now_is_taken_and_fills_no_unit(self) -> None:
        overtaken = Holding(held(0).lease, unit(0, UnitState.VOID, attempt=1, reason="stale"))
        status, commands = receive(overtaken)
        assert (status, units_in(commands)) == (201, {})
        assert leases_in(commands) == {"u0a0": LeaseState.SUBMITTED}

    def test_its_lease_can_end_in_every_other_way_too(self) -> None:
        overtaken = Holding(held(0, deadline_ms=0).lease, unit(0, UnitState.VOID, attempt=1, reason="stale"))
        known = {node(1).node: node(1)}
        for commands in (
            leases.end(moment(), [overtaken], known),
            leases.release(moment(), node(1), [overtaken]),
            nodes.ban(node(1), "x", [overtaken], NOW_MS),
        ):
            assert (len(leases_in(commands)), units_in(commands)) == (1, {})

    def test_late_and_too_stale(self) -> None:
        expired = Holding(replace(held(0).lease, state=LeaseState.EXPIRED), unit(0))
        with pytest.raises(Refusal, match="too old to train on"):
            receive(expired, now=moment(progress=RunProgress(policy=policy(1), next_step=1)))


class TestPolicyOfTheWorker:
    """Version 5 is the newest, step 5 has no batch yet, and groups may be two versions old."""

    def grant(self, version: int | None, behind: bool, incarnation: int = 0, alive: int = 0) -> Granted:
        progress = RunProgress(policy=policy(5), next_step=5, alive=alive)
        now = moment(progress=progress, max_staleness=2)
        held = None if version is None else policy(version, incarnation)
        ask = Demand(node(1, passed=8), "request-1", max_units=8, held=0, policy=held, behind=behind)
        return grant(now, [], ask)

    def test_who_has_an_older_one_is_told_to_load_the_newest(self) -> None:
        found = self.grant(4, behind=False)
        assert (found.leases, found.plan.held_back) == ((), True)
        assert found.plan.waiting == "policy 0.4 is not the newest: load policy 0.5, then ask again"

    def test_who_cannot_have_the_newest_soon_gets_leases_for_its_own(self) -> None:
        granted = self.grant(4, behind=True).leases
        assert {(row.version, row.digest) for row in granted} == {(4, "d" * 64)}

    @pytest.mark.parametrize(("version", "incarnation", "alive", "units"), [
        (3, 0, 3, 1),  # groups by version 3 may be trained in step 5 only: 4 groups, of which 3 are alive
        (5, 0, 3, 2),  # its window, though there is room for 9
        (2, 0, 0, 0), (6, 0, 0, 0), (4, 1, 0, 0),  # could not be trained on
    ])  # fmt: skip
    def test_room_is_that_of_the_older_policy(self, version: int, incarnation: int, alive: int, units: int) -> None:
        assert len(self.grant(version, True, incarnation, alive).leases) == units
