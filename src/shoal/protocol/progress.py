"""Progress that is shown: the finished chunks of a lease that a node on probation is still generating.

Anyone can say how many tokens are generated. Token ids with their proofs can be checked before the group is finished,
and must be the first ones of what is submitted later. Bulk, like submissions: msgpack + zstd.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from pydantic import Field

from shoal.protocol.lease import MAX_GROUP, MAX_NEW_TOKENS
from shoal.protocol.policy import HEX_256
from shoal.protocol.signing import Message, Milliseconds
from shoal.protocol.submission import PackedTokens, Proofs

SHOWN_BYTES = 1024 * 1024
"""The most that one message may be, packed or not; senders send much less at a time (`worker.showing`)."""


class ShownChunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Finished chunks of one rollout from token `start` on: `tokens` (uint32 LE), and their proofs back to back.

    A chunk has `proof.rows` tokens; only the last one of a finished rollout may have fewer.
    """

    rollout: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUP)]
    start: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS)]
    tokens: PackedTokens
    proofs: Proofs


class ShownProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is new of a lease since the last message, a rollout at most once. The same again is harmless."""

    chunks: Annotated[list[ShownChunks], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]


class ProgressReply(Message):
    """How many tokens of each rollout the hub has; the next chunks begin there. `deadline_ms` is the lease's now."""

    tokens: tuple[int, ...] = Field(max_length=MAX_GROUP)
    deadline_ms: Milliseconds


class ShownPrefix(Message):
    """What was shown of a rollout: so many tokens and bytes of proofs, and the hash of both (`shown_digest`)."""

    rollout: int = Field(ge=0)
    tokens: int = Field(ge=1)
    proof_bytes: int = Field(ge=0)
    digest: str = Field(pattern=HEX_256)


def shown_digest(tokens: bytes, proofs: bytes) -> str:
    """The SHA-256 of packed tokens followed by their proofs."""
    return hashlib.sha256(tokens + proofs).hexdigest()
