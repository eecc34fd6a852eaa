"""The OpenAPI page: bodies of signed calls are read raw (the signature covers them), so they are described here.

`describes` gives a route its tag, summary, body, example and refusals; `install` adds the messages' schemas and how
requests are signed.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from shoal.protocol import (
    AdminRequest,
    AuditRequest,
    BatchRequest,
    Heartbeat,
    LeaseRelease,
    LeaseRequest,
    Message,
    Problem,
    Registration,
    SignedDocument,
    StepReport,
    VerdictReport,
)
from shoal.protocol.signing import HEADER_BODY, HEADER_NODE, HEADER_NONCE, HEADER_SIGNATURE, HEADER_TIME
from shoal.protocol.submission import UploadCommit, UploadRequest

BULK = "application/msgpack+zstd"

_BODIES: tuple[type[Message], ...] = (
    Registration,
    Heartbeat,
    LeaseRequest,
    LeaseRelease,
    AuditRequest,
    SignedDocument,
    BatchRequest,
    StepReport,
    VerdictReport,
    AdminRequest,
    UploadRequest,
    UploadCommit,
)

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
    429: "`rate.key`, `rate.address`, `rate.registrations`, `rate.uploads`: too fast; `Retry-After` says for how long "
    "to wait",
    503: "`hub.resource`, `hub.failed`, `hub.busy`, `body.slow`: the hub could not do it now; nothing was promised, "
    "try again",
}

TAGS = [
    {"name": "run", "description": "What anyone may read, unsigned."},
    {"name": "nodes", "description": "Taking part: registration and heartbeats."},
    {"name": "worker", "description": "Leases and submissions."},
    {"name": "validator", "description": "Audits and verdicts."},
    {"name": "trainer", "description": "Policies, batches and reports."},
    {"name": "owner", "description": "Orders of the owner, and calibrations: documents that are signed themselves."},
]

DESCRIPTION = f"""
The hub of a shoal run. Reading is open to anyone; every other call is signed by the caller's Ed25519 key with five
headers: `{HEADER_NODE}` (the node id, 32 hex digits), `{HEADER_TIME}` (milliseconds since 1970), `{HEADER_NONCE}` (8 to
64 characters, never used before), `{HEADER_BODY}` (SHA-256 of the body, hex) and `{HEADER_SIGNATURE}`, the signature in
hex over these lines joined by newlines:

    shoal/request/v1
    <method> <newline> <run id> <newline> <path with query> <newline> <node> <newline> <time> <newline> <nonce>
    <SHA-256 of the body, hex>

A time more than two minutes off the hub's is refused with `auth.skew`, and the answer's `clock` says what time it is
there: a `HubClock` that the hub has signed, with the node and nonce of that very request. A node that speaks another
protocol than the hub is refused when it registers (`protocol.version`). `shoal.client.HubClient` does all this for you.
Every refusal is a `Problem` with a stable `code` and a sentence.
Bulk bodies (`{BULK}`) are msgpack in a zstd frame.
"""

UNSIGNED = ("run", "owner")

Described: TypeAlias = dict[str, Any]


def describes(
    tag: str, refusals: tuple[int, ...] = (), body: type[Message] | None = None, example: dict[str, Any] | None = None
) -> Described:
    """Keyword arguments of a route: its tag, its documented refusals, its JSON body. Signed unless in `UNSIGNED`."""
    extra: dict[str, Any] = {}
    if tag not in UNSIGNED:
        extra["security"] = [{"signature": []}]
    if body is not None:
        content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
        if example is not None:
            content["example"] = example
        extra["requestBody"] = {"required": True, "content": {"application/json": content}}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "description": _REFUSALS[status]} for status in (*refusals, 429, 503)
    }
    return {"tags": [tag], "responses": responses, "openapi_extra": extra}


def bulk_body(description: str) -> dict[str, Any]:
    """The `requestBody` of a call that takes a bulk body."""
    content = {BULK: {"schema": {"type": "string", "format": "binary"}}}
    return {"required": True, "description": description, "content": content}


def bulk_answer(description: str) -> dict[str, Any]:
    """The 200 of a call that answers with a bulk body."""
    return {"description": description, "content": {BULK: {"schema": {"type": "string", "format": "binary"}}}}


def install(app: FastAPI) -> None:
    """Make `app.openapi()` complete."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes, tags=TAGS
            )
            app.openapi_schema = _complete(schema)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    modes = [(model, "validation") for model in _BODIES]
    _, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    components["schemas"] = {**definitions.get("$defs", {}), **components.get("schemas", {})}
    components["securitySchemes"] = {
        "signature": {
            "type": "apiKey",
            "in": "header",
            "name": HEADER_SIGNATURE,
            "description": f"with {HEADER_NODE}, {HEADER_TIME}, {HEADER_NONCE} and {HEADER_BODY}; see the top",
        }
    }
    return schema
