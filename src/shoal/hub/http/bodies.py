"""Request bodies: capped while they stream, under a deadline and a floor on the rate, counted while held; then parsed.

part ─► not beyond the route's cap ─► not slower than the floor ─► not more than may be held at a time ─► next part
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from shoal.hub.http.middleware import Edge, visit_of
from shoal.hub.state.commands import Refusal
from shoal.protocol import Message, first_problem

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
