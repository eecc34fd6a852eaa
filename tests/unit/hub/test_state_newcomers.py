"""Newcomers together get a bounded share of units and audits, and at least that of audits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from statekit import moment, node, policy, submission, unit

from shoal.hub.state import leases, newcomers
from shoal.hub.state.leases import Ask, Draws, Grant
from shoal.hub.state.newcomers import Crowd, Queue
from shoal.hub.state.rows import Progress

DRAWS = Draws(task_of=str, document=lambda row, _unit: row.lease)
HERE = Crowd(established=True)


def grant(crowd: Crowd, max_units: int = 8, passed: int = 0, **changes: Any) -> Grant:
    """16 units may be alive, of which 2 are open; newcomers get a quarter."""
    progress = Progress(policy=policy(), next_unit=4, alive=2)
    now = moment(progress=progress, groups_per_step=16, leases_per_node=64, **changes)
    ask = Ask(node=node(1, passed=passed), request="request-1", max_units=max_units, held=0, crowd=crowd)
    return leases.grant(now, [unit(0, attempt=1), unit(1, attempt=2)], ask, DRAWS)


class TestLeases:
    def test_newcomers_together_hold_their_share_while_established_nodes_are_here(self) -> None:
        assert len(grant(HERE).leases) == 4
        assert len(grant(replace(HERE, in_hand=3)).leases) == 1
        none = grant(replace(HERE, in_hand=4))
        assert (none.leases, none.commands) == ((), ())
        assert none.waiting.startswith("nodes on probation have 4 units in hand, and may have 4 together")
        assert "probation ends after 8" in none.waiting

    @pytest.mark.parametrize(
        ("crowd", "changes"),
        [
            (Crowd(in_hand=99), {}),
            (replace(HERE, in_hand=99, asking=True), {"passed": 8}),
            (replace(HERE, in_hand=99, asking=True), {"newcomer_share": 1.0}),
        ],
        ids=["nobody else is here", "an established node", "no share"],
    )
    def test_otherwise_there_is_no_bound(self, crowd: Crowd, changes: dict[str, Any]) -> None:
        assert [row.unit for row in grant(crowd, **changes).leases] == [0, 1, 4, 5, 6, 7, 8, 9]

    def test_a_small_share_is_one_and_none_is_none(self) -> None:
        assert len(grant(HERE, newcomer_share=0.01).leases) == 1
        assert grant(HERE, newcomer_share=0.0).leases == ()
        assert len(grant(Crowd(), newcomer_share=0.0).leases) == 8, "who else should do it"

    def test_units_that_were_tried_before_are_left_to_established_nodes_that_ask(self) -> None:
        assert [row.unit for row in grant(replace(HERE, asking=True)).leases] == [4, 5, 6, 7]
        assert [row.unit for row in grant(HERE).leases] == [0, 1, 4, 5], "nobody asks: a newcomer is better than none"


def queue(established: int, fresh: int, owed: float = 0.0) -> Queue:
    """Newcomers have the lowest units."""
    low = [submission(number, who=2) for number in range(fresh)]
    return Queue([submission(number) for number in range(fresh, fresh + established)], low, owed)


class TestAudits:
    @pytest.mark.parametrize(
        ("established", "fresh", "expected"),
        [(100, 100, 2), (100, 1, 1), (3, 100, 5), (0, 100, 8), (100, 0, 0), (2, 3, 3)],
    )
    def test_newcomers_get_their_share_and_what_others_leave(self, established: int, fresh: int, expected: int) -> None:
        chosen, _ = newcomers.choose(queue(established, fresh), 8, 0.25)
        assert sum(row.node == node(2).node for row in chosen) == expected
        assert len(chosen) == min(8, established + fresh)

    def test_each_side_lowest_unit_first(self) -> None:
        chosen, _ = newcomers.choose(queue(10, 10), 8, 0.25)
        assert sorted(row.unit for row in chosen) == [0, 1, 10, 11, 12, 13, 14, 15]

    def test_a_validator_that_takes_one_at_a_time_takes_every_fourth_from_newcomers(self) -> None:
        owed, taken = 0.0, []
        for _ in range(12):
            (row,), owed = newcomers.choose(queue(50, 50, owed), 1, 0.25)
            taken.append(row.node == node(2).node)
        assert taken == [False, False, False, True] * 3

    @given(
        share=st.floats(0.01, 0.99),
        claims=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20)), max_size=40),
    )
    def test_nobody_starves_and_no_audit_is_wasted(self, share: float, claims: list[tuple[int, int, int]]) -> None:
        owed, promised, given_to_them = 0.0, 0.0, 0
        for count, established, fresh in claims:
            chosen, owed = newcomers.choose(queue(established, fresh, owed), count, share)
            taken = sum(row.node == node(2).node for row in chosen)
            assert len(chosen) == len({row.unit for row in chosen}) == min(count, established + fresh)
            if established >= count and fresh >= count:  # both could use all of it
                promised, given_to_them = promised + share * count, given_to_them + taken
                assert taken <= share * count + owed + 1 + 1e-6
            else:
                promised, given_to_them, owed = 0.0, 0, 0.0
            assert given_to_them <= promised + 1 + 1e-6
            assert given_to_them >= promised - 1 - 1e-6
