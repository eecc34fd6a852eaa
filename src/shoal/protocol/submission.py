"""Submissions: what a worker hands in (bulk: msgpack + zstd), and the receipt that the hub promises with.

Token ids travel as little-endian uint32, log-probabilities as little-endian float32: compact, and no list of a
million Python integers is ever built while decoding.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from shoal.protocol.lease import MAX_GROUP, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS
from shoal.protocol.policy import HEX_256, LedgerHead
from shoal.protocol.signing import Document, Milliseconds

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
    """A completion with its proofs, as a worker hands it in.

    `given` (uint32 LE: start, length, start, length, …) are the spans of tokens that the environment said: they were
    not drawn, their log-probabilities are 0, and nothing is learned from them.
    """

    proofs: Proofs = b""
    given: PackedTokens = b""


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished group. It names its lease and the policy that produced it; the validator believes neither."""

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
    import numpy as np  # here, for whoever only moves messages and weights does without it

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
    """The hub's promise: these bytes are on its disk, and will be judged. No crash loses them.

    `ledger` is the ledger's head at that time: whoever keeps receipts can show that the ledger was rewritten later.
    """

    kind: ClassVar[str] = "receipt"
    run: str
    node: str
    lease: str
    unit: int
    submission: str = Field(pattern=HEX_256)
    size_bytes: int
    received_at_ms: Milliseconds
    ledger: LedgerHead | None = None
