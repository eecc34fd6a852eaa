"""Submissions: what a worker submits (bulk: msgpack + zstd), and the hub's receipt.

Token ids travel as little-endian uint32, log-probabilities as float32, so no list of a million Python integers is
built.

Spans (`pack_spans`) of tool tokens are (start, length) pairs as little-endian uint32, in order, not touching. A span
never begins a completion (the model speaks first) and never ends one.

Shown progress (`ShownProgress`): finished chunks of a lease that a node on probation is still generating. They can be
checked before the group is finished, and the submission must begin with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from shoal.errors import ProtocolError
from shoal.protocol.lease import MAX_GROUP, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS
from shoal.protocol.policy import HEX_256, LedgerHead
from shoal.protocol.signing import Document, Message, Milliseconds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SUBMISSION_FORMAT = 1

Finish = Literal["eos", "length"]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]
PackedTokens = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_NEW_TOKENS)]
PackedPrompt = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_PROMPT_TOKENS)]
Proofs = Annotated[bytes, msgspec.Meta(max_length=64 * 1024 * 1024)]


class Completed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One completion as it travels: `tokens` (uint32 LE), the log-probability of each (float32 LE), how it ended."""

    tokens: PackedTokens
    logprobs: PackedTokens
    finish: Finish

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        return unpack_tokens(self.tokens)

    @property
    def logprob_values(self) -> npt.NDArray[np.float32]:
        import numpy as np

        return np.frombuffer(self.logprobs, dtype="<f4").astype(np.float32)


class Rollout(Completed, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A completion with its proofs, as submitted. `given` (uint32 LE: start, length, start, length, …) are the spans of
    tool tokens: not drawn, with log-probabilities of 0, and not trained on."""

    proofs: Proofs = b""
    given: PackedTokens = b""


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished group. It names its lease and policy; the validator believes neither."""

    format: int
    run: ShortText
    node: ShortText
    lease: ShortText
    unit: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    policy_digest: ShortText
    prompt: PackedPrompt
    rollouts: Annotated[list[Rollout], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]
    engine: ShortText = ""

    @property
    def prompt_ids(self) -> npt.NDArray[np.int64]:
        return unpack_tokens(self.prompt)


def pack_tokens(token_ids: npt.ArrayLike) -> bytes:
    import numpy as np  # here, because relays do not need numpy

    return np.asarray(token_ids).astype("<u4").tobytes()


def unpack_tokens(data: bytes) -> npt.NDArray[np.int64]:
    import numpy as np

    return np.frombuffer(data, dtype="<u4").astype(np.int64)


def pack_logprobs(values: npt.ArrayLike) -> bytes:
    import numpy as np

    return np.asarray(values).astype("<f4").tobytes()


def submission_digest(body: bytes) -> str:
    """Names a submission: the SHA-256 of its bytes as sent."""
    return hashlib.sha256(body).hexdigest()


class Receipt(Document):
    """The hub's promise: these bytes are on its disk and will be judged. `ledger` is the head at that time; a kept
    receipt can prove that the ledger was rewritten later."""

    kind: ClassVar[str] = "receipt"
    run: str
    node: str
    lease: str
    unit: int
    submission: str = Field(pattern=HEX_256)
    size_bytes: int
    received_at_ms: Milliseconds
    ledger: LedgerHead | None = None


Spans = tuple[tuple[int, int], ...]
PAIR_BYTES = 8


def pack_spans(spans: Iterable[tuple[int, int]]) -> bytes:
    flat = [number for span in spans for number in span]
    return pack_tokens(flat) if flat else b""


def unpack_spans(data: bytes, tokens: int) -> Spans:
    """The spans of a completion of so many tokens, or a `ProtocolError` with the reason."""
    if not data:
        return ()
    if len(data) % PAIR_BYTES:
        raise ProtocolError(f"{len(data)} bytes are no pairs of numbers")
    flat = unpack_tokens(data).tolist()
    spans, end = tuple(zip(flat[::2], flat[1::2], strict=True)), 0
    for start, length in spans:
        if length == 0 or start <= end or start + length >= tokens:
            raise ProtocolError(
                f"{length} tokens from token {start} on cannot be tool tokens: they are empty, touch those "
                f"before, or begin or end the {tokens} tokens"
            )
        end = start + length
    return spans


def drawn_mask(data: bytes, tokens: int) -> npt.NDArray[np.bool_]:
    """Which of a completion's tokens the model drew; the others are tool tokens."""
    import numpy as np

    mask = np.ones(tokens, dtype=np.bool_)
    for start, length in unpack_spans(data, tokens):
        mask[start : start + length] = False
    return mask


SHOWN_BYTES = 1024 * 1024
"""The most that one message may be, packed or not; senders send much less at a time (`worker.showing`)."""


class ShownChunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Finished chunks of one rollout from token `start` on, with proofs. A chunk has `proof.rows` tokens; only a
    finished rollout's last one may have fewer."""

    rollout: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUP)]
    start: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS)]
    tokens: PackedTokens
    proofs: Proofs


class ShownProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new chunks of a lease since the last message, each rollout at most once. Repeating it is harmless."""

    chunks: Annotated[list[ShownChunks], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]


class ProgressReply(Message):
    """The tokens of each rollout that the hub has; the next chunks begin there. `deadline_ms`: of the lease now."""

    tokens: tuple[int, ...] = Field(max_length=MAX_GROUP)
    deadline_ms: Milliseconds


class ShownPrefix(Message):
    """What was shown of a rollout: its tokens and bytes of proofs, and the hash of both (`shown_digest`)."""

    rollout: int = Field(ge=0)
    tokens: int = Field(ge=1)
    proof_bytes: int = Field(ge=0)
    digest: str = Field(pattern=HEX_256)


def shown_digest(tokens: bytes, proofs: bytes) -> str:
    return hashlib.sha256(tokens + proofs).hexdigest()
