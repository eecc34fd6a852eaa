"""HTTP/1.1 on one kept connection, as lean as Python allows: a thousand of these must cost less than the hub.

    call ─► bytes ─► socket ─► head, then as many bytes as it says ─► (status, body)

Requests are signed like any node's (`protocol.sign_request`), and tried again if nothing usable comes: every call of
the hub may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from shoal.protocol import SigningKey, sign_request

CALL_S = 60.0
ATTEMPTS = 5
NO_ANSWER = 599


@dataclass
class Latencies:
    """Seconds by kind of call, and what was answered other than 2xx."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    on: bool = False

    def note(self, kind: str, took_s: float, status: int) -> None:
        if not self.on:
            return
        self.seconds.setdefault(kind, []).append(took_s)
        if status >= 300:
            self.refused[f"{kind} {status}"] = self.refused.get(f"{kind} {status}", 0) + 1


class _Answer(asyncio.Protocol):
    """Collects one answer at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._waiting: asyncio.Future[tuple[int, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def expect(self) -> asyncio.Future[tuple[int, bytes]]:
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0 or self._waiting is None:
            return
        head = bytes(self._data[:end]).lower()
        length = 0
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            length = int(head[at + 17 :].split(b"\r\n", 1)[0])
        if len(self._data) < end + 4 + length:
            return
        body = bytes(self._data[end + 4 : end + 4 + length])
        del self._data[: end + 4 + length]
        waiting, self._waiting = self._waiting, None
        if not waiting.done():
            waiting.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionResetError(str(error or "closed")))


class Wire:
    """One node's connection to a server."""

    def __init__(self, host: str, port: int, run: str, key: SigningKey, latencies: Latencies) -> None:
        self._where = (host, port)
        self._run, self.key = run, key
        self._latencies = latencies
        self._answer: _Answer | None = None

    async def call(
        self, kind: str, method: str, target: str, body: bytes = b"", content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        """(status, body). `kind` names the call in the statistics. Tried again like any node's, if need be."""
        for attempt in range(ATTEMPTS):
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(CALL_S):
                    status, answer = await self._send(method, target, body, content_type)
            except (ConnectionError, TimeoutError):
                self.close()
                self._answer, status, answer = None, NO_ANSWER, b""
            self._latencies.note(kind, time.perf_counter() - began_s, status)
            if status < 500 and status != 429:
                return status, answer
            await asyncio.sleep(2**attempt)
        return status, answer

    async def _send(self, method: str, target: str, body: bytes, content_type: str) -> tuple[int, bytes]:
        if self._answer is None or self._answer.transport is None:
            loop = asyncio.get_running_loop()
            _transport, self._answer = await loop.create_connection(_Answer, *self._where)
        signed = sign_request(self.key, self._run, method, target, body, time.time_ns() // 1_000_000)
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._where[0]}:{self._where[1]}"]
        lines += [f"{name}: {value}" for name, value in signed.items()]
        lines += [f"content-type: {content_type}", f"content-length: {len(body)}", "", ""]
        waiting = self._answer.expect()
        assert self._answer.transport is not None
        self._answer.transport.write("\r\n".join(lines).encode() + body)
        return await waiting

    def close(self) -> None:
        if self._answer is not None and self._answer.transport is not None:
            self._answer.transport.close()
