"""Answers in the shape that the caller knows: what a peer of the version before has never heard of is left out.

    route ─► answer (newest shape) ─┬─ caller speaks the newest ─► as it is, untouched
                                    └─ caller speaks an older ───► fields dropped, documents signed anew by the hub

Who is asking: a node by what it registered with; anyone else by the header `shoal-protocol`. Version 1 sent none, and
was known by the name of its HTTP library; strangers without the header (browsers, curl, scrapers) get all there is.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from shoal.hub.service import Hub
from shoal.protocol import PROTOCOL_VERSION, Lease, LedgerHead, Receipt, RunInfo, SignedDocument, SigningKey
from shoal.protocol.signing import Document, sign_values
from shoal.protocol.versions import HEADER_PROTOCOL, OLDEST_PROTOCOL, asked_version, reduced

OLD_AGENT = "python-httpx"
ROLES_OF_1 = ("hub", "trainer", "validator", "worker")

HUB_DOCUMENTS: dict[str, type[Document]] = {kind.kind: kind for kind in (Lease, Receipt, RunInfo, LedgerHead)}
"""What a hub signs, and can therefore sign again in another shape."""


def version_of(request: Request) -> int:
    """The protocol version that the caller of a request speaks; `auth` has noted that of a node."""
    known: int | None = getattr(request.state, "protocol", None) or asked_version(request.headers.get(HEADER_PROTOCOL))
    if known is not None:
        return known
    is_old = request.headers.get("user-agent", "").startswith(OLD_AGENT)
    return OLDEST_PROTOCOL if is_old else PROTOCOL_VERSION


class ShapedRoute(APIRoute):
    """A route whose JSON answers are reduced for older callers. `APIRouter(route_class=ShapedRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return _shaping(super().get_route_handler(), self.response_model)


def _shaping(
    handle: Callable[[Request], Awaitable[Response]], model: Any
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    has_shape = isinstance(model, type) and issubclass(model, BaseModel)

    async def shaped(request: Request) -> Response:
        response = await handle(request)
        version = version_of(request)
        if version >= PROTOCOL_VERSION or not has_shape or response.status_code >= 300 or not response.body:
            return response
        hub: Hub = request.app.state.hub
        values = answer_for(version, model, json.loads(bytes(response.body)), hub.context.config.key)
        headers = {name: value for name, value in response.headers.items() if name.lower() != "content-length"}
        return Response(json.dumps(values).encode(), response.status_code, headers)

    return shaped


def answer_for(version: int, kind: type[BaseModel], values: dict[str, Any], key: SigningKey) -> dict[str, Any]:
    """The answer as a peer of `version` knows it; what the hub signed is signed anew where it lost something."""

    def document(signed: dict[str, Any]) -> dict[str, Any]:
        inside = HUB_DOCUMENTS.get(signed["kind"])
        if inside is None or signed["signed_by"] != key.public_key:
            return signed  # somebody else's word: it goes on as it came
        known = _known_roles(reduced(inside, signed["document"], version, {}))
        if known == signed["document"]:
            return signed
        return sign_values(inside.kind, known, key).model_dump(mode="json")

    if kind is SignedDocument:
        return document(values)
    return reduced(kind, values, version, {SignedDocument: document})


def _known_roles(document: dict[str, Any]) -> dict[str, Any]:
    """Without certificates of roles that came later: version 1 would refuse the run for them."""
    certificates = document.get("certificates")
    if certificates is None:
        return document
    kept = [signed for signed in certificates if signed["document"].get("role") in ROLES_OF_1]
    return {**document, "certificates": kept}
