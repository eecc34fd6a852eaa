"""The OpenAPI document of the table of calls (`routes`)."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from shoal import __version__
from shoal.hub.http.routes import BULK, TABLE, Call
from shoal.protocol import Problem
from shoal.protocol.signing import HEADER_BODY, HEADER_NODE, HEADER_NONCE, HEADER_SIGNATURE, HEADER_TIME

REFUSALS = {
    400: "the body did not arrive whole",
    401: "`auth.*`: the caller is not proven",
    403: "the caller may not do this",
    404: "there is no such thing in this run",
    409: "it contradicts what was said before; the code says which",
    410: "`lease.*`: the lease has ended",
    413: "`body.too_big`",
    422: "the body or a parameter is malformed, or does not fit what it refers to",
    429: "`rate.*`: too fast; `Retry-After` says for how long to wait",
    503: "nothing was promised: try again",
}

TAGS = {
    "run": "What anyone may read, unsigned.",
    "nodes": "Taking part: registration and heartbeats.",
    "worker": "Leases and submissions.",
    "validator": "Audits and verdicts.",
    "trainer": "Policies, batches and reports.",
    "owner": "Orders of the owner, and calibrations: documents that are signed themselves.",
}

DESCRIPTION = f"""
The hub of a shoal run. Reading is open to anyone; every other call is signed by the caller's Ed25519 key with five
headers: `{HEADER_NODE}` (the node id), `{HEADER_TIME}` (milliseconds since 1970), `{HEADER_NONCE}` (8 to 64 characters,
never used before), `{HEADER_BODY}` (SHA-256 of the body, hex) and `{HEADER_SIGNATURE}`, the signature in hex over these
lines joined by newlines:

    shoal/request/v1
    <method> <newline> <run id> <newline> <path with query> <newline> <node> <newline> <time> <newline> <nonce>
    <SHA-256 of the body, hex>

A time more than two minutes off the hub's is refused with `auth.skew`, and the answer's `clock` is the hub's time: a
`HubClock`, signed for the node and nonce of that very request. `shoal.client.HubClient` does all this for you. Every
refusal is a `Problem` with a stable `code` and a sentence. Bulk bodies (`{BULK}`) are msgpack in a zstd frame.
"""


@cache
def document() -> dict[str, Any]:
    """All of it; the same for every hub of this version."""
    calls = [(tag, call) for tag, rows in TABLE.items() for call in rows]
    paths: dict[str, dict[str, Any]] = {}
    for tag, call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _described(tag, call)
    used: set[type[BaseModel]] = {
        Problem,
        *(kind for _, call in calls for kind in (call.takes, call.reply) if isinstance(kind, type)),
    }
    modes = [(kind, "validation") for kind in sorted(used, key=lambda kind: kind.__name__)]
    _, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    signature = {"type": "apiKey", "in": "header", "name": HEADER_SIGNATURE, "description": "see the top"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "shoal hub", "version": __version__, "description": DESCRIPTION},
        "tags": [{"name": name, "description": said} for name, said in TAGS.items()],
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {}), "securitySchemes": {"signature": signature}},
    }


def _described(tag: str, call: Call) -> dict[str, Any]:
    schema = call.at.model_json_schema()
    required = schema.get("required", ())
    parameters = [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in call.path else "query",
            "required": name in required,
            "schema": kind,
        }
        for name, kind in schema.get("properties", {}).items()
    ]
    media = call.reply if isinstance(call.reply, str) else "application/json"
    answer = _content(media.partition(";")[0], None if isinstance(call.reply, str) else call.reply)
    refusal, statuses = _content("application/json", Problem), (200, 201) if call.is_upload else (200,)
    responses = {status: {"description": "the answer", **answer} for status in statuses}
    if call.reply is None:
        responses = {204: {"description": "done"}}
    responses |= {status: {"description": said, **refusal} for status, said in REFUSALS.items()}
    found: dict[str, Any] = {
        "tags": [tag], "summary": call.what.partition(".")[0], "description": call.what, "parameters": parameters,
        "responses": {str(status): response for status, response in sorted(responses.items())},
    }  # fmt: skip
    if call.roles is not None:
        found["security"] = [{"signature": []}]
    if call.method != "GET":
        found["requestBody"] = {"required": True, **_content("application/json" if call.takes else BULK, call.takes)}
    return found


def _content(media: str, kind: type[BaseModel] | None) -> dict[str, Any]:
    schema: dict[str, Any] = {} if kind is None else {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"content": {media: {"schema": schema}}}
