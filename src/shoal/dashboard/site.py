"""Which page a request gets, and who may see it."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from shoal.dashboard.settings import DashboardSettings
from shoal.dashboard.views import Level, Views
from shoal.errors import UserError
from shoal.hub.service import Hub
from shoal.hub.state import Refusal
from shoal.runtime.http import HttpRequest, Reply

MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
HIDDEN = "the owner of this run shows no pages (dashboard.public)"
LEAST_GZIP = 512
TABLES = ("series", "nodes", "rollouts", "tasks", "policies")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would evaluate a cell that begins so


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """Path → content and media type. A fixed list: no path of a request reaches the disk."""
    folder = files("shoal.dashboard") / "static"
    found = {each.name: each.read_bytes() for each in folder.iterdir() if Path(each.name).suffix in MEDIA}
    named = {f"/ui/{name}": (data, f"{MEDIA[Path(name).suffix]}; charset=utf-8") for name, data in found.items()}
    return {"/": named["/ui/index.html"], **named}


class Site:
    def __init__(self, hub: Hub, settings: DashboardSettings, recipe: str = "", records: Path | None = None) -> None:
        self._settings, self._views = settings, Views(hub, recipe, records)

    def takes(self, path: str) -> bool:
        return path in static_files() or path.startswith("/view/")

    def level(self, request: HttpRequest) -> Level:
        """The owner is who asks from this machine by one of its own names, and through no proxy: a page elsewhere
        whose name was bound to this machine's address is a stranger."""
        host = request.headers.get("host", "").rpartition(":")
        name = host[0] if host[1] and host[2].isdigit() else request.headers.get("host", "")
        is_direct = not {"x-forwarded-for", "forwarded", "x-real-ip"} & set(request.headers)
        return "owner" if not request.client and is_direct and name in OWN_NAMES else self._settings.public

    def answer(self, request: HttpRequest) -> Reply:
        if request.method not in ("GET", "HEAD"):
            raise Refusal(405, "http.405", "the pages about a run can only be read")
        if request.path in static_files():
            request.route = "/"
            data, media = static_files()[request.path]
            return _reply(request, data, media)
        name, _, rest = request.path.removeprefix("/view/").partition("/")
        request.route = f"/view/{name}" if name in self._views.names else "/view"
        level, asked = self.level(request), {key: each[-1] for key, each in parse_qs(request.query).items()}
        if level == "none":
            raise Refusal(403, "http.403", HIDDEN)
        if name not in self._views.names:
            raise Refusal(404, "http.404", f"there is no page {request.path[:80]}")
        try:
            value = self._views.show(name, rest, asked, level)
        except (ValueError, UserError) as error:
            raise Refusal(422, "request.parameter", str(error)[:200]) from error
        if asked.get("format") == "csv":
            if name not in TABLES:
                raise Refusal(422, "request.parameter", f"{name} is no table: these are: {', '.join(TABLES)}")
            rows = value if isinstance(value, list) else _rows(value)
            headers = {"content-disposition": f'attachment; filename="{name}.csv"'}
            return _reply(request, _csv(rows), "text/csv; charset=utf-8", headers)
        return _reply(request, _json(value), "application/json")

    def state(self, request: HttpRequest) -> tuple[str, bytes]:
        """What a viewer follows, as a server-sent event, and its id."""
        level = self.level(request)
        if level == "none":
            raise Refusal(403, "http.403", HIDDEN)
        data = _json(self._views.show("overview", "", {}, level))
        name = hashlib.sha256(_json({**json.loads(data), "now_ms": 0})).hexdigest()[:16]
        return name, b"retry: 2000\nid: " + name.encode() + b"\ndata: " + data + b"\n\n"


def event_reply(event: bytes) -> Reply:
    return Reply(200, event, "text/event-stream", dict(HEADERS))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _reply(request: HttpRequest, data: bytes, media: str, headers: Mapping[str, str] | None = None) -> Reply:
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    sent = {**HEADERS, "etag": tag, "vary": "accept-encoding", **(headers or {})}
    if request.headers.get("if-none-match") == tag:
        return Reply(304, b"", media, sent)
    if len(data) >= LEAST_GZIP and "gzip" in request.headers.get("accept-encoding", ""):
        data, sent = _zipped(data), {**sent, "content-encoding": "gzip"}
    return Reply(200, data, media, sent)


def _zipped(data: bytes) -> bytes:
    return gzip.compress(data, 5, mtime=0)


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a table by column."""
    named = {name: values for name, values in columns.items() if isinstance(values, list)}
    return [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    text = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return f"'{text}" if isinstance(text, str) and text.startswith(FORMULA) else text
