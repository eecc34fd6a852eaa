"""What proves credit: the signed documents that a ledger row points to by their hashes."""

from __future__ import annotations

from pydantic import Field

from shoal.protocol.signing import Message, SignedDocument

MAX_EVIDENCE_PER_PAGE = 200


class Evidence(Message):
    """The documents behind ledger row `row`: the hub's signed `Receipt`, the validator's signed `Verdict`."""

    row: int = Field(ge=0)
    receipt: SignedDocument | None = None
    verdict: SignedDocument | None = None


class EvidencePage(Message):
    """Evidence in order of its rows."""

    evidence: tuple[Evidence, ...] = Field(max_length=MAX_EVIDENCE_PER_PAGE)
