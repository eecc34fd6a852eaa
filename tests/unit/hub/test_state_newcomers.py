"""Newcomers together get a bounded share of units and audits, and at least that of audits."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kit.state import Granted, grant, moment, node, policy, submission, unit
from shoal.hub.service.turns import Place, Turns
from shoal.hub.state import newcomers
from shoal.hub.state.leases import Demand
from shoal.hub.state.newcomers import Crowd
from shoal.hub.state.rows import InHand, RunProgress

HERE = Crowd(established=True)
HOME = "192.0.2.0/24"


def hands(units: int = 0, own: int = 0, unproven: int = 0, network: str = "") -> InHand:
    return InHand(own, {network: units}, {network: unproven})


def granted(crowd: Crowd, max_units: int = 8, passed: int = 1, **changes: Any) -> Granted:
    """16 units may be alive, of which 2 are open; newcomers get a quarter."""
    progress = RunProgress(policy=policy(), next_unit=4, alive=2)
    now = moment(progress=progress, groups_per_step=16, leases_per_node=64, **changes)
    ask = Demand(node=node(1, passed=passed), request="request-1", max_units=max_units, held=0, crowd=crowd)
    return grant(now, [unit(0, attempt=1), unit(1, attempt=2)], ask)


def declined(found: Granted) -> tuple[bool, str, bool]:
    assert found.leases == ()
    return found.plan.held_back, found.plan.short, found.plan.deferred


@pytest.mark.parametrize(("units", "unproven", "fresh", "share", "tight"), [
    (833, 0, 8, 0.25, False), (833, 0, 7, 0.25, True), (832, 0, 7, 0.25, False), (0, 320, 0, 0.25, False),
    (0, 321, 0, 0.25, True), (0, 321, 0, 1.0, False),
])  # fmt: skip
def test_bounds_near_enough_to_need_a_lock(units: int, unproven: int, fresh: int, share: float, tight: bool) -> None:
    """4,096 units may be alive: newcomers get 1,024, a network's new keys 512; the lock begins 192 before these."""
    now = moment(groups_per_step=4096, newcomer_share=share)
    crowd = Crowd(InHand(0, {"n": units}, {"n": unproven}), established=True)
    assert newcomers.is_tight(now, node(1, passed=fresh, network="n"), crowd) is tight


class TestLeases:
    def test_newcomers_together_hold_their_share_while_established_nodes_are_here(self) -> None:
        assert (len(granted(HERE).leases), len(granted(replace(HERE, in_hand=hands(3))).leases)) == (4, 1)
        none = granted(replace(HERE, in_hand=hands(4)))
        assert (none.leases, none.commands) == ((), ())
        assert none.plan.waiting.startswith("nodes on probation have 4 units in hand, and may have 4")

    @pytest.mark.parametrize(("crowd", "changes"), [
        (Crowd(in_hand=hands(99)), {}), (replace(HERE, in_hand=hands(99), asking=True), {"passed": 8}),
        (replace(HERE, in_hand=hands(99, 1, 9), asking=True), {"newcomer_share": 1.0, "passed": 0}),
    ], ids=["nobody else is here", "an established node", "no share"])  # fmt: skip
    def test_otherwise_there_is_no_bound(self, crowd: Crowd, changes: dict[str, Any]) -> None:
        assert [row.unit for row in granted(crowd, **changes).leases] == [0, 1, 4, 5, 6, 7, 8, 9]


AWAY = "198.51.100.0/24"
FLOOD_8, THREE = {AWAY: 8}, {"a": 2, "b": 2, "c": 2}


class TestFirstUnits:
    """16 units may be alive; newcomers may have 4 of them in hand while established nodes are here."""

    def grant(
        self, in_hand: InHand = InHand(), *, network: str = HOME, here: bool = True, groups: int = 16, lapses: int = 0,
        units: int = 8, **crowd: int,
    ) -> Granted:  # fmt: skip
        now = moment(progress=RunProgress(policy=policy()), groups_per_step=groups)
        asker = node(1, passed=0, network=network, lapses=lapses)
        return grant(now, [], Demand(asker, "request-1", units, 0, crowd=Crowd(in_hand, established=here, **crowd)))

    @pytest.mark.parametrize(
        ("in_hand", "changes", "units"),
        [
            pytest.param(hands(), {}, 1, id="a new key"),
            pytest.param(hands(), {"here": False}, 1, id="a new key, nobody else here"),
            pytest.param(hands(1, 0, 1, HOME), {}, 1, id="its network has one of two"),
            pytest.param(hands(2, 0, 2, AWAY), {}, 1, id="another network has two"),
            pytest.param(hands(3, 0, 3), {"network": ""}, 1, id="this machine's own processes are no flood"),
            pytest.param(InHand(0, FLOOD_8, FLOOD_8), {}, 1, id="another network counts for half"),
            pytest.param(InHand(0, FLOOD_8 | {HOME: 1}, FLOOD_8), {}, 1, id="and leaves room for two"),
            pytest.param(InHand(0, FLOOD_8, FLOOD_8), {"taken": 1}, 0, id="not for an address that wastes units"),
            pytest.param(InHand(0, THREE, THREE, THREE), {}, 1, id="long ones of others count for half together"),
            pytest.param(InHand(0, THREE, THREE), {}, 0, id="short ones of others end soon"),
            pytest.param(InHand(0, *[{HOME: 4}] * 3), {}, 1, id="long ones of its network, from a young run"),
            pytest.param(InHand(0, *[{HOME: 4}] * 2), {}, 0, id="short ones of its network end soon"),
            # of 32 units a network's new keys may have 4: after two without an accepted group that is one
            pytest.param(hands(3, 0, 3, HOME), {"groups": 32, "taken": 1}, 1, id="an address that took one of four"),
            pytest.param(hands(0, 0, 0, HOME), {"groups": 32, "taken": 2}, 1, id="one that took half of them"),
            pytest.param(hands(1, 0, 1, HOME), {"groups": 32, "taken": 2}, 0, id="the same with one in hand"),
            pytest.param(hands(0, 0, 0, HOME), {"groups": 32, "taken": 9}, 1, id="one that took very many"),
        ],
    )
    def test_how_many_units_a_new_key_gets(self, in_hand: InHand, changes: dict[str, Any], units: int) -> None:
        assert len(self.grant(in_hand, **changes).leases) == units

    @pytest.mark.parametrize(("in_hand", "changes", "short", "why"), [
        (hands(1, 1, 1, HOME), {}, "", "one unit in hand, the most that it may have until its first group"),
        (hands(1, 1, 1, HOME), {"here": False}, "", "one unit in hand, the most that it may have until its first"),
        (hands(2, 0, 2, HOME), {}, "inside", "other new keys of this network have 2 units in hand"),
        (InHand(0, FLOOD_8 | {HOME: 2}, FLOOD_8), {}, "everywhere", "have 4 units in hand, and may have 4"),
        (InHand(0, *[{"a": 2, "b": 2}] * 3), {"groups": 32, "lapses": 1}, "everywhere", "last lease came to noth"),
    ])  # fmt: skip
    def test_a_new_key_that_gets_none_is_told_why(self, in_hand, changes, short, why):
        found = self.grant(in_hand, **changes)
        assert declined(found) == (True, short, False)
        assert why in found.plan.waiting

    @pytest.mark.parametrize(("long", "network", "hard_s"), [
        ({}, HOME, 240), ({HOME: 1}, HOME, 240), ({HOME: 2}, HOME, 60), ({HOME: 3}, HOME, 60),
        ({"a": 2, "b": 1}, HOME, 240), ({"a": 2, "b": 2}, HOME, 60),
        ({"a": 4, "b": 1}, HOME, 240),  # more than two of one network are from another time
        ({"a": 2, "b": 2}, "", 240),  # this machine's own processes are no flood
    ])  # fmt: skip
    def test_half_of_what_new_keys_may_have_is_lent_for_lease_s_only(self, long, network, hard_s):
        """Of 8 for newcomers a network may have 4, of these 2 for longer, and all networks together 4."""
        (row,) = self.grant(InHand(0, long, long, long), network=network, groups=32, units=1).leases
        assert row.hard_deadline_ms - row.issued_at_ms == hard_s * 1000
        assert row.brief == (row.deadline_ms - row.issued_at_ms == 60_000)

    def test_in_its_network_a_node_leaves_a_place_to_each_that_is_before_it(self) -> None:
        """Of 4 places for the new keys of a network two are left, and one other is before this node."""
        two_left = hands(2, 0, 2, HOME)
        assert len(self.grant(two_left, groups=32, ahead_inside=1).leases) == 1
        found = self.grant(two_left, groups=32, ahead_inside=2)
        assert declined(found) == (True, "inside", True)
        assert found.plan.waiting == "other newcomers of this network are first: they had fewer units"
        full = self.grant(hands(4, 0, 4, HOME), groups=32)
        assert full.plan.short == "inside", "its own network lacks a place"

    def test_who_had_more_turns_yields_to_other_networks(self) -> None:
        """16 units may be alive."""

        def with_alive(alive: int, ahead: int) -> Granted:
            now = moment(progress=RunProgress(policy=policy(), alive=alive), groups_per_step=16)
            return grant(now, [], Demand(node(1), "request-1", 8, 0, crowd=Crowd(ahead=ahead)))

        found = with_alive(alive=14, ahead=2)
        assert declined(found) == (True, "everywhere", True)
        assert found.plan.waiting == "newcomers of other networks are first: they had fewer units"
        assert len(with_alive(alive=13, ahead=2).leases) == 1, "one for each of them, and one more"
        assert not with_alive(alive=16, ahead=2).plan.deferred, "there is nothing to leave to others"

    @pytest.mark.parametrize(("tokens", "passed", "pace_ms", "expected_ms"), [
        (127, 0, 0, 240_000), (128, 0, 0, 60_000), (16, 1, 20_000, 60_000), (16, 1, 180_000, 360_000),
        (16, 1, 400_000, 600_000), (256, 0, 100_000, 200_000), (256, 0, 180_000, 240_000), (16, 8, 180_000, 360_000),
    ])  # fmt: skip
    def test_a_slow_machine_that_can_show_nothing_in_lease_s_has_longer(self, tokens, passed, pace_ms, expected_ms):
        now = moment(progress=RunProgress(policy=policy()), max_new_tokens=tokens)
        ask = Demand(node(1, passed=passed, pace_ms=pace_ms), "request-1", 1, 0)
        (row,) = grant(now, [], ask).leases
        assert row.deadline_ms - now.now_ms == expected_ms

    @pytest.mark.parametrize(("lapses", "expected_ms"), [(1, 240_000), (2, 60_000)])
    def test_who_let_two_leases_lapse_in_a_row_has_lease_s_again(self, lapses: int, expected_ms: int) -> None:
        now = moment(progress=RunProgress(policy=policy()))
        (row,) = grant(now, [], Demand(node(1, passed=0, lapses=lapses), "request-1", 1, 0)).leases
        assert row.deadline_ms - now.now_ms == expected_ms


def at(network: str, address: str = "", node: str = "") -> Place:
    return Place(network, address, node)


FLOOD, HONEST = at("flood"), at("honest")


class Scene(Turns):
    """Turns of which tests look at one moment after the other: who asks for units, and how many wait before whom."""

    def __init__(self, *asked: tuple[Place, int]) -> None:
        super().__init__()
        for now_ms, (place, units) in enumerate(asked):
            self.asked(place, units, now_ms)

    def before(self, place: Place, now_ms: int = 9) -> tuple[int, int]:
        return self.ahead(place, now_ms, 60_000)


class TestTurns:
    def test_a_network_that_had_more_units_lets_one_that_waits_go_first(self) -> None:
        turns = Scene((FLOOD, 2))
        assert turns.before(FLOOD) == (0, 0), "nobody waits"
        turns.asked(HONEST, 0, now_ms=1)
        assert [turns.before(each) for each in (FLOOD, HONEST, at("stranger"))] == [(1, 0), (0, 0), (0, 0)]

    def test_an_accepted_group_makes_a_network_first_again_and_keeps_a_place_for_it(self) -> None:
        turns = Scene((FLOOD, 1), (HONEST, 5), (FLOOD, 0))
        assert turns.before(HONEST) == (1, 0)
        turns.earned("honest", "", now_ms=2)
        assert turns.before(HONEST) == (0, 0)
        assert turns.before(FLOOD) == (1, 0), "before the other has asked again"
        assert turns.before(at("stranger")) == (1, 0), "who has had nothing yet may never deliver"
        assert turns.before(FLOOD, 10_003) == (0, 0), "it did not ask again"

    def test_it_lets_one_that_takes_nothing_go_first_for_lease_s_at_most(self) -> None:
        turns = Scene((HONEST, 1))
        for now_ms in range(1_000, 61_000, 5_000):
            turns.asked(at("idle"), 0, now_ms)
            assert turns.before(HONEST, now_ms) == (1, 0)
            turns.asked(HONEST, 0, now_ms, deferred=True)
        turns.asked(at("idle"), 0, now_ms=61_000)
        assert turns.before(HONEST, 61_000) == (0, 0)
        turns.asked(HONEST, 1, now_ms=61_000)
        assert turns.before(HONEST, 61_001) == (1, 0), "its next turn"

    def test_what_it_left_and_another_took_does_not_count_for_the_next_time(self) -> None:
        turns = Scene((FLOOD, 3), (HONEST, 0))
        turns.asked(FLOOD, 0, now_ms=2, deferred=True)
        turns.asked(HONEST, 1, now_ms=3)
        turns.asked(HONEST, 0, now_ms=70_000)
        assert turns.before(FLOOD, 70_001) == (1, 0)

    def test_inside_a_network_an_address_that_had_more_units_waits_however_many_keys_it_has(self) -> None:
        turns = Scene(*((at("net", "flooding", key), 1) for key in "abc"))
        turns.asked(at("net", "honest", "d"), 0, now_ms=3, only_inside=True)
        for key in ("a", "a fresh key"):
            assert turns.before(at("net", "flooding", key)) == (0, 1)
        assert turns.before(at("net", "honest", "d")) == (0, 0)
        assert turns.before(at("other", "flooding", "a")) == (0, 0), "of another network"

    def test_at_an_address_a_key_that_had_more_units_waits(self) -> None:
        turns = Scene((at("net", "router", "sits"), 2), (at("net", "router", "new"), 0))
        assert [turns.before(at("net", "router", key)) for key in ("sits", "new")] == [(0, 1), (0, 0)]

    def test_an_accepted_group_clears_its_own_key_and_address_only(self) -> None:
        sits, works, other = (at("net", *place) for place in (("one", "sits"), ("one", "works"), ("two", "sits too")))
        turns = Scene((sits, 1), (works, 1), (other, 1))
        assert [turns.taken(at("net", address)) for address in ("one", "two", "three")] == [2, 1, 0]
        turns.earned("net", "works", now_ms=3)
        assert [turns.taken(at("net", address)) for address in ("one", "two", "three")] == [0, 1, 0]
        assert [turns.before(each) for each in (works, sits, other)] == [(0, 0), (0, 1), (0, 1)]

    def test_a_network_does_not_wait_for_what_its_own_keys_hold(self) -> None:
        turns = Scene((HONEST, 1))
        turns.asked(at("flood", "one", "a"), 0, now_ms=1, only_inside=True)
        assert turns.before(HONEST) == (0, 0)

    def test_networks_addresses_and_keys_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal.hub.service.turns.REMEMBERED", (64, 16, 8))
        turns = Turns()
        for number in range(100):
            for place in (at(f"net-{number}"), at("one", f"address-{number}"), at("one", "one", f"key-{number}")):
                turns.asked(place, 1, now_ms=0)
        networks = turns._networks.within
        levels = (turns._networks, networks["one"], networks["one"].within["one"])
        assert [len(each.within) for each in levels] == [64, 16, 8]
        turns.asked(at("net-37"), 0, now_ms=1)  # the oldest of those that are left
        turns.asked(at("another"), 0, now_ms=1)
        assert "net-37" in networks, "who asked last is forgotten last"
        assert "net-38" not in networks
        turns.asked(HONEST, 0, now_ms=600_002)
        assert list(networks) == ["honest"]


def queue(established: int, fresh: int, owed: float = 0.0, cost: int = 1) -> tuple[Any, Any, float]:
    """Newcomers have the lowest units, and `cost` times as many tokens each."""
    low = [submission(number, who=2, tokens=cost) for number in range(fresh)]
    return [submission(number, tokens=1) for number in range(fresh, fresh + established)], low, owed


class TestAudits:
    @pytest.mark.parametrize(
        ("established", "fresh", "expected"),
        [(100, 100, 2), (100, 1, 1), (3, 100, 5), (0, 100, 8), (100, 0, 0), (2, 3, 3)],
    )
    def test_newcomers_get_their_share_and_what_others_leave(self, established: int, fresh: int, expected: int) -> None:
        chosen, _ = newcomers.choose(*queue(established, fresh), 8, 0.25)
        assert sum(row.node == node(2).node for row in chosen) == expected
        assert len(chosen) == min(8, established + fresh)

    @pytest.mark.parametrize("count", [1, 4, 32])
    def test_groups_with_forty_times_as_many_tokens_get_a_quarter_of_all_tokens(self, count: int) -> None:
        """By number they would get a quarter of the audits, which is 93 % of the tokens."""
        owed, tokens = 0.0, {node(1).node: 0, node(2).node: 0}
        for _ in range(4800 // count):
            chosen, owed = newcomers.choose(*queue(count, count, owed, cost=40), count, 0.25)
            for row in chosen:
                tokens[row.node] += row.tokens
        theirs = tokens[node(2).node] / sum(tokens.values())
        assert theirs == pytest.approx(0.25, abs=0.01)

    @given(
        share=st.floats(0.01, 0.99),
        claims=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20)), max_size=40),
    )
    def test_nobody_starves_and_no_audit_is_wasted(self, share: float, claims: list[tuple[int, int, int]]) -> None:
        owed, promised, given_to_them = 0.0, 0.0, 0
        for count, established, fresh in claims:
            chosen, owed = newcomers.choose(*queue(established, fresh, owed), count, share)
            taken = sum(row.node == node(2).node for row in chosen)
            assert len(chosen) == len({row.unit for row in chosen}) == min(count, established + fresh)
            if established >= count and fresh >= count:  # both could use all of it
                promised, given_to_them = promised + share * count, given_to_them + taken
                assert taken <= share * count + owed + 1 + 1e-6
            else:
                promised, given_to_them, owed = 0.0, 0, 0.0
            assert given_to_them <= promised + 1 + 1e-6
            assert given_to_them >= promised - 1 - 1e-6
