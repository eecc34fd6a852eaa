"""Schema 2: the first that is migrated from. Written out, and never changed: it is what old databases are like."""

from __future__ import annotations

from alembic import op
from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

revision = "0001"
down_revision = None

metadata = MetaData()

Table("meta", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

Table(
    "nodes",
    metadata,
    Column("node", String, primary_key=True),
    Column("public_key", String, nullable=False, unique=True),
    Column("role", String, nullable=False),
    Column("name", String, nullable=False),
    Column("registered_at_ms", BigInteger, nullable=False),
    Column("software", String, nullable=False),
    Column("state", String, nullable=False),
    Column("accepted", Integer, nullable=False),
    Column("rejected", Integer, nullable=False),
    Column("inconclusive", Integer, nullable=False),
    Column("certain", Integer, nullable=False),
    Column("statistical", Integer, nullable=False),
    Column("credit", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("pending", BigInteger, nullable=False),
    Column("streak", Integer, nullable=False),
    Column("passed", Integer, nullable=False),
    Column("record", Text, nullable=False),
    Index("nodes_by_passed", "passed"),
)

Table(
    "units",
    metadata,
    Column("unit", BigInteger, primary_key=True, autoincrement=False),
    Column("task", String, nullable=False),
    Column("state", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("incarnation", Integer),
    Column("version", Integer),
    Column("submission", String, unique=True),
    Column("step", Integer),
    Column("lost_step", Integer),
    Column("reason", String, nullable=False),
    Index("units_by_state", "state", "step"),
    Index("units_by_lost_step", "lost_step"),
)

Table(
    "leases",
    metadata,
    Column("lease", String, primary_key=True),
    Column("unit", ForeignKey("units.unit"), nullable=False),
    Column("node", ForeignKey("nodes.node"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("request", String, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", String, nullable=False),
    Column("issued_at_ms", BigInteger, nullable=False),
    Column("deadline_ms", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("document", Text, nullable=False),
    UniqueConstraint("unit", "attempt", name="one_lease_per_attempt"),
    UniqueConstraint("node", "request", "unit", name="one_lease_per_request_and_unit"),
    Index("leases_by_state", "state", "deadline_ms"),
)

Table(
    "submissions",
    metadata,
    Column("submission", String, primary_key=True),
    Column("lease", ForeignKey("leases.lease"), nullable=False, unique=True),
    Column("unit", ForeignKey("units.unit"), nullable=False),
    Column("node", ForeignKey("nodes.node"), nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("digest", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("received_at_ms", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("receipt", Text, nullable=False),
    Column("validator", String),
    Column("claimed_until_ms", BigInteger),
    Column("rewards", Text, nullable=False),
    Column("generated_tokens", BigInteger, nullable=False),
    Column("reason", String, nullable=False),
    Column("message", Text, nullable=False),
    Column("decided_at_ms", BigInteger),
    Column("depth", String, nullable=False),
    Column("matures_at_ms", BigInteger),
    Index("submissions_by_state", "state", "unit"),
    Index("submissions_by_maturity", "matures_at_ms"),
    Index("submissions_by_node", "node", "state"),
    Index("submissions_by_decision", "decided_at_ms"),
)

Table(
    "verdicts",
    metadata,
    Column("submission", ForeignKey("submissions.submission"), primary_key=True),
    Column("document", Text, nullable=False),
)

Table(
    "policies",
    metadata,
    Column("incarnation", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("digest", String, nullable=False),
    Column("announced_at_ms", BigInteger, nullable=False),
)

Table(
    "batches",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("document", Text, nullable=False),
)

Table(
    "ledger",
    metadata,
    Column("index", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("previous", String, nullable=False, unique=True),
    Column("hash", String, nullable=False, unique=True),
)

Table(
    "nonces",
    metadata,
    Column("node", String, primary_key=True),
    Column("nonce", String, primary_key=True),
    Column("expires_at_ms", BigInteger, nullable=False),
    Index("nonces_by_expiry", "expires_at_ms"),
)

Table(
    "presence",
    metadata,
    Column("node", String, primary_key=True),
    Column("last_seen_ms", BigInteger, nullable=False),
    Column("doing", String, nullable=False),
    Column("waiting_for", String, nullable=False),
    Column("waiting_since_ms", BigInteger, nullable=False),
    Column("counters", Text, nullable=False),
)

Table(
    "reports",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("metrics", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)

Table(
    "alarms",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("code", String, primary_key=True),
    Column("message", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)


def upgrade() -> None:
    metadata.create_all(op.get_bind(), checkfirst=False)
