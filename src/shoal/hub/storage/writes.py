"""Applying commands through SQLAlchemy Core, inside one write transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from sqlalchemy import Table, delete, insert, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import IntegrityError

from shoal import ledger
from shoal.hub.state.commands import (
    AddBatch,
    AddPolicy,
    AddVerdict,
    Command,
    RaiseAlarm,
    Record,
    SaveLease,
    SaveNode,
    SaveSubmission,
    SaveUnit,
)
from shoal.hub.storage import tables
from shoal.hub.storage.protocol import Presence, StaleRow
from shoal.hub.storage.queries import SqlReader
from shoal.protocol import LedgerEntry, StepReport


class SqlWriter(SqlReader):
    """Implements `protocol.Writer`."""

    def apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            try:
                _APPLY[type(command)](self, command)
            except IntegrityError as error:
                raise StaleRow(f"{type(command).__name__} contradicts what is stored: {error.orig}") from error

    def put_setting(self, key: str, value: str) -> None:
        self._upsert(tables.meta, ["key"], {"key": key, "value": value})

    def put_presence(self, presence: Presence) -> None:
        values = {**asdict(presence), "counters": json.dumps(presence.counters)}
        self._upsert(tables.presence, ["node"], values)

    def touch_presence(self, node: str, now_ms: int) -> None:
        table = tables.presence
        fresh = {**asdict(Presence(node, last_seen_ms=now_ms)), "counters": "{}"}
        statement = sqlite.insert(table).values(**fresh)
        keep = statement.on_conflict_do_update(index_elements=["node"], set_={"last_seen_ms": now_ms})
        self._connection.execute(keep)

    def put_report(self, report: StepReport, at_ms: int) -> None:
        values = {"step": report.step, "metrics": json.dumps(report.metrics), "at_ms": at_ms}
        self._upsert(tables.reports, ["step"], values)

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:
        values = {"node": node, "nonce": nonce, "expires_at_ms": expires_at_ms}
        statement = sqlite.insert(tables.nonces).values(**values).on_conflict_do_nothing()
        return self._connection.execute(statement).rowcount == 1

    def forget_nonces(self, before_ms: int) -> None:
        self._connection.execute(delete(tables.nonces).where(tables.nonces.c.expires_at_ms < before_ms))

    def _save_unit(self, command: SaveUnit) -> None:
        self._save(tables.units, "unit", asdict(command.row), command.was)

    def _save_lease(self, command: SaveLease) -> None:
        self._save(tables.leases, "lease", asdict(command.row), command.was)

    def _save_submission(self, command: SaveSubmission) -> None:
        values = {**asdict(command.row), "rewards": json.dumps(command.row.rewards)}
        self._save(tables.submissions, "submission", values, command.was)

    def _save_node(self, command: SaveNode) -> None:
        values = {**asdict(command.row), "record": command.row.record.model_dump_json()}
        self._save(tables.nodes, "node", values, command.was)

    def _add_policy(self, command: AddPolicy) -> None:
        values = {**command.policy.model_dump(), "announced_at_ms": command.announced_at_ms}
        self._connection.execute(insert(tables.policies).values(**values))

    def _add_batch(self, command: AddBatch) -> None:
        values = {"step": command.batch.step, "document": command.batch.model_dump_json()}
        self._connection.execute(insert(tables.batches).values(**values))

    def _add_verdict(self, command: AddVerdict) -> None:
        self._connection.execute(insert(tables.verdicts).values(**asdict(command)))

    def _raise_alarm(self, command: RaiseAlarm) -> None:
        self._upsert(tables.alarms, ["step", "code"], asdict(command))

    def _record(self, command: Record) -> None:
        entry = ledger.append(self.ledger_last(), command.kind, command.body, command.at_ms)
        self._connection.execute(insert(tables.ledger).values(**_entry_values(entry)))

    def _save(self, table: Table, key: str, values: dict[str, Any], was: StrEnum | None) -> None:
        values = {**values, "state": values["state"].value}
        if was is None:
            self._connection.execute(insert(table).values(**values))
            return
        where = (table.c[key] == values[key], table.c.state == was.value)
        if self._connection.execute(update(table).where(*where).values(**values)).rowcount != 1:
            raise StaleRow(f"{table.name} {values[key]} is no longer {was.value}")

    def _upsert(self, table: Table, keys: list[str], values: dict[str, Any]) -> None:
        statement = sqlite.insert(table).values(**values)
        rest = {name: value for name, value in values.items() if name not in keys}
        self._connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=rest))


def _entry_values(entry: LedgerEntry) -> dict[str, Any]:
    return {**entry.model_dump(), "body": json.dumps(entry.body)}


_APPLY: dict[type, Callable[[SqlWriter, Any], None]] = {
    SaveUnit: SqlWriter._save_unit,
    SaveLease: SqlWriter._save_lease,
    SaveSubmission: SqlWriter._save_submission,
    SaveNode: SqlWriter._save_node,
    AddPolicy: SqlWriter._add_policy,
    AddBatch: SqlWriter._add_batch,
    AddVerdict: SqlWriter._add_verdict,
    RaiseAlarm: SqlWriter._raise_alarm,
    Record: SqlWriter._record,
}
