"""Nodes and the run they join: registration, heartbeats, role certificates; and what the owner of a run may order.

Both sides must speak the same `PROTOCOL_VERSION`: a hub learns a node's from its registration, a node the hub's from
`RunInfo`. Unknown fields are ignored in answers and signed documents, and refused in requests.

    root key ──certifies──► admin key ──signs──► AdminAction        pause, drain, sanctions, relays
    root key ─────────────────────────signs──► AdminAction        these, and whom the run trusts
    root key ──certifies──► trusted worker, until a date          checked by sample, not each group

Every order is in the ledger and made once: its `id` is random, the hub remembers those of the last minutes, and refuses
older ones by their date. So an intercepted one can only be delivered.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from shoal.errors import ProtocolError, SignatureError
from shoal.protocol.lease import DEFAULT_PROFILE, MAX_HELD, PRINTABLE, ProofParameters, SamplingParameters
from shoal.protocol.policy import PolicyRef
from shoal.protocol.signing import Document, Message, Milliseconds, PublicKey, SignedDocument, open_document

PROTOCOL_VERSION = 4
HEADER_PROTOCOL = "shoal-protocol"
UPGRADE = "pip install -U shoal-rl"
LINK_MBIT = 1000.0  # of the slowest machine, unless a recipe says so (hub.link_mbit)


def check_spoken(who: str, version: int) -> None:
    """Raise `ProtocolError`, which says who is old, unless the peer `who` ("hub" or "node") speaks this version."""
    if version != PROTOCOL_VERSION:
        hub, node = (version, PROTOCOL_VERSION) if who == "hub" else (PROTOCOL_VERSION, version)
        remedy = "the hub is too old: ask the run's owner to upgrade it, or install the shoal that the run uses"
        if node < hub:
            remedy = f"shoal on the node's machine is too old: upgrade it there with: {UPGRADE}"
        raise ProtocolError(f"the hub speaks protocol {hub}, the node speaks {node}: {remedy}")


Role = Literal["hub", "trainer", "validator", "worker", "trusted", "admin"]
"""`trusted`: a worker with a certificate of the root key, whose groups are checked by sample."""
WORKERS: tuple[Role, ...] = ("worker", "trusted")
Liveness = Literal["here", "silent", "gone"]
Name = Annotated[str, Field(max_length=64, pattern=PRINTABLE)]
"""Of a counter or a lease, where a node says it: what it says is kept, so it is short."""
MAX_URLS = 64
Url = Annotated[str, Field(max_length=2048)]
NodeState = StrEnum("NodeState", "ACTIVE SUSPENDED BANNED")


def titled(role: str) -> str:
    return "trusted worker" if role == "trusted" else role


class RoleCertificate(Document):
    """The root key says: this key may act as this role in this run; a trusted worker until `expires_at_ms`."""

    kind: ClassVar[str] = "role-certificate"
    run: str
    role: Role
    public_key: PublicKey
    issued_at_ms: Milliseconds
    expires_at_ms: Milliseconds | None = None


class Vouch(Document):
    """An owner's key says: this machine is mine. What it earns counts as the owner's."""

    kind: ClassVar[str] = "vouch"
    owner: PublicKey
    node: str = Field(pattern="^[0-9a-f]{32}$")
    issued_at_ms: Milliseconds


class ModelSize(Message):
    """0 is unknown. No version is larger than `payload_bytes`, adapters and files included."""

    parameters: int = Field(default=0, ge=0)
    payload_bytes: int = Field(default=0, ge=0)


class RunInfo(Document):
    """What a node needs to take part; signed by the hub. Weights come from `sources` (relays); from `last_resort` (the
    origin) only what none of those can give. `hubs` are further addresses of the same run; keys in `revoked` are
    trusted for nothing; a node refuses a policy larger than `model` says before it takes memory or disk for it.
    `link_mbit` is of the slowest machine: all roles derive their deadlines from it (`runtime/sizing.py`)."""

    kind: ClassVar[str] = "run-info"
    protocol_version: int = PROTOCOL_VERSION
    run: str = Field(max_length=256)
    name: str = Field(max_length=256)
    root_key: PublicKey
    certificates: tuple[SignedDocument, ...] = Field(max_length=256)
    sources: tuple[Url, ...] = Field(max_length=MAX_URLS)
    last_resort: tuple[Url, ...] = Field(default=(), max_length=MAX_URLS)
    environment: str = Field(max_length=256)
    environment_digest: str = Field(max_length=64)
    sampling: SamplingParameters
    proof: ProofParameters = ProofParameters()
    profiles: tuple[Annotated[str, Field(max_length=98)], ...] = Field(default=(DEFAULT_PROFILE,), max_length=256)
    group_size: int
    max_staleness: int
    steps: int
    hubs: tuple[Url, ...] = Field(default=(), max_length=MAX_URLS)
    revoked: tuple[Annotated[str, Field(max_length=64)], ...] = Field(default=(), max_length=1024)
    model: ModelSize = ModelSize()
    link_mbit: FiniteFloat = Field(default=LINK_MBIT, gt=0)


class Registration(Message):
    """A node introduces itself. Trusted roles add the certificate that the root key signed for them."""

    public_key: PublicKey
    name: str = Field(default="", max_length=64, pattern=PRINTABLE)
    role: Role = "worker"
    certificate: SignedDocument | None = None
    protocol_version: int = PROTOCOL_VERSION
    software: str = Field(default="", max_length=128, pattern=PRINTABLE)
    vouch: SignedDocument | None = Field(default=None)


class HubClock(Document):
    """The time at the hub, in answer to a request with a wrong date. It names the request, so it answers no other."""

    kind: ClassVar[str] = "hub-clock"
    run: str
    node: str
    nonce: str
    now_ms: Milliseconds


class NodeView(Message):
    """A node as the hub sees it. Three independent axes: trust (`on_probation`, strikes), `liveness`, and sanction
    (`state`, until when). `window`: how many leases it may hold now."""

    node: str
    name: str
    role: Role
    state: NodeState
    accepted: int = 0
    rejected: int = 0
    unsure: int = 0
    strikes: int = 0
    credit: int = 0
    pending: int = 0
    on_probation: bool = False
    reason: str = ""
    doing: str = ""
    last_seen_ms: Milliseconds = 0
    liveness: Liveness = Field(default="here")
    until_ms: Milliseconds | None = Field(default=None)
    suspensions: int = Field(default=0)
    window: int = Field(default=0)
    owner: str = Field(default="")


class Heartbeat(Message):
    """What a node does, and its `counters` (e.g. tokens, busy_s, idle_s). `waiting_s`: how long it has waited.
    `progress`: tokens generated of each lease; a lease that makes progress is renewed."""

    doing: str = Field(default="", max_length=200, pattern=PRINTABLE)
    waiting_for: str = Field(default="", max_length=200, pattern=PRINTABLE)
    waiting_s: float = Field(default=0.0, ge=0, le=10**9)
    counters: dict[Name, FiniteFloat] = Field(default={}, max_length=32)
    progress: dict[Name, int] = Field(default={}, max_length=MAX_HELD)


class HeartbeatReply(Message):
    """`deadlines`: of the leases in the heartbeat's `progress`; ended leases are left out."""

    node: NodeView
    policy: PolicyRef | None = None
    finished: bool = False
    deadlines: dict[Name, int] = Field(default={}, max_length=MAX_HELD)


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
    """One order. `target` is a node, a relay's address or a public key, as the verb needs it."""

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
    """The result. `changed` is false if nothing changed, or if this very action came before."""

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
