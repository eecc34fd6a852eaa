"""The tables, with the reason on each constraint, and their rows as the hub's dataclasses.

nodes ◄── leases ──► units ◄── submissions ◄── verdicts        shown ──► leases
policies    batches    ledger ◄── ledger_outbox    ledger_subjects    tasks    evaluations
leaders    nonces    presence    reports    alarms    meta

States are text, times whole milliseconds, documents JSON. A table of one kind of row has that dataclass's fields as
columns, in their order. There are no migrations before the first release: another schema is refused.
"""

import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from pydantic import BaseModel

from shoal.errors import ConfigError
from shoal.hub.state.commands import AddVerdict, RaiseAlarm
from shoal.hub.state.rows import EvaluationRow, LeaseRow, NodeRow, ShownRow, SubmissionRow, TaskRow, TraceRow, UnitRow

SCHEMA_VERSION = 7

WHOLE = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # there a whole number that is the key is where the row lies
_TYPES: dict[Any, Any] = {int: WHOLE, float: sa.Float, bool: sa.Boolean, bytes: sa.LargeBinary}  # the rest is text

R = TypeVar("R")
metadata = sa.MetaData()


@dataclass(frozen=True)
class Presence:
    node: str
    last_seen_ms: int = 0
    doing: str = ""
    waiting_for: str = ""
    waiting_since_ms: int = 0
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outgoing:
    """A row for the ledger that is not in the chain yet; numbered in the order of recording."""

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
    name: str, kind: type | Mapping[str, type], keys: tuple[str, ...], *rules: sa.UniqueConstraint | sa.Index,
    refer: Mapping[str, str] = types.MappingProxyType({}), unique: tuple[str, ...] = (), **options: Any,
) -> sa.Table:  # fmt: skip
    """A table of a dataclass, or of columns by name; `refer` are columns that name rows of other tables."""
    columns = field_types(kind) if isinstance(kind, type) else {name: (sort, False) for name, sort in kind.items()}
    made: list[sa.Column[Any]] = []
    for column, (sort, optional) in columns.items():
        rest: dict[str, Any] = {"primary_key": column in keys, "nullable": optional, "unique": column in unique or None}
        foreign = [sa.ForeignKey(refer[column])] if column in refer else []
        made.append(sa.Column(column, _TYPES.get(sort, sa.Text), *foreign, **rest, autoincrement=bool(options)))
    return sa.Table(name, metadata, *made, *rules, **options)


# fmt: off
meta = _table("meta", {"key": str, "value": str}, ("key",))
# Whether an established node is here is asked with every lease; fresh keys may be many.
# A node id is derived from the key, so two rows with one key would be two accounts of one identity.
nodes = _table("nodes", NodeRow, ("node",), sa.Index("nodes_by_passed", "passed"), unique=("public_key",))
# One row per number: a unit's task and seeds follow from it, so two rows would train one group twice.
# `step` is a single column, not a list: a unit cannot be in two batches.
# A submission fills one unit; unique, so that no copy of a group can be trained under another number.
units = _table("units", UnitRow, ("unit",), sa.Index("units_by_state", "state", "step"),
               sa.Index("units_by_lost_step", "lost_step"), unique=("submission",))
leases = _table(
    "leases", LeaseRow, ("lease",),
    # One lease per attempt: two nodes that race for a unit cannot both get it.
    sa.UniqueConstraint("unit", "attempt", name="one_lease_per_attempt"),
    # The same request gets the same leases: a retry cannot take a unit twice.
    sa.UniqueConstraint("node", "request", "unit", name="one_lease_per_request_and_unit"),
    sa.Index("leases_by_state", "state", "deadline_ms"),
    # Asked with each heartbeat. The state comes first: the index alone tells which nodes hold anything.
    sa.Index("leases_by_node", "state", "node"), refer={"unit": "units.unit", "node": "nodes.node"},
)
# One row per part: of two that race for the same place, one is refused and comes again.
shown = _table("shown", ShownRow, ("lease", "part"), refer={"lease": "leases.lease"})
# One submission per lease: of two different bodies one gets a 409.
# `matures_at_ms` is a single column, not a list of what is due: credit matures once or is void, never both.
submissions = _table(
    "submissions", SubmissionRow, ("submission",), sa.Index("submissions_by_state", "state", "unit"),
    sa.Index("submissions_by_maturity", "matures_at_ms"), sa.Index("submissions_by_node", "node", "state"),
    sa.Index("submissions_by_decision", "decided_at_ms"), unique=("lease",),
    refer={"lease": "leases.lease", "unit": "units.unit", "node": "nodes.node"},
)
# One verdict per submission: the first stands, credit is given once.
verdicts = _table("verdicts", AddVerdict, ("submission",), refer={"submission": "submissions.submission"})
# What a validator saw at each token, until it is among the records.
traces = _table("traces", TraceRow, ("submission",), refer={"submission": "submissions.submission"})
# One digest per (incarnation, version): weights that differ are another incarnation.
policies = _table("policies", {"incarnation": int, "version": int, "digest": str, "announced_at_ms": int},
                  ("incarnation", "version"))
# One batch per step: once written it never changes.
batches = _table("batches", {"step": int, "document": str}, ("step",))
# Only with a batch these change, so that the draw of a unit does not depend on the order of verdicts.
tasks = _table("tasks", TaskRow, ("task",), sa.Index("tasks_by_pool", "pool"))
# One row per slice of a version's evaluation: two validators that race for it cannot both count.
evaluations = _table("evaluations", EvaluationRow, ("incarnation", "version", "first"),
                     sa.Index("evaluations_by_state", "state"))
# The chain has one row per index: two writers cannot both append to the same head.
ledger = _table("ledger", {"index": int, "kind": str, "body": str, "at_ms": int, "previous": str, "hash": str},
                ("index",), unique=("previous", "hash"))
# Which entries are about a unit or a node: found without reading the chain. It proves nothing; the chain does.
ledger_subjects = _table("ledger_subjects", {"subject": str, "index": int}, ("subject", "index"))
# Decisions record here, in their own transactions; one poster moves it into the chain, so that accepting work never
# waits for the chain's last row. A number is never used again: the order is that of writing.
ledger_outbox = _table("ledger_outbox", Outgoing, ("id",), sqlite_autoincrement=True)
# One leader for each kind of background work, by the database's clock: hubs that share a database have no other.
leaders = _table("leaders", {"name": str, "holder": str, "until_ms": int}, ("name",))
# A nonce is taken once per node: the same signed request cannot be replayed.
nonces = _table("nonces", {"node": str, "nonce": str, "expires_at_ms": int}, ("node", "nonce"),
                sa.Index("nonces_by_expiry", "expires_at_ms"))
presence = _table("presence", Presence, ("node",))
# One report per step: a resumed trainer that repeats a step replaces what it said about it.
reports = _table("reports", {"step": int, "metrics": str, "at_ms": int}, ("step",))
# One alarm per step and kind: a bad step is reported once, not once per group.
alarms = _table("alarms", RaiseAlarm, ("step", "code"))
# fmt: on


class Mapped(Generic[R]):
    """A table of a dataclass. `columns` lists them for a SELECT, `is_named` finds a row by its keys. An update leaves
    keys and references alone, and finds only a row that is still in the state `:was`."""

    def __init__(self, table: sa.Table, kind: type[R]) -> None:
        self._kind, self.name = kind, table.name
        self._names = tuple(column.name for column in table.columns)
        self.keys = [column.name for column in table.primary_key.columns]
        found = [(name, _conversions(sort)) for name, (sort, _) in field_types(kind).items()]
        self._parse = [(name, parse) for name, (parse, _) in found if parse]
        self._dump = [(name, dump) for name, (_, dump) in found if dump]
        self.columns = ", ".join(f'{table.name}."{name}"' for name in self._names)
        self.size = len(self._names)
        self.is_named = " AND ".join(f"{key} = :{key}" for key in self.keys)
        self.insert = insert(table)
        fixed = {*self.keys, *(column.name for column in table.columns if column.foreign_keys)}
        changes = ", ".join(f'"{name}" = :{name}' for name in self._names if name not in fixed)
        self.update = f"UPDATE {table.name} SET {changes} WHERE {self.is_named} AND state = :was"
        overwritten = ", ".join(f'"{name}" = excluded."{name}"' for name in self._names if name not in self.keys)
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(self.keys)}) DO UPDATE SET {overwritten}"

    def read(self, row: Sequence[Any]) -> R:
        """From a row that begins with the table's columns; past `__init__`, which takes longer than the query."""
        made = object.__new__(self._kind)
        values = made.__dict__
        values.update(zip(self._names, row, strict=False))
        for name, parse in self._parse:
            values[name] = parse(values[name])
        return made

    def write(self, row: R) -> dict[str, Any]:
        values = dict(vars(row))
        for name, dump in self._dump:
            values[name] = dump(values[name])
        return values


def insert(table: sa.Table, but: str = "") -> str:
    """A new row, each column by its name; `but` is one that the database numbers."""
    names = [column.name for column in table.columns if column.name != but]
    listed = ", ".join(f'"{name}"' for name in names)
    return f"INSERT INTO {table.name} ({listed}) VALUES ({', '.join(f':{name}' for name in names)})"


def _conversions(sort: Any) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """How a field of this type is read from its column and written to it; None: as it is."""
    if get_origin(sort) is dict:
        return json.loads, lambda value: json.dumps(value) if value else "{}"
    if get_origin(sort) is tuple:
        return lru_cache(4096)(lambda text: tuple(json.loads(text))), json.dumps
    if sort is bool:
        return bool, None
    if isinstance(sort, type) and issubclass(sort, StrEnum):
        return {member.value: member for member in sort}.__getitem__, lambda member: member.value
    if isinstance(sort, type) and issubclass(sort, BaseModel):
        return lru_cache(4096)(sort.model_validate_json), lambda model: model.model_dump_json()
    return None, None


NODES, UNITS, LEASES = Mapped(nodes, NodeRow), Mapped(units, UnitRow), Mapped(leases, LeaseRow)
SUBMISSIONS, VERDICTS = Mapped(submissions, SubmissionRow), Mapped(verdicts, AddVerdict)
SHOWN, TASKS, EVALUATIONS = Mapped(shown, ShownRow), Mapped(tasks, TaskRow), Mapped(evaluations, EvaluationRow)
TRACES = Mapped(traces, TraceRow)
PRESENCE, ALARMS, OUTBOX = Mapped(presence, Presence), Mapped(alarms, RaiseAlarm), Mapped(ledger_outbox, Outgoing)


def prepare(connection: sa.Connection, where: str, create: bool = True) -> None:
    """Make sure that the database has this version's schema. Without `create` an empty database is refused."""
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
