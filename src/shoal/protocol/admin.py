"""What the owner of a run may order: signed documents, each of which is written into the ledger.

    root key ──certifies──► admin key ──signs──► AdminAction        pause, drain, sanctions, relays
    root key ─────────────────────────signs──► AdminAction        these, and whom the run trusts

An action is made once: its `id` is random, the hub remembers those of the last minutes, and refuses older ones by
their date. So whoever sees an action on its way can do no more with it than deliver it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from shoal.errors import SignatureError
from shoal.protocol.lease import PRINTABLE
from shoal.protocol.node import RoleCertificate
from shoal.protocol.signing import Document, Message, SignedDocument, open_document

MAX_RELAYS = 64


class AdminVerb(StrEnum):
    PAUSE = "pause"  # no leases, no batches: the fleet and the trainer rest
    DRAIN = "drain"  # no leases: what is out comes in, and is trained on as far as it goes
    RESUME = "resume"
    SUSPEND = "suspend"
    BAN = "ban"
    PARDON = "pardon"
    ADD_RELAY = "add-relay"
    REMOVE_RELAY = "remove-relay"
    CERTIFY = "certify"  # a certificate more that the root key signed: a validator, or a key that follows another
    REVOKE = "revoke"  # a key is trusted for nothing from now on


class AdminAction(Document):
    """One order. `target` is a node, a relay's address or a public key, as the verb needs it.

    >>> AdminAction(run="r", id="ab" * 8, verb="pause", reason="power cut", issued_at_ms=1).verb.value
    'pause'
    """

    kind: ClassVar[str] = "admin-action"
    run: str
    id: str = Field(pattern="^[0-9a-f]{16,64}$")
    verb: AdminVerb
    target: str = Field(default="", max_length=400, pattern=PRINTABLE)
    reason: str = Field(default="", max_length=300, pattern=PRINTABLE)
    for_s: float = Field(default=0.0, ge=0, le=10**8, allow_inf_nan=False)
    certificates: tuple[SignedDocument, ...] = Field(default=(), max_length=4)
    issued_at_ms: int = Field(ge=0, le=2**53)


class AdminRequest(Message):
    """The signed action; with the certificate of the admin key, unless the root key itself signed it."""

    action: SignedDocument
    certificate: SignedDocument | None = None


class AdminReply(Message):
    """What came of it. `changed` is false if it was so already, or if this very action came before."""

    changed: bool
    message: str


def open_admin(request: AdminRequest, run: str, root_key: str) -> AdminAction:
    """The action, signed for this run by its root key, or by an admin key that the root key certified for this run."""
    trusted = {root_key}
    if request.certificate is not None:
        certificate = open_document(request.certificate, RoleCertificate, root_key)
        if (certificate.run, certificate.role) != (run, "admin"):
            raise SignatureError("the certificate is not that of an admin of this run")
        trusted.add(certificate.public_key)
    action = open_document(request.action, AdminAction, trusted)
    if action.run != run:
        raise SignatureError(f"the action is for run {action.run[:80]}, not for {run}")
    return action
