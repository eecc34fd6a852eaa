"""Requests as they are read."""

from __future__ import annotations

import pytest

from shoal.shardcast.server import Request


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


@pytest.mark.parametrize(
    ("query", "seconds"),
    [("wait_s=3", 3.0), ("wait_s=1e9", 20.0), ("wait_s=-1", 0.0), ("wait_s=nan", 0.0), ("wait_s=x", 0.0), ("", 0.0)],
)
def test_seconds_are_bounded_whatever_is_asked(query: str, seconds: float) -> None:
    assert parsed(f"GET /?{query} HTTP/1.1\r\n\r\n".encode()).seconds("wait_s", 20.0) == seconds
