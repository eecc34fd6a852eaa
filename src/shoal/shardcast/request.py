"""The little of HTTP that a tree's server speaks: requests without a body, answers whose length is known.

A range is understood if it is a single one (`bytes=a-b`, `bytes=a-`, `bytes=-n`), as caches and resuming clients ask;
anything else in its place is answered with the whole, as HTTP allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

MAX_QUERY_FIELDS = 8
RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)
REASONS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    416: "Range Not Satisfiable",
    429: "Too Many Requests",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    keep_alive: bool
    range: str = ""

    @classmethod
    def parse(cls, head: bytes) -> Request | None:
        """None if it is not a request that this server understands: HTTP/1, no body."""
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1") or not parts[1].startswith("/") or has_body:
            return None
        path, _, query = parts[1].partition("?")
        connection = headers.get("connection", "keep-alive" if parts[2] == "HTTP/1.1" else "close").lower()
        wanted = "" if "if-range" in headers else headers.get("range", "")
        try:
            fields = parse_qs(query, max_num_fields=MAX_QUERY_FIELDS) if query else {}
        except ValueError:
            return None
        return cls(parts[0], path, fields, connection == "keep-alive", wanted)

    def field(self, name: str, default: str) -> str:
        return self.query.get(name, [default])[0]

    def seconds(self, name: str, most_s: float) -> float:
        """A field as seconds from 0 to `most_s`; 0 if it is absent or nonsense."""
        try:
            seconds = float(self.field(name, "0"))
        except ValueError:
            return 0.0
        return min(max(seconds, 0.0), most_s) if seconds == seconds else 0.0


def byte_range(text: str, size_bytes: int) -> range | None:
    """Which bytes a `Range` header asks for; None for the whole, an empty range if there are no such bytes.

    >>> byte_range("bytes=2-3", 10), byte_range("bytes=-4", 10), byte_range("bytes=10-", 10), byte_range("", 10)
    (range(2, 4), range(6, 10), range(10, 10), None)
    """
    match = RANGE.fullmatch(text)
    if match is None or text == "bytes=-":
        return None
    first, last = match[1], match[2]
    if not first:
        return range(max(0, size_bytes - int(last)), size_bytes)
    end = min(int(last) + 1, size_bytes) if last else size_bytes
    if last and int(last) < int(first):
        return None
    start = min(int(first), size_bytes)
    return range(start, max(start, end))


def answer_head(status: int, size_bytes: int, request: Request | None, headers: Mapping[str, str]) -> bytes:
    """The head of an answer; without a request (it was not understood) the connection ends after it."""
    connection = "keep-alive" if request is not None and request.keep_alive else "close"
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"Content-Length: {size_bytes}", f"Connection: {connection}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()
