"""Applying commands through SQLAlchemy Core, inside one write transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ClauseElement,
    ColumnElement,
    Table,
    bindparam,
    case,
    delete,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from shoal import ledger
from shoal.hub.state.commands import (
    AddBatch,
    AddPolicy,
    AddShown,
    AddVerdict,
    Command,
    RaiseAlarm,
    Record,
    SaveEvaluation,
    SaveLease,
    SaveNode,
    SaveSubmission,
    SaveTask,
    SaveUnit,
)
from shoal.hub.state.rows import Progress
from shoal.hub.storage import prepared, tables
from shoal.hub.storage.protocol import Presence, StaleRow
from shoal.hub.storage.queries import UNJUDGED, SqlReader
from shoal.protocol import LedgerEntry, StepReport


class SqlWriter(SqlReader):
    """Implements `protocol.Writer`."""

    def apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            try:
                _APPLY[type(command)](self, command)
                self._applied(command)
            except IntegrityError as error:
                if not is_overtaken(error):
                    raise
                raise StaleRow(f"{type(command).__name__} contradicts what is stored: {error.orig}") from error

    def _applied(self, command: Command) -> None:
        """For a subclass that counts."""

    def lock_nodes(self, nodes: Iterable[str]) -> None:
        """Writers exclude each other, unless a subclass says otherwise."""

    def frontier(self) -> Progress:
        return self.progress()

    def post(self, entries: Sequence[LedgerEntry], up_to: int) -> None:
        outbox = tables.ledger_outbox
        self._connection.execute(insert(tables.ledger), [_entry_values(entry) for entry in entries])
        about = [{"subject": name, "index": entry.index} for entry in entries for name in ledger.subjects(entry)]
        if about:
            self._connection.execute(insert(tables.ledger_subjects), about)
        self._connection.execute(delete(outbox).where(outbox.c.id <= up_to))

    def put_setting(self, key: str, value: str) -> None:
        self._upsert(tables.meta, ["key"], {"key": key, "value": value})

    def put_presence(self, presence: Presence) -> None:
        values = {**vars(presence), "counters": json.dumps(presence.counters)}
        self._change("put presence", self._put_presence, values)

    def _put_presence(self) -> ClauseElement:
        table = tables.presence
        rest: dict[str, Any] = {name: bindparam(name) for name in table.columns.keys() if name != "node"}  # noqa: SIM118
        fresh = self._insert(table).values(node=bindparam("node"), **rest)
        said: dict[str, Any] = {name: fresh.excluded[name] for name in rest}
        said["last_seen_ms"] = _later(fresh.excluded.last_seen_ms, table.c.last_seen_ms)
        return fresh.on_conflict_do_update(index_elements=["node"], set_=said)

    def touch_presence(self, node: str, now_ms: int) -> None:
        fresh = {**vars(Presence(node, last_seen_ms=now_ms)), "counters": "{}"}
        self._change("touch presence", self._touch_presence, fresh)

    def _touch_presence(self) -> ClauseElement:
        table = tables.presence
        fresh = self._insert(table).values({column.name: bindparam(column.name) for column in table.columns})
        seen = {"last_seen_ms": _later(fresh.excluded.last_seen_ms, table.c.last_seen_ms)}
        return fresh.on_conflict_do_update(index_elements=["node"], set_=seen)

    def put_report(self, report: StepReport, at_ms: int) -> None:
        values = {"step": report.step, "metrics": json.dumps(report.metrics), "at_ms": at_ms}
        self._upsert(tables.reports, ["step"], values)

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:
        values = {"node": node, "nonce": nonce, "expires_at_ms": expires_at_ms}
        return bool(self._change("take nonce", self._take_nonce, values).rows)

    def _take_nonce(self) -> ClauseElement:
        table = tables.nonces
        taken = self._insert(table).values({column.name: bindparam(column.name) for column in table.columns})
        return taken.on_conflict_do_nothing().returning(table.c.nonce)

    def forget_nonces(self, before_ms: int, limit: int) -> int:
        table = tables.nonces
        key = tuple_(table.c.node, table.c.nonce)
        expired = select(table.c.node, table.c.nonce).where(table.c.expires_at_ms < before_ms).limit(limit)
        return self._connection.execute(delete(table).where(key.in_(expired))).rowcount

    def forget_shown(self, before_ms: int) -> int:
        leases, submissions, table = tables.leases, tables.submissions, tables.shown
        undecided = select(submissions.c.lease).where(UNJUDGED)
        ended = select(leases.c.lease).where(leases.c.ended_at_ms < before_ms, leases.c.lease.not_in(undecided))
        return self._connection.execute(delete(table).where(table.c.lease.in_(ended))).rowcount

    def _save_unit(self, command: SaveUnit) -> None:
        self._save(tables.units, "unit", vars(command.row), command.was)

    def _save_lease(self, command: SaveLease) -> None:
        self._save(tables.leases, "lease", vars(command.row), command.was)

    def _save_submission(self, command: SaveSubmission) -> None:
        values = {**vars(command.row), "rewards": json.dumps(command.row.rewards)}
        self._save(tables.submissions, "submission", values, command.was)

    def _save_node(self, command: SaveNode) -> None:
        row = command.row
        values = {**vars(row), "record": row.record.model_dump_json(), "gains": row.gains.model_dump_json()}
        self._save(tables.nodes, "node", values, command.was)

    def _save_evaluation(self, command: SaveEvaluation) -> None:
        row, table = command.row, tables.evaluations
        values = {**vars(row), "state": row.state.value, "scores": json.dumps(row.scores)}
        if command.was is None:
            self._connection.execute(insert(table).values(**values))
            return
        key = (table.c.incarnation == row.incarnation, table.c.version == row.version, table.c.first == row.first)
        changed = update(table).where(*key, table.c.state == command.was.value).values(**values)
        if self._connection.execute(changed).rowcount != 1:
            raise StaleRow(f"evaluation {row.key} is no longer {command.was.value}")

    def _save_task(self, command: SaveTask) -> None:
        self._upsert(tables.tasks, ["task"], {**vars(command.row), "pool": command.row.pool.value})

    def _add_policy(self, command: AddPolicy) -> None:
        values = {**command.policy.model_dump(), "announced_at_ms": command.announced_at_ms}
        self._connection.execute(insert(tables.policies).values(**values))

    def _add_batch(self, command: AddBatch) -> None:
        values = {"step": command.batch.step, "document": command.batch.model_dump_json()}
        self._connection.execute(insert(tables.batches).values(**values))

    def _add_verdict(self, command: AddVerdict) -> None:
        self._change("add verdict", lambda: _inserting(tables.verdicts), vars(command))

    def _add_shown(self, command: AddShown) -> None:
        values = {**vars(command.row), "tokens": json.dumps(command.row.tokens)}
        self._change("add shown", lambda: _inserting(tables.shown), values)

    def _raise_alarm(self, command: RaiseAlarm) -> None:
        self._upsert(tables.alarms, ["step", "code"], asdict(command))

    def _record(self, command: Record) -> None:
        ledger.append(None, command.kind, command.body, command.at_ms)  # what cannot be chained fails here
        values = {"kind": command.kind, "body": json.dumps(command.body), "at_ms": command.at_ms}
        self._change("record", lambda: _inserting(tables.ledger_outbox, but="id"), values)

    def _save(self, table: Table, key: str, values: dict[str, Any], was: StrEnum | None) -> None:
        values = {**values, "state": values["state"].value}
        if was is None:
            self._change(f"insert {table.name}", lambda: _inserting(table), values)
            return
        changed = {"was_state": was.value, **{f"new_{name}": value for name, value in values.items()}}
        done = self._change(f"update {table.name}", lambda: _updating(table, key), changed)
        if done.changed != 1:
            raise StaleRow(f"{table.name} {values[key]} is no longer {was.value}")

    def _change(self, name: str, build: Callable[[], ClauseElement], values: dict[str, Any]) -> prepared.Answer:
        """A change that is made often: built and compiled once for each kind of writer."""
        return prepared.run(self._connection, self._driver, (type(self), name), build, values)

    def _insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT that can say what to do about a row that is there; both databases spell it alike."""
        return sqlite.insert(table) if self._connection.dialect.name == "sqlite" else postgresql.insert(table)

    def _upsert(self, table: Table, keys: list[str], values: dict[str, Any]) -> None:
        statement = self._insert(table).values(**values)
        rest = {name: value for name, value in values.items() if name not in keys}
        self._connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=rest))


_OVERTAKEN = frozenset(
    {"23505", "23503", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_FOREIGNKEY"}
)
"""A row that is there already, or one that is not there: by PostgreSQL's codes and by SQLite's names."""


def is_overtaken(error: IntegrityError) -> bool:
    """Whether somebody else was first, so that deciding anew may help. What a column never takes is a defect."""
    said = (getattr(error.orig, "sqlstate", None), getattr(error.orig, "sqlite_errorname", None))
    return not _OVERTAKEN.isdisjoint(said)


def _later(one: ColumnElement[int], other: ColumnElement[int]) -> ColumnElement[int]:
    """The greater of two; databases do not agree on its name."""
    return case((one > other, one), else_=other)


def _inserting(table: Table, but: str = "") -> ClauseElement:
    """A new row of all columns, each named like its parameter; `but` one that the database numbers."""
    columns: dict[str, Any] = {column.name: bindparam(column.name) for column in table.columns if column.name != but}
    return insert(table).values(columns).inline()


def _updating(table: Table, key: str) -> ClauseElement:
    """A row written over if it is still in the state `was_state`. Here a parameter may not be named like a column."""
    where = (table.c[key] == bindparam(f"new_{key}"), table.c.state == bindparam("was_state"))
    columns: dict[str, Any] = {column.name: bindparam(f"new_{column.name}") for column in table.columns}
    return update(table).where(*where).values(columns)


def _entry_values(entry: LedgerEntry) -> dict[str, Any]:
    return {**entry.model_dump(), "body": json.dumps(entry.body)}


_APPLY: dict[type, Callable[[SqlWriter, Any], None]] = {
    SaveUnit: SqlWriter._save_unit,
    SaveLease: SqlWriter._save_lease,
    SaveSubmission: SqlWriter._save_submission,
    SaveNode: SqlWriter._save_node,
    SaveEvaluation: SqlWriter._save_evaluation,
    SaveTask: SqlWriter._save_task,
    AddPolicy: SqlWriter._add_policy,
    AddBatch: SqlWriter._add_batch,
    AddVerdict: SqlWriter._add_verdict,
    AddShown: SqlWriter._add_shown,
    RaiseAlarm: SqlWriter._raise_alarm,
    Record: SqlWriter._record,
}
