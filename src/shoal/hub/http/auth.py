"""Who is asking: signed requests, the cheapest check first.

    headers ─► clock within 120 s ─► known node ─► role ─► signature ─► nonce ─► body, capped while it streams ─► hash

The identity comes from the verified header only. A body is read only for a proven signer, up to the route's cap. A
nonce is taken after the signature held, so that nobody can use up another node's, and is kept while the same request
would be within the allowed skew. A key's bucket is looked at after the signature and taken from after the nonce: a
replay costs the key nothing.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shoal.errors import SignatureError
from shoal.hub.http.limits import Edge, too_much
from shoal.hub.service import Context
from shoal.hub.service.calls import SMALL_BODY_BYTES, Call
from shoal.hub.state import NodeRow, Refusal
from shoal.hub.state.nodes import require_welcome
from shoal.protocol import MAX_SKEW_MS, HubClock, Registration, RequestSignature, first_problem, node_id
from shoal.protocol.node import titled
from shoal.protocol.signing import check_date, sign_document, verify_body, verify_request
from shoal.runtime.http import HttpRequest

M = TypeVar("M", bound=BaseModel)

NONCE_MARGIN_MS = 1_000
TOO_FAST = ("rate.key", "this key asks too often: wait as long as Retry-After says; one machine needs one worker")
TOO_NEW = ("rate.registrations", "too many new keys from your address: wait as long as Retry-After says")


async def read_body(edge: Edge, request: HttpRequest, max_bytes: int, who: str = "") -> bytes:
    """The whole body, if it has at most `max_bytes`. It counts as held until the request is answered, under its
    address, or else under `who`."""
    request.sender = request.client or who
    try:
        return await request.body(max_bytes, lambda part, whole: edge.intake.add(request.sender, part, whole))
    except OverflowError as error:
        sentence = f"the body is larger than the {max_bytes} bytes that are allowed here"
        raise Refusal(413, "body.too_big", sentence) from error
    except TimeoutError as error:
        raise Refusal(503, "body.slow", f"{error}: try again") from error
    except ConnectionError as error:
        raise Refusal(400, "body.incomplete", "the connection was closed before the body was complete") from error


def parse_json(body: bytes, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(422, "body.malformed", f"not a valid {kind.__name__}: {first_problem(error)}") from error


async def caller(context: Context, edge: Edge, request: HttpRequest, call: Call) -> tuple[NodeRow | None, Any]:
    """The node that makes this call (None where anyone may make it, or who registers), and the body."""
    max_bytes = context.config.submission_limits.compressed_bytes if call.is_upload else call.max_bytes
    try:
        if call.takes is Registration:
            return None, await _newcomer(context, edge, request)
        if call.roles is not None:
            node, body = await _node(context, edge, request, call, max_bytes)
        else:
            node, body = None, await read_body(edge, request, max_bytes) if call.takes is not None else b""
    except SignatureError as error:
        raise Refusal(401, "auth.signature", f"{error}; was it signed for this run, path and body?") from error
    return node, body if call.takes is None else parse_json(body, call.takes)


async def _node(
    context: Context, edge: Edge, request: HttpRequest, call: Call, max_bytes: int
) -> tuple[NodeRow, bytes]:
    signature = _parse(context, request)
    node = await _find(context, edge, signature.node)
    if node is None:
        unknown = f"node {signature.node[:32]} is not registered: register it with POST /nodes"
        raise Refusal(401, "auth.unknown_node", unknown)
    if call.roles and node.role not in call.roles:
        callers = " or a ".join(map(titled, call.roles))
        raise Refusal(403, "auth.role", f"this call is for a {callers}; this node is a {titled(node.role)}")
    await _admit(context, edge, request, signature, node.public_key, node, call.is_harmless)
    request.node = node.node
    context.storage.arrivals.heard(node.node, context.clock.now_ms())
    if node.role != "worker":
        require_welcome(node, context.clock.now_ms())  # its key was revoked, or the owner has shut it out
    body = await read_body(edge, request, max_bytes, node.node)
    verify_body(signature, body)
    if node.role != "worker":  # while the body came, the owner may have shut its sender out
        require_welcome(await _find(context, edge, node.node) or node, context.clock.now_ms())
    return node, body


async def _newcomer(context: Context, edge: Edge, request: HttpRequest) -> Registration:
    signature = _parse(context, request)
    body = await read_body(edge, request, SMALL_BODY_BYTES, signature.node)
    registration = parse_json(body, Registration)
    if signature.node != node_id(registration.public_key):
        raise SignatureError("the registration's key is not the one that the request is signed with")
    verify_body(signature, body)
    known = await _find(context, edge, signature.node)
    await _admit(context, edge, request, signature, registration.public_key, known)
    return registration


async def _admit(
    context: Context, edge: Edge, request: HttpRequest, signature: RequestSignature, public_key: str,
    node: NodeRow | None, is_harmless: bool = False,
) -> None:  # fmt: skip
    """Verify the signature and take the nonce. Known workers are counted by key; new keys by address, as their list
    would have no end; the owner's certified machines not at all."""
    storage, now_ms = context.storage, context.clock.now_ms()
    if node is None:
        buckets, who, limit = edge.newcomers, request.client, TOO_NEW
    else:
        buckets, who, limit = edge.keys, node.node if node.role == "worker" else "", TOO_FAST

    def count(only_look: bool) -> None:
        wait_s = buckets.take(who, edge.clock.monotonic_s(), only_look) if who else 0.0
        if wait_s > 0:
            raise too_much(*limit, wait_s)

    # the signature covers the path with its query as the client sent it
    verify_request(public_key, context.config.run_id, request.method, request.target, signature, now_ms)
    count(only_look=True)
    nonce = signature.node, signature.nonce, signature.at_ms + MAX_SKEW_MS + NONCE_MARGIN_MS
    is_new = storage.arrivals.take_nonce(*nonce, lasting=not is_harmless and not storage.is_shared)
    if is_new and storage.is_shared and not is_harmless:  # other hubs may have been sent the same request
        is_new = await edge.in_thread(storage.take_nonce, *nonce)
    if not is_new:
        raise Refusal(401, "auth.replay", "this very request was made before: sign it again with a new nonce")
    count(only_look=False)


async def _find(context: Context, edge: Edge, node: str) -> NodeRow | None:
    return context.storage.known(node) or await edge.in_thread(context.storage.find, node)


def _parse(context: Context, request: HttpRequest) -> RequestSignature:
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
