"""Buckets and caps per client, by a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast import limits
from shoal.shardcast.limits import Guest, Guests, RelaySettings, ServerLimits, client_of


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("192.0.2.8", "192.0.2.8"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::ffff", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(address: str, client: str) -> None:
    assert client_of(address) == client


def test_one_more_than_allowed_is_refused_until_one_leaves_and_others_do_not_matter() -> None:
    guests = Guests(connections_per_client=2, rate_bytes_s=None)
    first, second = guests.enter("2001:db8::1", 0.0), guests.enter("2001:db8::2", 0.0)
    assert first is not None
    assert first is second
    assert guests.enter("2001:db8::3", 0.0) is None
    assert guests.enter("192.0.2.7", 0.0) is not None
    guests.leave(first)
    assert guests.enter("2001:db8::3", 0.0) is first


@given(sizes=st.lists(st.integers(1, 5000), min_size=1), pauses=st.lists(st.floats(0, 3)))
def test_a_bucket_never_gives_more_than_its_rate_and_one_burst(sizes: list[int], pauses: list[float]) -> None:
    guest = Guest(rate_bytes_s=1000.0)
    now_s, sent = 100.0, 0
    for index, size in enumerate(sizes):
        now_s += pauses[index] if index < len(pauses) else 0.0
        may_go_s = now_s + guest.take(size, now_s)
        sent += size
        assert sent <= 1000.0 * (may_go_s - 100.0 + limits.BURST_S) + 1e-3


def test_a_bucket_lets_a_quiet_client_send_at_once_and_a_busy_one_wait_for_its_turn() -> None:
    guest = Guest(rate_bytes_s=1000.0)
    assert guest.take(1000, 50.0) == 0.0
    assert guest.take(500, 50.0) == pytest.approx(0.5)
    assert guest.take(500, 50.0) == pytest.approx(1.0)  # a second connection waits behind the first
    assert guest.take(1000, 53.0) == 0.0


def test_slices_are_an_eighth_of_a_second_but_not_tiny_and_without_a_rate_the_whole() -> None:
    assert Guest(rate_bytes_s=None).slice_of(10**9) == 10**9
    assert Guest(rate_bytes_s=8e6).slice_of(10**9) == 10**6
    assert Guest(rate_bytes_s=1.0).slice_of(10**9) == limits.MIN_SLICE_BYTES
    assert Guest(rate_bytes_s=8e6).slice_of(5) == 5


def test_a_client_that_reconnects_finds_its_bucket_as_it_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REMEMBERED", 1)
    guests = Guests(None, rate_bytes_s=1000.0)
    guest = guests.enter("192.0.2.7", 0.0)
    assert guest is not None
    guest.take(3000, 0.0)
    guests.leave(guest)
    assert guests.enter("192.0.2.8", 0.5) is not guest
    again = guests.enter("192.0.2.7", 1.0)
    assert again is guest
    guests.leave(again)
    assert guests.enter("192.0.2.9", 10.0) is not None  # by now it is full, and forgotten
    assert guests.enter("192.0.2.7", 10.0) is not guest
    assert len(guests) == 3


def test_the_settings_of_a_recipe_become_limits_in_bytes() -> None:
    chosen = RelaySettings(max_clients=7, connections_per_client=3, rate_per_client_mbit=8, disk_budget_gb=1.5)
    assert chosen.limits == ServerLimits(max_connections=7, connections_per_client=3, rate_bytes_s=1e6)
    assert chosen.budget_bytes == 1_500_000_000
    assert RelaySettings().limits.rate_bytes_s is None
    assert RelaySettings().budget_bytes is None
