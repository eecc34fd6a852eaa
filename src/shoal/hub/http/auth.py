"""Who is asking: signed requests, checked from cheap to dear.

    headers ─► clock within 120 s ─► known node ─► role ─► signature ─► nonce ─► body, capped while it streams ─► hash

The identity comes from the verified header only. A body is read only for who has proven to have signed for it, and
never beyond the route's cap. A nonce is taken after the signature held, so that nobody can use up another node's, and
is kept for as long as the same request would still be within the allowed skew. For the same reason a key's bucket is
looked at once the signature held, and taken from once the nonce was new: a replay costs the key nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from shoal.errors import SignatureError
from shoal.hub.http.middleware import Edge, visit_of
from shoal.hub.limits import too_much
from shoal.hub.service import Context
from shoal.hub.state.commands import Refusal
from shoal.hub.state.nodes import require_welcome
from shoal.hub.state.rows import NodeRow
from shoal.protocol import MAX_SKEW_MS, HubClock, Registration, RequestSignature, Role, first_problem, node_id
from shoal.protocol.signing import check_date, sign_document, verify_body, verify_request

M = TypeVar("M", bound=BaseModel)

BODY_DEADLINE_S = 300.0  # enough for the largest submission over a slow line (16 MiB at 60 kB/s)
BODY_PAUSE_S = 10.0  # a sender may be behind the floor by so much
BODY_FLOOR_BYTES_S = 4 * 1024
SMALL_BODY_BYTES = 64 * 1024
NONCE_MARGIN_MS = 1_000
TOO_FAST = ("rate.key", "this key asks too often: wait as long as Retry-After says; one machine needs one worker")
TOO_NEW = ("rate.registrations", "too many new keys from your address: wait as long as Retry-After says")


async def read_body(request: Request, max_bytes: int, who: str = "") -> bytes:
    """The whole body, if it has at most `max_bytes`; no more than that is ever held in memory. It counts as held until
    the request is answered, under the address it comes from, or else under `who`."""
    too_big = Refusal(413, "body.too_big", f"the body is larger than the {max_bytes} bytes that are allowed here")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_big
    edge: Edge = request.app.state.edge
    visit = visit_of(request.scope)
    visit.sender = visit.client or who
    body, began_s = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(began_s + BODY_PAUSE_S) as deadline:
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_big
                visit.body_bytes = len(body)
                edge.intake.add(visit.sender, len(part), len(body))
                deadline.reschedule(began_s + min(BODY_DEADLINE_S, BODY_PAUSE_S + len(body) / BODY_FLOOR_BYTES_S))
    except TimeoutError as error:
        sentence = f"the body came slower than {BODY_FLOOR_BYTES_S // 1024} KiB/s, or took {BODY_DEADLINE_S:.0f} s"
        raise Refusal(503, "body.slow", f"{sentence}: try again") from error
    except ClientDisconnect as error:
        raise Refusal(400, "body.incomplete", "the connection was closed before the body was complete") from error
    return bytes(body)


def parse_json(body: bytes, kind: type[M]) -> M:
    """The message in a JSON body, or a refusal that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(422, "body.malformed", f"not a valid {kind.__name__}: {first_problem(error)}") from error


async def authenticate(
    context: Context, request: Request, roles: tuple[Role, ...] = (), max_bytes: int = SMALL_BODY_BYTES
) -> tuple[NodeRow, bytes]:
    """Who sent a signed request, and its body; or a refusal: 401 unproven, 403 wrong role, 413 too big."""
    signature = _parse(context, request)
    with _proven():
        node = cast(NodeRow, await run_in_threadpool(_admit, context, request, signature, roles, None))
        body = await read_body(request, max_bytes, node.node)
        verify_body(signature, body)
    if node.role != "worker":  # a body may take its time, and the owner may have shut its sender out meanwhile
        found = await run_in_threadpool(_find, context, node.node)
        require_welcome(found or node)
    return node, body


async def authenticate_newcomer(context: Context, request: Request) -> Registration:
    """A registration that is signed by the very key it brings."""
    signature = _parse(context, request)
    with _proven():
        body = await read_body(request, SMALL_BODY_BYTES, signature.node)
        registration = parse_json(body, Registration)
        if signature.node != node_id(registration.public_key):
            raise SignatureError("the registration's key is not the one that the request is signed with")
        verify_body(signature, body)
        await run_in_threadpool(_admit, context, request, signature, (), registration.public_key)
    return registration


@contextmanager
def _proven() -> Iterator[None]:
    try:
        yield
    except SignatureError as error:
        raise Refusal(401, "auth.signature", f"{error}; was it signed for this run, path and body?") from error


def _parse(context: Context, request: Request) -> RequestSignature:
    """The signature, if it is dated now; whoever is off the hub's clock is told what it shows."""
    try:
        signature = RequestSignature.from_headers(request.headers)
    except SignatureError as error:
        raise Refusal(401, "auth.unsigned", str(error)) from error
    now_ms = context.clock.now_ms()
    try:
        check_date(signature, now_ms)
    except SignatureError as error:
        clock = HubClock(run=context.config.run_id, node=signature.node, nonce=signature.nonce, now_ms=now_ms)
        raise Refusal(401, "auth.skew", str(error), clock=sign_document(clock, context.config.key)) from error
    return signature


def _find(context: Context, node: str) -> NodeRow | None:
    with context.storage.read() as reader:
        return reader.node(node)


def _admit(
    context: Context, request: Request, signature: RequestSignature, roles: tuple[Role, ...], new_key: str | None
) -> NodeRow | None:
    """The node that signed, if it may make this call; `new_key` is that of a registration. Workers are counted by key,
    new keys by address, or nobody could keep a list of them; whoever has a certificate is the owner's own."""
    edge: Edge = request.app.state.edge
    visit, node = visit_of(request.scope), _find(context, signature.node)
    public_key = new_key or (node.public_key if node is not None else None)
    if public_key is None:
        sentence = f"node {signature.node[:32]} is not registered: register it with POST /nodes"
        raise Refusal(401, "auth.unknown_node", sentence)
    if node is None:
        buckets, who, limit = edge.newcomers, visit.client, TOO_NEW
    elif roles and node.role not in roles:
        raise Refusal(403, "auth.role", f"this call is for a {' or a '.join(roles)}; this node is a {node.role}")
    else:
        buckets, who, limit = edge.keys, node.node if node.role == "worker" else "", TOO_FAST

    def count(only_look: bool) -> None:
        wait_s = buckets.take(who, edge.clock.monotonic_s(), only_look) if who else 0.0
        if wait_s > 0:
            raise too_much(*limit, wait_s)

    # The signature covers the path with its query as the client sent it.
    path: bytes = (request.scope.get("raw_path") or request.scope["path"].encode()).split(b"?")[0]
    query: bytes = request.scope.get("query_string", b"")
    target = (path + b"?" + query if query else path).decode("latin-1")
    verify_request(public_key, context.config.run_id, request.method, target, signature, context.clock.now_ms())
    if new_key is None and node is not None:
        visit.node = node.node
        if node.role != "worker":
            require_welcome(node)  # its key was revoked, or the owner has shut it out
    count(only_look=True)
    with context.storage.write(durable=False) as transaction:
        if not transaction.take_nonce(signature.node, signature.nonce, signature.at_ms + MAX_SKEW_MS + NONCE_MARGIN_MS):
            raise Refusal(401, "auth.replay", "this very request was made before: sign it again with a new nonce")
        if new_key is None:  # only of a known node is it noted that it was here
            transaction.touch_presence(signature.node, context.clock.now_ms())
    count(only_look=False)
    return node
