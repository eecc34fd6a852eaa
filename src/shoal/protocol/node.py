"""Nodes and the run they join: registration, heartbeats, role certificates."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import Field, FiniteFloat

from shoal.protocol.lease import DEFAULT_PROFILE, ProofParameters, SamplingParameters
from shoal.protocol.policy import PolicyRef
from shoal.protocol.signing import Document, Message, SignedDocument

PROTOCOL_VERSION = 1
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"  # what others say is shown in terminals: no control characters

Role = Literal["hub", "trainer", "validator", "worker"]


class NodeState(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"
    BANNED = "banned"


class RoleCertificate(Document):
    """The root key says: this key may act as this role in this run."""

    kind: ClassVar[str] = "role-certificate"
    run: str
    role: Role
    public_key: str = Field(pattern="^[0-9a-f]{64}$")
    issued_at_ms: int


class RunInfo(Document):
    """What a node needs to take part; signed by the hub. The join URL pins the root key's fingerprint.

    Weights come from `sources` (relays); from `last_resort` (the origin) only what none of those can give.
    """

    kind: ClassVar[str] = "run-info"
    protocol_version: int = PROTOCOL_VERSION
    run: str
    name: str
    root_key: str
    certificates: tuple[SignedDocument, ...]
    sources: tuple[str, ...]
    last_resort: tuple[str, ...] = ()
    environment: str
    environment_digest: str
    sampling: SamplingParameters
    proof: ProofParameters = ProofParameters()
    profiles: tuple[str, ...] = (DEFAULT_PROFILE,)
    group_size: int
    max_staleness: int
    steps: int


class Registration(Message):
    """A node introduces itself. Trusted roles add the certificate that the root key signed for them."""

    public_key: str = Field(pattern="^[0-9a-f]{64}$")
    name: str = Field(default="", max_length=64, pattern=PRINTABLE)
    role: Role = "worker"
    certificate: SignedDocument | None = None
    protocol_version: int = PROTOCOL_VERSION
    software: str = Field(default="", max_length=128)


class NodeView(Message):
    """A node as the hub sees it; also what a worker is told about itself."""

    node: str
    name: str
    role: Role
    state: NodeState
    accepted: int = 0
    rejected: int = 0
    inconclusive: int = 0
    strikes: int = 0
    credit: int = 0
    pending: int = 0
    on_probation: bool = False
    reason: str = ""
    doing: str = ""
    last_seen_ms: int = 0


class Heartbeat(Message):
    """I am alive, this is what I am doing, and this is how fast (`counters`: e.g. tokens, busy_s, idle_s).

    `waiting_s` is how long the wait has lasted: a node that often waits for the same thing does not wait all the time.
    """

    doing: str = Field(default="", max_length=200, pattern=PRINTABLE)
    waiting_for: str = Field(default="", max_length=200, pattern=PRINTABLE)
    waiting_s: float = Field(default=0.0, ge=0, le=10**9)
    counters: dict[str, FiniteFloat] = Field(default={}, max_length=32)


class HeartbeatReply(Message):
    node: NodeView
    policy: PolicyRef | None = None
    finished: bool = False
