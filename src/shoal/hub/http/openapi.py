"""The OpenAPI document: bodies of signed calls are read raw (the signature covers them), so they are described here.

`describes` gives a route its tag, body, answers and refusals; `install` adds the messages' schemas and how requests are
signed.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from shoal.protocol import Message, Problem
from shoal.protocol.signing import HEADER_BODY, HEADER_NODE, HEADER_NONCE, HEADER_SIGNATURE, HEADER_TIME

BULK = "application/msgpack+zstd"
_BULK_CONTENT = {BULK: {"schema": {"type": "string", "format": "binary"}}}

_REFUSALS = {
    400: "the body did not arrive whole",
    401: "`auth.unsigned`, `auth.unknown_node`, `auth.signature`, `auth.skew`, `auth.replay`: the caller is not proven",
    403: "the caller may not do this: `auth.role`, `auth.certificate`, `lease.not_yours`, `node.banned`, "
    "`node.suspended`, `profile.unknown`",
    404: "there is no such thing in this run",
    409: "it contradicts what was said before; the code says which",
    410: "`lease.late`, `lease.void`, `lease.released`: the lease has ended",
    413: "`body.too_big`",
    422: "the body is malformed, or does not fit what it refers to",
    429: "`rate.*`: too fast; `Retry-After` says for how long to wait",
    503: "`hub.resource`, `hub.failed`, `hub.busy`, `body.slow`: nothing was promised, try again",
}

TAGS = {
    "run": "What anyone may read, unsigned.",
    "nodes": "Taking part: registration and heartbeats.",
    "worker": "Leases and submissions.",
    "validator": "Audits and verdicts.",
    "trainer": "Policies, batches and reports.",
    "owner": "Orders of the owner, and calibrations: documents that are signed themselves.",
}

_DESCRIPTION = f"""
The hub of a shoal run. Reading is open to anyone; every other call is signed by the caller's Ed25519 key with five
headers: `{HEADER_NODE}` (the node id, 32 hex digits), `{HEADER_TIME}` (milliseconds since 1970), `{HEADER_NONCE}` (8 to
64 characters, never used before), `{HEADER_BODY}` (SHA-256 of the body, hex) and `{HEADER_SIGNATURE}`, the signature in
hex over these lines joined by newlines:

    shoal/request/v1
    <method> <newline> <run id> <newline> <path with query> <newline> <node> <newline> <time> <newline> <nonce>
    <SHA-256 of the body, hex>

A time more than two minutes off the hub's is refused with `auth.skew`, and the answer's `clock` is the hub's time: a
`HubClock`, signed for the node and nonce of that very request. `shoal.client.HubClient` does all this for you. Every
refusal is a `Problem` with a stable `code` and a sentence. Bulk bodies (`{BULK}`) are msgpack in a zstd frame.
"""

_bodies: set[type[Message]] = set()  # of all routes: their schemas are added, for no route declares them to FastAPI


def describes(
    tag: str, body: type[Message] | str | None = None, *,
    refusals: tuple[int, ...] = (), answers: dict[int, dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of a route. `body` is a message in JSON, or says what bulk body it takes; `refusals` and
    `answers` are those besides the usual ones. All but what is tagged "run" or "owner" is signed."""
    is_signed = tag not in ("run", "owner")
    extra: dict[str, Any] = {"security": [{"signature": []}]} if is_signed else {}
    refusals = (*((401, 403, 413, 422) if is_signed else ()), *refusals, 429, 503)
    if isinstance(body, str):
        extra["requestBody"] = {"required": True, "description": body, "content": _BULK_CONTENT}
    elif body is not None:
        _bodies.add(body)
        content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
        extra["requestBody"] = {"required": True, "content": {"application/json": content}}
    responses = {status: {"model": Problem, "description": _REFUSALS[status]} for status in refusals}
    return {"tags": [tag], "responses": {**responses, **(answers or {})}, "openapi_extra": extra}


def bulk_answer(description: str) -> dict[int, dict[str, Any]]:
    """The 200 of a call that answers with a bulk body."""
    return {200: {"description": description, "content": _BULK_CONTENT}}


def install(app: FastAPI) -> None:
    """Make `app.openapi()` complete."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            tags = [{"name": name, "description": said} for name, said in TAGS.items()]
            schema = get_openapi(
                title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes, tags=tags
            )
            app.openapi_schema = _complete(schema)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    modes = [(model, "validation") for model in sorted(_bodies, key=lambda each: each.__name__)]
    _, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    components["schemas"] = {**definitions.get("$defs", {}), **components.get("schemas", {})}
    said = f"with {HEADER_NODE}, {HEADER_TIME}, {HEADER_NONCE} and {HEADER_BODY}; see the top"
    signature = {"type": "apiKey", "in": "header", "name": HEADER_SIGNATURE, "description": said}
    components["securitySchemes"] = {"signature": signature}
    return schema
