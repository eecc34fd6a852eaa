"""The tables, with the reason on each constraint. States are text, times whole milliseconds, documents JSON.

nodes ◄── leases ──► units ◄── submissions ◄── verdicts        shown ──► leases
policies    batches    ledger ◄── ledger_outbox    ledger_subjects    tasks    evaluations
leaders    nonces    presence    reports    alarms    meta
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = 5

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

nodes = Table(
    "nodes",
    metadata,
    Column("node", String, primary_key=True),
    # A node id is derived from the key, so two rows with one key would be two accounts of one identity.
    Column("public_key", String, nullable=False, unique=True),
    Column("role", String, nullable=False),
    Column("name", String, nullable=False),
    Column("registered_at_ms", BigInteger, nullable=False),
    Column("software", String, nullable=False),
    Column("state", String, nullable=False),
    Column("accepted", Integer, nullable=False),
    Column("rejected", Integer, nullable=False),
    Column("unsure", Integer, nullable=False),
    Column("certain", Integer, nullable=False),
    Column("statistical", Integer, nullable=False),
    Column("credit", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("pending", BigInteger, nullable=False),
    Column("streak", Integer, nullable=False),
    Column("passed", Integer, nullable=False),
    Column("record", Text, nullable=False),
    Column("owner", String, nullable=False),
    Column("window", Integer, nullable=False),
    Column("lapsed", Integer, nullable=False),
    Column("lapses", Integer, nullable=False),
    Column("pace_ms", BigInteger, nullable=False),
    Column("suspensions", Integer, nullable=False),
    Column("until_ms", BigInteger),
    Column("soft", Integer, nullable=False),
    Column("vouch", Text, nullable=False),
    Column("network", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("failed_check", String, nullable=False),
    Column("failed_at_ms", BigInteger, nullable=False),
    Column("doubt", Float, nullable=False),
    Column("gains", Text, nullable=False),
    # Established nodes are few where fresh keys are many: whether one is here is asked with every lease.
    Index("nodes_by_passed", "passed"),
)

units = Table(
    "units",
    metadata,
    # One row per number: a unit's task and seeds follow from it, so two rows would train one group twice.
    Column("unit", BigInteger, primary_key=True, autoincrement=False),
    Column("task", String, nullable=False),
    Column("state", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("incarnation", Integer),
    Column("version", Integer),
    # A submission fills one unit; unique, so that no copy of a group can be trained under another number.
    Column("submission", String, unique=True),
    # A single column, not a list: a unit cannot be in two batches.
    Column("step", Integer),
    Column("lost_step", Integer),
    Column("reason", String, nullable=False),
    Index("units_by_state", "state", "step"),
    Index("units_by_lost_step", "lost_step"),
)

leases = Table(
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
    Column("hard_deadline_ms", BigInteger, nullable=False),
    Column("progress", BigInteger, nullable=False),
    Column("ended_at_ms", BigInteger),
    Column("granted", Integer, nullable=False),
    Column("brief", Boolean, nullable=False),
    # One lease per attempt: two nodes that race for a unit cannot both get it.
    UniqueConstraint("unit", "attempt", name="one_lease_per_attempt"),
    # The same request gets the same leases: a retry cannot take a unit twice.
    UniqueConstraint("node", "request", "unit", name="one_lease_per_request_and_unit"),
    Index("leases_by_state", "state", "deadline_ms"),
    # What a node holds is asked with each of its heartbeats: without this, all active leases would be gone through.
    # The state comes first, so that who holds anything can be told from the index alone.
    Index("leases_by_node", "state", "node"),
)

shown = Table(
    "shown",
    metadata,
    # One row per part: of two that race for the same place, one is refused and says it again.
    Column("lease", ForeignKey("leases.lease"), primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("tokens", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

submissions = Table(
    "submissions",
    metadata,
    Column("submission", String, primary_key=True),
    # One submission per lease: another body for it is a 409, whoever wins the race.
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
    # Drawn once, when the row is made: nobody can have it drawn again.
    Column("depth", String, nullable=False),
    # A single column, not a list of what is due: credit matures once or is void, never both.
    Column("matures_at_ms", BigInteger),
    # How much of its task the group solved: the whole rewards beside it may hold more than the task's part.
    Column("pass_rate", Float),
    # As it was submitted: audits are shared by what they cost, before anybody has looked at it.
    Column("tokens", BigInteger, nullable=False),
    Index("submissions_by_state", "state", "unit"),
    Index("submissions_by_maturity", "matures_at_ms"),
    Index("submissions_by_node", "node", "state"),
    Index("submissions_by_decision", "decided_at_ms"),
)

verdicts = Table(
    "verdicts",
    metadata,
    # One verdict per submission: the first stands, credit is given once.
    Column("submission", ForeignKey("submissions.submission"), primary_key=True),
    Column("document", Text, nullable=False),
)

policies = Table(
    "policies",
    metadata,
    # One digest per (incarnation, version): weights that differ are another incarnation.
    Column("incarnation", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("digest", String, nullable=False),
    Column("announced_at_ms", BigInteger, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    # One batch per step: once written it never changes.
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("document", Text, nullable=False),
)

tasks = Table(
    "tasks",
    metadata,
    # One row per task that was seen; only whoever writes a batch changes it, so that the draw of a unit is the same
    # in whatever order verdicts come.
    Column("task", String, primary_key=True),
    Column("groups", Integer, nullable=False),
    Column("rate", Float, nullable=False),
    Column("solved", Integer, nullable=False),
    Column("pool", String, nullable=False),
    Column("last_unit", BigInteger, nullable=False),
    Index("tasks_by_pool", "pool"),
)

evaluations = Table(
    "evaluations",
    metadata,
    # One row per slice of a version's evaluation: two validators that race for it cannot both count.
    Column("incarnation", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("first", Integer, primary_key=True, autoincrement=False),
    Column("digest", String, nullable=False),
    Column("tasks", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("validator", String),
    Column("claimed_until_ms", BigInteger),
    Column("tries", Integer, nullable=False),
    Column("scores", Text, nullable=False),
    Column("document", Text, nullable=False),
    Column("decided_at_ms", BigInteger),
    Index("evaluations_by_state", "state"),
)

ledger = Table(
    "ledger",
    metadata,
    # The chain has one row per index: two writers cannot both append to the same head.
    Column("index", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("previous", String, nullable=False, unique=True),
    Column("hash", String, nullable=False, unique=True),
)

ledger_subjects = Table(
    "ledger_subjects",
    metadata,
    # Which entries are about a unit or a node: found without reading the chain. It proves nothing; the chain does.
    Column("subject", String, primary_key=True),
    Column("index", BigInteger, primary_key=True, autoincrement=False),
)

ledger_outbox = Table(
    "ledger_outbox",
    metadata,
    # What decisions record waits here, written in their own transactions; one poster moves it into the chain, so that
    # accepting work never waits for the chain's last row.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("kind", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    sqlite_autoincrement=True,  # a number is never used again, so that the order is that of writing
)

leaders = Table(
    "leaders",
    metadata,
    # One leader for each kind of background work, by the database's clock: hubs that share a database have no other.
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)

nonces = Table(
    "nonces",
    metadata,
    # A nonce is taken once per node: the same signed request cannot be replayed.
    Column("node", String, primary_key=True),
    Column("nonce", String, primary_key=True),
    Column("expires_at_ms", BigInteger, nullable=False),
    Index("nonces_by_expiry", "expires_at_ms"),
)

presence = Table(
    "presence",
    metadata,
    Column("node", String, primary_key=True),
    Column("last_seen_ms", BigInteger, nullable=False),
    Column("doing", String, nullable=False),
    Column("waiting_for", String, nullable=False),
    Column("waiting_since_ms", BigInteger, nullable=False),
    Column("counters", Text, nullable=False),
)

reports = Table(
    "reports",
    metadata,
    # One report per step: a resumed trainer that repeats a step replaces what it said about it.
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("metrics", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)

alarms = Table(
    "alarms",
    metadata,
    # One alarm per step and kind: a bad step is reported once, not once per group.
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("code", String, primary_key=True),
    Column("message", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)
