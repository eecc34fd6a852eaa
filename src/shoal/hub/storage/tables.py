"""The tables, with the reason on each constraint. States are text, times whole milliseconds, documents JSON.

nodes ◄── leases ──► units ◄── submissions ◄── verdicts        shown ──► leases
policies    batches    ledger ◄── ledger_outbox    ledger_subjects    tasks    evaluations
leaders    nonces    presence    reports    alarms    meta

A table that holds one kind of row has that dataclass's fields as columns, in their order: a new field is a new column.
There are no migrations before the first release: a database of another schema is refused.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

import sqlalchemy as sa

from shoal.errors import ConfigError
from shoal.hub.state.commands import AddVerdict, RaiseAlarm
from shoal.hub.state.rows import EvaluationRow, LeaseRow, NodeRow, ShownRow, SubmissionRow, TaskRow, UnitRow

SCHEMA_VERSION = 5

WHOLE = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # there a whole number that is the key is where the row lies
_TYPES: dict[Any, Any] = {int: WHOLE, float: sa.Float, bool: sa.Boolean, bytes: sa.LargeBinary}  # the rest is text


@dataclass(frozen=True)
class Presence:
    """When a node was last heard of, and what it said."""

    node: str
    last_seen_ms: int = 0
    doing: str = ""
    waiting_for: str = ""
    waiting_since_ms: int = 0
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outgoing:
    """What a decision recorded for the ledger and is not in the chain yet; numbered in the order of recording."""

    id: int
    kind: str
    body: dict[str, Any]
    at_ms: int


def field_types(kind: type) -> dict[str, tuple[Any, bool]]:
    """A dataclass's fields: the type of each, and whether it may be None."""
    hints, found = get_type_hints(kind), {}
    for name in (each.name for each in fields(kind)):
        parts = get_args(hints[name]) if get_origin(hints[name]) in (Union, types.UnionType) else (hints[name],)
        found[name] = (next(part for part in parts if part is not type(None)), type(None) in parts)
    return found


def _table(
    name: str,
    kind: type,
    keys: tuple[str, ...],
    *rules: sa.UniqueConstraint | sa.Index,
    refer: Mapping[str, str] = types.MappingProxyType({}),
    unique: tuple[str, ...] = (),
    **options: Any,
) -> sa.Table:
    """`refer` are columns that name rows of other tables."""
    columns: list[sa.Column[Any]] = [
        sa.Column(
            column,
            _TYPES.get(sort, sa.Text),
            *([sa.ForeignKey(refer[column])] if column in refer else []),
            primary_key=column in keys,
            nullable=optional,
            unique=column in unique or None,
            autoincrement=bool(options),
        )
        for column, (sort, optional) in field_types(kind).items()
    ]
    return sa.Table(name, metadata, *columns, *rules, **options)


metadata = sa.MetaData()

meta = sa.Table(
    "meta", metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False)
)

nodes = _table(
    "nodes",
    NodeRow,
    ("node",),
    # Established nodes are few where fresh keys are many: whether one is here is asked with every lease.
    sa.Index("nodes_by_passed", "passed"),
    # A node id is derived from the key, so two rows with one key would be two accounts of one identity.
    unique=("public_key",),
)

units = _table(
    "units",
    UnitRow,
    # One row per number: a unit's task and seeds follow from it, so two rows would train one group twice.
    # `step` is a single column, not a list: a unit cannot be in two batches.
    ("unit",),
    sa.Index("units_by_state", "state", "step"),
    sa.Index("units_by_lost_step", "lost_step"),
    # A submission fills one unit; unique, so that no copy of a group can be trained under another number.
    unique=("submission",),
)

leases = _table(
    "leases",
    LeaseRow,
    ("lease",),
    # One lease per attempt: two nodes that race for a unit cannot both get it.
    sa.UniqueConstraint("unit", "attempt", name="one_lease_per_attempt"),
    # The same request gets the same leases: a retry cannot take a unit twice.
    sa.UniqueConstraint("node", "request", "unit", name="one_lease_per_request_and_unit"),
    sa.Index("leases_by_state", "state", "deadline_ms"),
    # What a node holds is asked with each of its heartbeats: without this, all active leases would be gone through.
    # The state comes first, so that who holds anything can be told from the index alone.
    sa.Index("leases_by_node", "state", "node"),
    refer={"unit": "units.unit", "node": "nodes.node"},
)

# One row per part: of two that race for the same place, one is refused and says it again.
shown = _table("shown", ShownRow, ("lease", "part"), refer={"lease": "leases.lease"})

submissions = _table(
    "submissions",
    SubmissionRow,
    ("submission",),
    sa.Index("submissions_by_state", "state", "unit"),
    # A single column, not a list of what is due: credit matures once or is void, never both.
    sa.Index("submissions_by_maturity", "matures_at_ms"),
    sa.Index("submissions_by_node", "node", "state"),
    sa.Index("submissions_by_decision", "decided_at_ms"),
    refer={"lease": "leases.lease", "unit": "units.unit", "node": "nodes.node"},
    # One submission per lease: another body for it is a 409, whoever wins the race.
    unique=("lease",),
)

# One verdict per submission: the first stands, credit is given once.
verdicts = _table("verdicts", AddVerdict, ("submission",), refer={"submission": "submissions.submission"})

policies = sa.Table(
    "policies",
    metadata,
    # One digest per (incarnation, version): weights that differ are another incarnation.
    sa.Column("incarnation", WHOLE, primary_key=True, autoincrement=False),
    sa.Column("version", WHOLE, primary_key=True, autoincrement=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("announced_at_ms", WHOLE, nullable=False),
)

batches = sa.Table(
    "batches",
    metadata,
    # One batch per step: once written it never changes.
    sa.Column("step", WHOLE, primary_key=True, autoincrement=False),
    sa.Column("document", sa.Text, nullable=False),
)

# One row per task that was seen; only whoever writes a batch changes it, so that the draw of a unit is the same in
# whatever order verdicts come.
tasks = _table("tasks", TaskRow, ("task",), sa.Index("tasks_by_pool", "pool"))

# One row per slice of a version's evaluation: two validators that race for it cannot both count.
evaluations = _table(
    "evaluations", EvaluationRow, ("incarnation", "version", "first"), sa.Index("evaluations_by_state", "state")
)

ledger = sa.Table(
    "ledger",
    metadata,
    # The chain has one row per index: two writers cannot both append to the same head.
    sa.Column("index", WHOLE, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("at_ms", WHOLE, nullable=False),
    sa.Column("previous", sa.Text, nullable=False, unique=True),
    sa.Column("hash", sa.Text, nullable=False, unique=True),
)

ledger_subjects = sa.Table(
    "ledger_subjects",
    metadata,
    # Which entries are about a unit or a node: found without reading the chain. It proves nothing; the chain does.
    sa.Column("subject", sa.Text, primary_key=True),
    sa.Column("index", WHOLE, primary_key=True, autoincrement=False),
)

# What decisions record waits here, written in their own transactions; one poster moves it into the chain, so that
# accepting work never waits for the chain's last row. A number is never used again: the order is that of writing.
ledger_outbox = _table("ledger_outbox", Outgoing, ("id",), sqlite_autoincrement=True)

leaders = sa.Table(
    "leaders",
    metadata,
    # One leader for each kind of background work, by the database's clock: hubs that share a database have no other.
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("until_ms", WHOLE, nullable=False),
)

nonces = sa.Table(
    "nonces",
    metadata,
    # A nonce is taken once per node: the same signed request cannot be replayed.
    sa.Column("node", sa.Text, primary_key=True),
    sa.Column("nonce", sa.Text, primary_key=True),
    sa.Column("expires_at_ms", WHOLE, nullable=False),
    sa.Index("nonces_by_expiry", "expires_at_ms"),
)

presence = _table("presence", Presence, ("node",))

reports = sa.Table(
    "reports",
    metadata,
    # One report per step: a resumed trainer that repeats a step replaces what it said about it.
    sa.Column("step", WHOLE, primary_key=True, autoincrement=False),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("at_ms", WHOLE, nullable=False),
)

# One alarm per step and kind: a bad step is reported once, not once per group.
alarms = _table("alarms", RaiseAlarm, ("step", "code"))


def prepare(connection: sa.Connection, where: str, create: bool = True) -> None:
    """Make sure that the database has this version's schema; `where` names it in messages. Without `create` an empty
    database is refused."""
    if not sa.inspect(connection).has_table(meta.name):
        if not create:
            raise ConfigError(f"there is no run in {where}; has its hub been started?")
        metadata.create_all(connection, checkfirst=False)
        connection.execute(meta.insert().values(key="schema_version", value=str(SCHEMA_VERSION)))
        return
    query = sa.select(meta.c.value).where(meta.c.key == "schema_version")
    found: str | None = connection.execute(query).scalar_one_or_none()
    if found is None or not found.isdigit():
        raise ConfigError(f"{where} is not a hub's database; move it away or use another one")
    if int(found) != SCHEMA_VERSION:
        newer = "a newer shoal", "upgrade shoal, or use another folder"
        older = "an older shoal", "finish that run with the version that began it, or start another in another folder"
        writer, remedy = newer if int(found) > SCHEMA_VERSION else older
        raise ConfigError(f"{where} was written by {writer} (schema {found}, this one has {SCHEMA_VERSION}): {remedy}")


def unhurried(connection: sa.Connection) -> sa.Connection:
    """The same transaction without the limits that keep a hub's short ones short: whole tables are gone through."""
    if connection.dialect.name == "postgresql":
        for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(sa.text(f"SET LOCAL {limit} TO 0"))
    return connection
