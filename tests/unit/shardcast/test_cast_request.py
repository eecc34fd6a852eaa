"""Requests as they are read, ranges as they are understood, and numbers as they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.catalogue import Metric
from shoal.shardcast.server import Request, byte_range


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("bytes=0-9", range(0, 10)),
        ("bytes=3-3", range(3, 4)),
        ("bytes=3-", range(3, 10)),
        ("bytes=3-99", range(3, 10)),
        ("bytes=-3", range(7, 10)),
        ("bytes=-99", range(0, 10)),
        ("bytes=10-", range(10, 10)),
        ("bytes=12-14", range(10, 10)),
        ("bytes=-0", range(10, 10)),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("bytes=a-b", None),
        ("bytes=٣-", None),
        ("items=0-1", None),
        ("bytes=0-" + "9" * 40, None),
    ],
)
def test_a_single_range_is_understood_and_anything_else_is_the_whole(text: str, expected: range | None) -> None:
    assert byte_range(text, 10) == expected


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 20))
def test_a_range_never_leaves_the_file(first: int, last: int, size: int) -> None:
    for text in (f"bytes={first}-{last}", f"bytes={first}-", f"bytes=-{last}"):
        found = byte_range(text, size)
        assert found is None or 0 <= found.start <= found.stop <= size


def parsed(head: bytes) -> Request:
    request = Request.parse(head)
    assert request is not None
    return request


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nConnection: Close\r\n\r\n", False),
    ],
)
def test_keep_alive_is_as_http_says(head: bytes, keep_alive: bool) -> None:
    assert parsed(head).keep_alive is keep_alive


def test_a_range_with_a_condition_is_answered_with_the_whole() -> None:
    assert parsed(b"GET / HTTP/1.1\r\nRange: bytes=1-2\r\n\r\n").range == "bytes=1-2"
    assert parsed(b'GET / HTTP/1.1\r\nRange: bytes=1-2\r\nIf-Range: "x"\r\n\r\n').range == ""


@pytest.mark.parametrize(
    ("query", "seconds"),
    [("wait_s=3", 3.0), ("wait_s=1e9", 20.0), ("wait_s=-1", 0.0), ("wait_s=nan", 0.0), ("wait_s=x", 0.0), ("", 0.0)],
)
def test_seconds_are_bounded_whatever_is_asked(query: str, seconds: float) -> None:
    assert parsed(f"GET /?{query} HTTP/1.1\r\n\r\n".encode()).seconds("wait_s", 20.0) == seconds


def test_numbers_are_written_as_prometheus_reads_them() -> None:
    metrics = (
        Metric("sent_bytes_total", "counter", "Bytes sent.", 12345678901),
        Metric("source_success", "gauge", "Success.", by={'http://a:1/"x\\\n': 0.25, "b": 1}),
        Metric("requests_total", "counter", "Answers.", by={"200": 7}, label="status"),
    )
    assert "".join(metric.render() for metric in metrics) == (
        "# HELP shoal_cast_sent_bytes_total Bytes sent.\n"
        "# TYPE shoal_cast_sent_bytes_total counter\n"
        "shoal_cast_sent_bytes_total 12345678901\n"
        "# HELP shoal_cast_source_success Success.\n"
        "# TYPE shoal_cast_source_success gauge\n"
        'shoal_cast_source_success{source="http://a:1/\\"x\\\\\\n"} 0.25\n'
        'shoal_cast_source_success{source="b"} 1\n'
        "# HELP shoal_cast_requests_total Answers.\n"
        "# TYPE shoal_cast_requests_total counter\n"
        'shoal_cast_requests_total{status="200"} 7\n'
    )
