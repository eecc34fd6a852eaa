"""Handing in past the hub: the bytes go to an object store, the promise still comes from the hub.

worker ── UploadRequest (hash, size) ──► hub      would it be taken at all? refused here like any submission
       ◄── signed UploadTicket ─────────          one URL for one object, of this size and this hash
       ── PUT, these headers ─────────► store
       ── UploadCommit (hash) ────────► hub       reads the object once, checks it like any submission
       ◄── signed Receipt ──────────────          the same that `PUT /submissions/{lease}` gives
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shoal.protocol.policy import HEX_256
from shoal.protocol.signing import Document, Message, Milliseconds

MAX_UPLOAD_BYTES = 2**40


class UploadRequest(Message):
    """I have a submission for this lease: these many bytes, of this SHA-256."""

    submission: str = Field(pattern=HEX_256)
    size_bytes: int = Field(ge=1, le=MAX_UPLOAD_BYTES)


class UploadTicket(Document):
    """Leave to put one object into the run's store: a PUT to `url` with exactly these `headers`, before it expires.

    `needed` is false if the hub has these very bytes already: there is nothing to send, only to commit again.
    """

    kind: ClassVar[str] = "upload-ticket"
    run: str
    node: str
    lease: str
    submission: str = Field(pattern=HEX_256)
    size_bytes: int
    needed: bool
    url: str = Field(default="", max_length=8192)
    headers: dict[str, str] = Field(default={}, max_length=16)
    expires_at_ms: Milliseconds = 0


class UploadCommit(Message):
    """The bytes of this SHA-256 are in the store: take them in."""

    submission: str = Field(pattern=HEX_256)
