"""One HTTP exchange with an untrusted peer: bounded in time and in bytes, whatever the peer sends.

    with limited(30.0, stop):               connecting, sending, the head and the body, all in this thread
        response = client.send(...)         `Network` checks the limit before every receive
        body = read_body(response, cap)     never decompressed; received bytes extend the time

httpx2 limits only each receive: a slowly dripping head, or one 1xx answer after another, could block a caller for days.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpcore2
import httpx2

from shoal.errors import CodecError
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import StopToken

SLICE_S = 0.2
STOP_GRACE_S = 5.0  # time for an exchange that is running when a stop comes
LEAST_BYTES_PER_S = 10_000  # a modem from 1998 is not much slower
WRITTEN_BYTES = 64 * 1024
SLOW = "it takes too long in all"


class Limit:
    """When an exchange must end. One that begins after a stop is bounded only by its time."""

    def __init__(self, seconds: float, stop: StopToken | None, clock: Clock) -> None:
        self._clock, self._ends_s = clock, clock.monotonic_s() + seconds
        self._stop = stop if stop is not None and not stop.is_set() else None

    def extend(self, size_bytes: int) -> None:
        self._ends_s += size_bytes / LEAST_BYTES_PER_S

    def remaining_s(self) -> float:
        now_s = self._clock.monotonic_s()
        if self._stop is not None and self._stop.is_set():
            self._stop, self._ends_s = None, min(self._ends_s, now_s + STOP_GRACE_S)
        return self._ends_s - now_s


class _Here(threading.local):
    limit: Limit | None = None


_here = _Here()


@contextmanager
def limited(seconds: float, stop: StopToken | None = None, clock: Clock = SystemClock()) -> Iterator[None]:
    """Requests of this thread in the block, by a client with `Network`, end in time."""
    before, _here.limit = _here.limit, Limit(seconds, stop, clock)
    try:
        yield
    finally:
        _here.limit = before


def check_plain(response: httpx2.Response) -> None:
    """Refuse a compressed answer, which was not asked for: a few bytes can become gigabytes."""
    encodings = response.headers.get_list("content-encoding", split_commas=True)
    if any(each.strip().lower() not in ("", "identity") for each in encodings):
        raise httpx2.DecodingError(f"the answer is compressed ({', '.join(encodings)[:100]}), which was not asked for")


def read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    """The whole body, read in pieces, so one over the limit is never held in memory."""
    check_plain(response)
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > max_bytes:
            raise CodecError(f"the answer of {response.request.url} is longer than {max_bytes} bytes; it was not read")
        if _here.limit is not None:
            _here.limit.extend(len(piece))
            if _here.limit.remaining_s() <= 0:
                raise httpx2.ReadTimeout(SLOW)
    return bytes(content)


class _Stream(httpcore2.NetworkStream):
    def __init__(self, inner: httpcore2.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """In slices, to notice a stop and the end of the time."""
        limit, until_s = _here.limit, None if timeout is None else time.monotonic() + timeout
        if limit is None:
            return self._inner.read(max_bytes, timeout)
        while (left_s := limit.remaining_s()) > 0:
            try:
                return self._inner.read(max_bytes, min(SLICE_S, left_s))
            except httpcore2.ReadTimeout:
                if until_s is not None and time.monotonic() >= until_s:
                    raise
        raise httpcore2.ReadTimeout(SLOW)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), WRITTEN_BYTES):
            self._inner.write(buffer[start : start + WRITTEN_BYTES], _left_s(timeout, httpcore2.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> _Stream:
        left_s = _left_s(timeout, httpcore2.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left_s))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class Network(httpcore2.NetworkBackend):
    def __init__(self) -> None:
        self._inner = httpcore2.SyncBackend()

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *more: Any, **options: Any) -> _Stream:
        return _Stream(
            self._inner.connect_tcp(host, port, _left_s(timeout, httpcore2.ConnectTimeout), *more, **options)
        )

    def connect_unix_socket(self, path: str, timeout: float | None = None, socket_options: Any = None) -> _Stream:
        left_s = _left_s(timeout, httpcore2.ConnectTimeout)
        return _Stream(self._inner.connect_unix_socket(path, left_s, socket_options))


def _left_s(timeout: float | None, late: type[Exception]) -> float | None:
    if _here.limit is None:
        return timeout
    left_s = _here.limit.remaining_s()
    if left_s <= 0:
        raise late(SLOW)
    return left_s if timeout is None else min(timeout, left_s)
