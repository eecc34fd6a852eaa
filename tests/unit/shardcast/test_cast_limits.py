"""Who counts as one client, and a bucket by a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast import limits
from shoal.shardcast.limits import Throttle, client_of


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


@given(sizes=st.lists(st.integers(1, 5000), min_size=1), pauses=st.lists(st.floats(0, 3)))
def test_a_bucket_never_gives_more_than_its_rate_and_one_burst(sizes: list[int], pauses: list[float]) -> None:
    throttle = Throttle(rate_bytes_s=1000.0)
    now_s, sent = 100.0, 0
    for index, size in enumerate(sizes):
        now_s += pauses[index] if index < len(pauses) else 0.0
        may_go_s = now_s + throttle.take(size, now_s)
        sent += size
        assert sent <= 1000.0 * (may_go_s - 100.0 + limits.BURST_S) + 1e-3


def test_a_bucket_lets_a_quiet_client_receive_at_once_and_a_busy_one_wait() -> None:
    throttle = Throttle(rate_bytes_s=1000.0)
    assert throttle.take(1000, 50.0) == 0.0
    assert throttle.take(500, 50.0) == pytest.approx(0.5)
    assert throttle.take(500, 50.0) == pytest.approx(1.0)  # a second connection waits behind the first
    assert throttle.take(1000, 53.0) == 0.0


def test_slices_are_an_eighth_of_a_second_but_not_tiny() -> None:
    assert Throttle(rate_bytes_s=8e6).slice_of(10**9) == 10**6
    assert Throttle(rate_bytes_s=1.0).slice_of(10**9) == limits.MIN_SLICE_BYTES
    assert Throttle(rate_bytes_s=8e6).slice_of(5) == 5
