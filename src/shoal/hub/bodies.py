"""Request bodies: capped while they stream, under a deadline, then parsed."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from shoal.hub.state.refusals import Refusal
from shoal.protocol import Message, first_problem

M = TypeVar("M", bound=Message)

BODY_DEADLINE_S = 300.0
"""Long enough for the largest submission over a slow line (16 MiB at 60 kB/s)."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, if it has at most `max_bytes`; no more than that is ever held in memory."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_big(max_bytes)
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await _collect(request, max_bytes)
    except TimeoutError as error:
        raise Refusal(503, "body.slow", f"the body did not arrive within {BODY_DEADLINE_S:.0f} s: try again") from error
    except ClientDisconnect as error:
        raise Refusal(400, "body.incomplete", "the connection was closed before the body was complete") from error


async def _collect(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _too_big(max_bytes)
    return bytes(body)


def _too_big(max_bytes: int) -> Refusal:
    return Refusal(413, "body.too_big", f"the body is larger than the {max_bytes} bytes that are allowed here")


def parse_json(body: bytes, kind: type[M]) -> M:
    """The message in a JSON body, or a refusal that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(422, "body.malformed", f"not a valid {kind.__name__}: {first_problem(error)}") from error
