"""What proves credit: the signed documents that a ledger row points to by their hashes; and who saw the ledger when."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shoal.protocol.policy import HEX_256
from shoal.protocol.signing import Document, Message, Milliseconds, SignedDocument

MAX_EVIDENCE_PER_PAGE = 200


class Evidence(Message):
    """The documents behind ledger row `row`: the hub's signed `Receipt`, the validator's signed `Verdict`."""

    row: int = Field(ge=0)
    receipt: SignedDocument | None = None
    verdict: SignedDocument | None = None


class EvidencePage(Message):
    """Evidence in order of its rows."""

    evidence: tuple[Evidence, ...] = Field(max_length=MAX_EVIDENCE_PER_PAGE)


class WitnessedHead(Document):
    """A witness says: at this time the ledger ended with this row, and everything that I had seen before led to it."""

    kind: ClassVar[str] = "ledger-witness"
    run: str
    index: int = Field(ge=0)
    hash: str = Field(pattern=HEX_256)
    at_ms: Milliseconds = Field(ge=0)
