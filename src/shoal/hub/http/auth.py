"""Who is asking: signed requests, checked from cheap to dear.

    headers ─► clock within 120 s ─► known node ─► role ─► signature ─► nonce ─► body, capped while it streams ─► hash

The identity comes from the verified header only. A body is read only for who has proven to have signed for it, and
never beyond the route's cap. A nonce is taken after the signature held, so that nobody can use up another node's, and
is kept for as long as the same request would still be within the allowed skew. For the same reason a key's bucket is
looked at once the signature held, and taken from once the nonce was new: a replay costs the key nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from shoal.errors import SignatureError
from shoal.hub.http.middleware import Edge, visit_of
from shoal.hub.limits import too_much
from shoal.hub.service import Context
from shoal.hub.state.commands import Refusal
from shoal.hub.state.nodes import require_welcome
from shoal.hub.state.rows import NodeRow
from shoal.protocol.identity import node_id
from shoal.protocol.node import HubClock, Registration, Role
from shoal.protocol.signing import (
    MAX_SKEW_MS,
    Message,
    RequestSignature,
    first_problem,
    sign_document,
    verify_body,
    verify_request,
)

M = TypeVar("M", bound=Message)

BODY_DEADLINE_S = 300.0
"""Long enough for the largest submission over a slow line (16 MiB at 60 kB/s)."""
BODY_PAUSE_S = 10.0
"""A sender may be behind the floor by so much."""
BODY_FLOOR_BYTES_S = 4 * 1024


async def read_body(request: Request, max_bytes: int, who: str = "") -> bytes:
    """The whole body, if it has at most `max_bytes`; no more than that is ever held in memory.

    It counts as held until the request is answered, under the address it comes from, or else under `who`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_big(max_bytes)
    edge: Edge = request.app.state.edge
    visit = visit_of(request.scope)
    visit.body = edge.intake.receiving(visit.client or who)
    body, began_s = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(began_s + BODY_PAUSE_S) as deadline:
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise _too_big(max_bytes)
                visit.body.add(len(part))
                allowed_s = min(BODY_DEADLINE_S, BODY_PAUSE_S + len(body) / BODY_FLOOR_BYTES_S)
                deadline.reschedule(began_s + allowed_s)
    except TimeoutError as error:
        sentence = (
            f"the body came too slowly: it has {BODY_DEADLINE_S:.0f} s, at {BODY_FLOOR_BYTES_S // 1024} KiB/s or more, "
            f"and may be behind by {BODY_PAUSE_S:.0f} s: try again"
        )
        raise Refusal(503, "body.slow", sentence) from error
    except ClientDisconnect as error:
        raise Refusal(400, "body.incomplete", "the connection was closed before the body was complete") from error
    return bytes(body)


def _too_big(max_bytes: int) -> Refusal:
    return Refusal(413, "body.too_big", f"the body is larger than the {max_bytes} bytes that are allowed here")


def parse_json(body: bytes, kind: type[M]) -> M:
    """The message in a JSON body, or a refusal that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(422, "body.malformed", f"not a valid {kind.__name__}: {first_problem(error)}") from error


SMALL_BODY_BYTES = 64 * 1024
NONCE_MARGIN_MS = 1_000
SKEW = "auth.skew"
TOO_FAST = ("rate.key", "this key asks too often: wait as long as Retry-After says; one machine needs one worker")
TOO_NEW = ("rate.registrations", "too many new keys from your address: wait as long as Retry-After says")


@dataclass(frozen=True)
class Caller:
    """A verified request: who sent it, and its body."""

    node: NodeRow
    body: bytes


async def authenticate(
    context: Context, request: Request, roles: tuple[Role, ...] = (), max_bytes: int = SMALL_BODY_BYTES
) -> Caller:
    """The caller of a signed request, or a refusal: 401 unproven, 403 wrong role, 413 too big. No roles: any."""
    signature = _parse(request.headers)
    _check_clock(context, signature)
    node = await run_in_threadpool(_identify, context, request, signature, roles)
    body = await read_body(request, max_bytes, node.node)
    _check_body(signature, body)
    if node.role != "worker":  # a body may take its time, and the owner may have shut its sender out meanwhile
        require_welcome(await run_in_threadpool(_find, context, node.node))
    return Caller(node, body)


async def authenticate_newcomer(context: Context, request: Request) -> Registration:
    """A registration that is signed by the very key it brings."""
    signature = _parse(request.headers)
    _check_clock(context, signature)
    body = await read_body(request, SMALL_BODY_BYTES, signature.node)
    registration = parse_json(body, Registration)
    if signature.node != node_id(registration.public_key):
        raise Refusal(401, "auth.signature", "the registration's key is not the one that the request is signed with")
    _check_body(signature, body)
    await run_in_threadpool(_introduce, context, request, signature, registration.public_key)
    return registration


def _parse(headers: Mapping[str, str]) -> RequestSignature:
    try:
        return RequestSignature.from_headers(headers)
    except SignatureError as error:
        raise Refusal(401, "auth.unsigned", str(error)) from error


def _check_clock(context: Context, signature: RequestSignature) -> None:
    """Before anything is read; the sentence is the one that `verify_request` has for it."""
    now_ms = context.clock.now_ms()
    skew_ms = signature.at_ms - now_ms
    if abs(skew_ms) > MAX_SKEW_MS:
        run, key = context.config.run_id, context.config.key
        clock = HubClock(run=run, node=signature.node, nonce=signature.nonce, now_ms=now_ms)
        sentence = (
            f"the request's clock is {abs(skew_ms) / 1000:.0f} s {'ahead' if skew_ms > 0 else 'behind'}; at most "
            f"{MAX_SKEW_MS // 1000} s are allowed: set this machine's clock (for instance with NTP)"
        )
        raise Refusal(401, SKEW, sentence, clock=sign_document(clock, key))


def _find(context: Context, node: str) -> NodeRow:
    with context.storage.read() as reader:
        row = reader.node(node)
    if row is None:
        raise Refusal(401, "auth.unknown_node", f"node {node[:32]} is not registered: register it with POST /nodes")
    return row


async def signed(
    context: Context, request: Request, kind: type[M], *roles: Role, max_bytes: int = SMALL_BODY_BYTES
) -> tuple[NodeRow, M]:
    """Who sent a signed request, and the message in its body."""
    caller = await authenticate(context, request, roles, max_bytes)
    return caller.node, parse_json(caller.body, kind)


def _check_body(signature: RequestSignature, body: bytes) -> None:
    try:
        verify_body(signature, body)
    except SignatureError as error:
        raise Refusal(401, "auth.signature", str(error)) from error


def _identify(context: Context, request: Request, signature: RequestSignature, roles: tuple[Role, ...]) -> NodeRow:
    """The node that signed, if it may make this call: one thread for all that reads or writes."""
    edge: Edge = request.app.state.edge
    node = _find(context, signature.node)
    if roles and node.role not in roles:
        raise Refusal(403, "auth.role", f"this call is for a {' or a '.join(roles)}; this node is a {node.role}")
    _verify(context, request, signature, node.public_key)
    visit_of(request.scope).node = node.node
    if node.role != "worker":
        require_welcome(node)  # its key was revoked, or the owner has shut it out
    limited = node.role == "worker"  # whoever has a certificate is the owner's own
    if limited:
        _require_room(edge.keys.wait_s(node.node, edge.clock.monotonic_s()), TOO_FAST)
    _take_nonce(context, signature, is_known=True)
    if limited:
        _require_room(edge.keys.take(node.node, edge.clock.monotonic_s()), TOO_FAST)
    return node


def _introduce(context: Context, request: Request, signature: RequestSignature, public_key: str) -> None:
    """A key that registers, new or not. New ones are counted under their address, or nobody could keep a list of them;
    strangers leave nothing else but a nonce."""
    edge, client = request.app.state.edge, visit_of(request.scope).client
    with context.storage.read() as reader:
        is_known = reader.node(signature.node) is not None
    counted = bool(client) and not is_known
    if counted:
        _require_room(edge.newcomers.wait_s(client, edge.clock.monotonic_s()), TOO_NEW)
    _verify(context, request, signature, public_key)
    if is_known:
        _require_room(edge.keys.take(signature.node, edge.clock.monotonic_s()), TOO_FAST)
    _take_nonce(context, signature, is_known=False)
    if counted:
        _require_room(edge.newcomers.take(client, edge.clock.monotonic_s()), TOO_NEW)


def _require_room(wait_s: float, limit: tuple[str, str]) -> None:
    if wait_s > 0:
        raise too_much(*limit, wait_s)


def _verify(context: Context, request: Request, signature: RequestSignature, public_key: str) -> None:
    now_ms = context.clock.now_ms()
    try:
        verify_request(public_key, context.config.run_id, request.method, _target(request), signature, now_ms)
    except SignatureError as error:
        raise Refusal(401, "auth.signature", f"{error}; was it signed for this run, path and body?") from error


def _take_nonce(context: Context, signature: RequestSignature, is_known: bool) -> None:
    """Only of a known node is it noted that it was here."""
    expires_at_ms = signature.at_ms + MAX_SKEW_MS + NONCE_MARGIN_MS
    with context.storage.write(durable=False) as transaction:
        if not transaction.take_nonce(signature.node, signature.nonce, expires_at_ms):
            raise Refusal(401, "auth.replay", "this very request was made before: sign it again with a new nonce")
        if is_known:
            transaction.touch_presence(signature.node, context.clock.now_ms())


def _target(request: Request) -> str:
    """The path with its query, as the client sent it: what its signature covers."""
    raw_path: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    query: bytes = request.scope.get("query_string", b"")
    path = raw_path.split(b"?")[0]
    return (path + b"?" + query if query else path).decode("latin-1")
