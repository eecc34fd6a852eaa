"""State machines, draws and pacing: tables, permutations and counts."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from enum import StrEnum
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.state import NOW_MS, lease, node, policy, rules, submission, unit
from shoal.errors import EnvironmentSetupError
from shoal.hub.state import pacing
from shoal.hub.state.draws import permute, task_index, unit_seeds
from shoal.hub.state.machines import (
    LEASE_MOVES,
    NODE_MOVES,
    SUBMISSION_MOVES,
    UNIT_MOVES,
    IllegalMove,
    LeaseState,
    SubmissionState,
    UnitState,
)
from shoal.hub.state.rows import Progress
from shoal.protocol import NodeState


class TestMachines:
    @pytest.mark.parametrize("moves", [UNIT_MOVES, LEASE_MOVES, SUBMISSION_MOVES, NODE_MOVES])
    def test_every_state_is_in_its_table_and_no_state_moves_to_itself(
        self, moves: Mapping[StrEnum, set[StrEnum]]
    ) -> None:
        states = set(type(next(iter(moves))))
        assert set(moves) == states
        for source, targets in moves.items():
            assert targets <= states - {source}

    def test_rows_move_by_the_tables_and_no_other_way(self) -> None:
        for source, target in product(UnitState, UnitState):
            row = unit(3, source)
            if target in UNIT_MOVES[source]:
                assert row.to(target).state == target
            else:
                with pytest.raises(IllegalMove, match=f"unit 3 cannot go from {source.value} to {target.value}"):
                    row.to(target)

    def test_finished_things_stay_finished(self) -> None:
        for state in (UnitState.DROPPED, UnitState.TRAINED, UnitState.VOID):
            assert UNIT_MOVES[state] == set()
        with pytest.raises(IllegalMove):
            lease(0, state=LeaseState.SUBMITTED).to(LeaseState.ACTIVE, NOW_MS)
        with pytest.raises(IllegalMove):
            submission(0, state=SubmissionState.REJECTED).to(SubmissionState.ACCEPTED)
        with pytest.raises(IllegalMove):
            node(1, state=NodeState.BANNED).to(NodeState.SUSPENDED)

    def test_alive_means_that_it_may_still_be_trained_on(self) -> None:
        alive = [state for state in UnitState if unit(0, state).alive]
        assert alive == [UnitState.OPEN, UnitState.LEASED, UnitState.SUBMITTED, UnitState.ACCEPTED]
        assert not unit(0, UnitState.ACCEPTED, step=4).alive, "in a batch it no longer counts"


class TestDraws:
    def test_seeds_are_64_bits_of_an_hmac_and_depend_on_everything(self) -> None:
        seeds = unit_seeds(b"secret", "run", 7, 3)
        assert [len(seed) for seed in seeds] == [16, 16, 16]
        assert seeds == unit_seeds(b"secret", "run", 7, 3)
        others = [
            unit_seeds(b"Secret", "run", 7, 1),
            unit_seeds(b"secret", "nur", 7, 1),
            unit_seeds(b"secret", "run", 8, 1),
        ]
        assert len({*seeds, *(other[0] for other in others)}) == 6
        assert unit_seeds(b"secret", "run", 1, 23)[2] != unit_seeds(b"secret", "run", 12, 3)[2]

    def test_a_seed_is_what_was_published(self) -> None:
        expected = hmac.new(b"secret", b"shoal/seed/v1\nrun\n7\n1", hashlib.sha256).hexdigest()[:16]
        assert unit_seeds(b"secret", "run", 7, 2)[1] == expected

    @settings(max_examples=30, deadline=None)
    @given(size=st.integers(1, 300), key=st.text(max_size=8))
    def test_a_permutation_hits_everything_once(self, size: int, key: str) -> None:
        assert sorted(permute(position, size, key) for position in range(size)) == list(range(size))

    @settings(max_examples=30, deadline=None)
    @given(count=st.integers(2, 60), seed=st.integers(0, 5), epoch=st.integers(0, 4))
    def test_every_task_occurs_once_per_epoch(self, count: int, seed: int, epoch: int) -> None:
        units = range(epoch * count, (epoch + 1) * count)
        assert sorted(task_index(count, seed, number) for number in units) == list(range(count))

    def test_epochs_and_seeds_have_other_orders(self) -> None:
        orders = {
            tuple(task_index(50, seed, epoch * 50 + position) for position in range(50))
            for seed, epoch in product(range(3), range(3))
        }
        assert len(orders) == 9
        assert tuple(range(50)) not in orders

    def test_a_huge_data_set_is_not_listed(self) -> None:
        assert 0 <= task_index(10**12, 0, 10**12 + 5) < 10**12

    def test_no_tasks_is_an_error(self) -> None:
        with pytest.raises(EnvironmentSetupError, match="no tasks"):
            task_index(0, 0, 0)


class TestPacing:
    @pytest.mark.parametrize(
        ("staleness", "version", "next_step", "expected"),
        [
            (0, 0, 0, 4),  # synchronous: one step's groups
            (0, 0, 1, 0),  # its batch is written: wait for the next version
            (1, 0, 0, 8),  # one step ahead
            (1, 3, 4, 4),  # batch 3 is written: groups of version 3 may still serve step 4
            (2, 3, 3, 12),
            (1, 3, 5, 0),  # version 3 is too old for step 5
            (1, 9, 9, 4),  # the last step has nothing after it
            (5, 8, 8, 8),
            (1, 10, 10, 0),  # finished
        ],
    )
    def test_how_many_may_be_alive(self, staleness: int, version: int, next_step: int, expected: int) -> None:
        progress = Progress(policy=policy(version), next_step=next_step)
        assert pacing.cap(rules(max_staleness=staleness), progress) == expected

    def test_nothing_before_the_first_policy(self) -> None:
        assert pacing.cap(rules(), Progress()) == 0
        assert not pacing.is_finished(rules(), Progress())

    def test_losses_are_refilled_up_to_the_cap_and_lower_the_target_beyond(self) -> None:
        seen = []
        for lost in (0, 8, 9, 12, 13):
            progress = Progress(policy=policy(), dropped=lost - 2 if lost > 2 else lost, failed=2 if lost > 2 else 0)
            seen.append((pacing.cap(rules(), progress), pacing.wanted_groups(rules(), progress)))
        assert seen == [(4, 4), (4, 4), (3, 3), (0, 0), (0, 0)]

    def test_room_is_what_the_cap_leaves(self) -> None:
        assert pacing.room(rules(), Progress(policy=policy(), alive=3)) == 1
        assert pacing.room(rules(), Progress(policy=policy(), alive=9)) == 0

    def test_staleness(self) -> None:
        assert not pacing.is_stale(rules(max_staleness=1), step=4, version=3)
        assert pacing.is_stale(rules(max_staleness=1), step=5, version=3)
