"""Windows, sanctions and pace: what a node may hold, what lapsing costs it, and how a suspension ends."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kit.state import NOW_MS, lease, moment, node, nodes_in, policy, rules, unit
from shoal.hub.state import nodes, pacing
from shoal.hub.state.draws import task_index, unit_seeds
from shoal.hub.state.pacing import Tempo
from shoal.hub.state.rows import IllegalMove, NodeRow, RunProgress, UnitRow, UnitState
from shoal.protocol import NodeState

RULES = rules(leases_per_node=64)


def lapse(row: NodeRow, count: int = 1, now_ms: int = NOW_MS) -> NodeRow:
    (after,) = nodes_in(nodes.lapse(RULES, row, count, now_ms))
    return after


class TestWindow:
    def test_it_begins_with_a_quarter_and_widens_by_one(self) -> None:
        row = node(1)
        assert (nodes.window(RULES, row), nodes.window(rules(leases_per_node=3), row)) == (16, 1)
        for _ in range(100):
            row = nodes.widened(RULES, row)
        assert nodes.window(RULES, row) == 64

    def test_who_takes_and_never_delivers_ends_with_one_and_suspended(self) -> None:
        row, held_at_a_time = node(1), []
        for _ in range(10):
            if row.state is NodeState.ACTIVE:
                held_at_a_time.append(nodes.window(RULES, row))
                row = lapse(row, nodes.window(RULES, row))
        assert held_at_a_time == [16, 8, 4, 2]
        assert (row.window, row.state, row.lapsed) == (1, NodeState.SUSPENDED, 30)
        assert row.reason == "leases.lapsed: 30 leases in a row came to nothing"

    def test_afterwards_each_further_lease_costs_it_twice_the_time(self) -> None:
        row, waits = node(1, window=1, lapses=7), []
        for _ in range(4):
            row = lapse(row)
            assert row.until_ms is not None
            waits.append((row.until_ms - NOW_MS) // 60_000)
            row, _ = nodes.lift(replace(row, until_ms=NOW_MS), NOW_MS)
        assert waits == [1, 2, 4, 8]

    def test_taking_and_giving_back_for_ever_ends_in_a_suspension(self) -> None:
        row = node(1, window=1)
        for _ in range(nodes.LAPSES_TO_SUSPEND):
            (row,) = nodes_in(nodes.give_back(rules(), row, 1, NOW_MS))
        assert (row.state, row.lapsed) == (NodeState.SUSPENDED, nodes.LAPSES_TO_SUSPEND)


def test_pace_is_the_time_of_one_group_of_those_that_came_together() -> None:
    together = lease(0, granted=4)
    row = nodes.delivered(node(1), together, NOW_MS + 20_000)
    assert row.pace_ms == 5_000
    row = nodes.delivered(row, lease(1), NOW_MS + 9_000)
    assert row.pace_ms == (3 * 5_000 + 9_000) // 4


class TestSanctions:
    def test_the_owner_says_how_long_and_never_shortens_by_accident(self) -> None:
        (row,) = nodes_in(nodes.suspend(node(1), "x", NOW_MS, for_ms=5_000))
        assert row.until_ms == NOW_MS + 5_000
        (again,) = nodes_in(nodes.suspend(row, "y", NOW_MS, for_ms=1_000))
        assert (again.until_ms, again.suspensions, again.reason) == (NOW_MS + 5_000, 2, "y")

    @pytest.mark.parametrize("state", [NodeState.SUSPENDED, NodeState.BANNED])
    def test_a_pardon_makes_it_a_newcomer(self, state: NodeState) -> None:
        row = node(1, state=state, certain=1, statistical=1, passed=50, streak=50, lapses=9, soft=5, suspensions=7)
        (after,) = nodes_in(nodes.pardon(replace(row, until_ms=5), "a mistake", NOW_MS))
        assert (after.state, after.strikes, after.on_probation) == (NodeState.ACTIVE, 0, True)
        assert (after.streak, after.lapses, after.soft, after.suspensions, after.until_ms) == (0, 0, 0, 0, None)
        assert nodes.pardon(after, "again", NOW_MS) == [], "twice is harmless"


class TestLeaseSize:
    """Steps take 10 s; policy 3 may be trained on in steps 3 and 4."""

    def size(self, pace_ms: int, *, since_ms: int = 0, held_leases: int = 0, step: int = 3, staleness: int = 1) -> int:
        progress = RunProgress(policy=policy(3), next_step=step)
        now = moment(progress=progress, max_staleness=staleness)
        return pacing.lease_size(now, Tempo(10_000, NOW_MS - since_ms), pace_ms, held_leases, 8)

    @pytest.mark.parametrize(("pace_ms", "changes", "expected"), [
        (1_000, {}, 8),
        (3_000, {}, 5),  # 20 s are left, 15 of them are sure
        (3_000, {"step": 4}, 2),  # only one step is left
        (3_000, {"since_ms": 6_000}, 3),  # and part of one is over
        (60_000, {}, 1),  # the slowest gets one
        (3_000, {"held_leases": 4}, 1), (3_000, {"held_leases": 5}, 0),
        (500, {"step": 4, "since_ms": 100_000}, 3),  # a step that is overdue still has a quarter
        (0, {}, 8), (50_000, {"staleness": 0}, 8),
        (100_000, {"staleness": 0}, 4),  # the hard deadline: 600 s, of which 450 are sure
        (1_000_000, {"staleness": 0}, 1),
    ])  # fmt: skip
    def test_a_node_gets_what_it_can_return_in_time(self, pace_ms: int, changes: dict[str, int], expected: int) -> None:
        assert self.size(pace_ms, **changes) == expected

    @given(
        pace_ms=st.integers(0, 10**6), since_ms=st.integers(0, 10**6), held_leases=st.integers(0, 64),
        step=st.integers(3, 5), staleness=st.integers(0, 4),
    )  # fmt: skip
    def test_whoever_holds_nothing_gets_something(self, pace_ms, since_ms, held_leases, step, staleness):
        found = self.size(pace_ms, since_ms=since_ms, held_leases=held_leases, step=step, staleness=staleness)
        assert int(held_leases == 0) <= found <= 8


def test_rows_move_by_the_tables_and_no_other_way() -> None:
    for source, target in product(UnitState, UnitState):
        row = unit(3, source)
        if target in UnitRow.MOVES.get(source, ()):
            assert row.to(target).state == target
        else:
            with pytest.raises(IllegalMove, match=f"3 cannot go from {source.value} to {target.value}"):
                row.to(target)


class TestDraws:
    def test_seeds_are_64_bits_of_an_hmac_and_depend_on_everything(self) -> None:
        seeds = unit_seeds(b"secret", "run", 7, 3)
        assert [len(seed) for seed in seeds] == [16, 16, 16]
        assert seeds == unit_seeds(b"secret", "run", 7, 3)
        others = [
            unit_seeds(b"Secret", "run", 7, 1), unit_seeds(b"secret", "nur", 7, 1), unit_seeds(b"secret", "run", 8, 1),
        ]  # fmt: skip
        assert len({*seeds, *(other[0] for other in others)}) == 6
        assert unit_seeds(b"secret", "run", 1, 23)[2] != unit_seeds(b"secret", "run", 12, 3)[2]

    def test_epochs_and_seeds_have_other_orders(self) -> None:
        orders = {
            tuple(task_index(50, seed, epoch * 50 + position) for position in range(50))
            for seed, epoch in product(range(3), range(3))
        }
        assert len(orders) == 9
        assert tuple(range(50)) not in orders


class TestPacing:
    @pytest.mark.parametrize(("staleness", "version", "next_step", "expected"), [
        (0, 0, 0, 4),  # synchronous: one step's groups
        (0, 0, 1, 0),  # its batch is written: wait for the next version
        (1, 0, 0, 8),  # one step ahead
        (1, 3, 4, 4),  # batch 3 is written: groups of version 3 may still serve step 4
        (2, 3, 3, 12),
        (1, 3, 5, 0),  # version 3 is too old for step 5
        (1, 9, 9, 4),  # the last step has nothing after it
        (5, 8, 8, 8),
        (1, 10, 10, 0),  # finished
    ])  # fmt: skip
    def test_how_many_may_be_alive(self, staleness: int, version: int, next_step: int, expected: int) -> None:
        progress = RunProgress(policy=policy(version), next_step=next_step)
        assert pacing.cap(rules(max_staleness=staleness), progress) == expected

    def test_losses_are_refilled_up_to_the_cap_and_lower_the_target_beyond(self) -> None:
        seen = []
        for lost in (0, 8, 9, 12, 13):
            progress = RunProgress(policy=policy(), dropped=lost - 2 if lost > 2 else lost, failed=2 if lost > 2 else 0)
            seen.append((pacing.cap(rules(), progress), pacing.wanted_groups(rules(), progress)))
        assert seen == [(4, 4), (4, 4), (3, 3), (0, 0), (0, 0)]
