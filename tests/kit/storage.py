"""Rows to store, and storages to store them in: what the tests of storage share."""

from dataclasses import replace
from typing import Any

from sqlalchemy import text

from kit import Request
from shoal import ledger
from shoal.hub.state import Command, LeaseRow, NodeRow, Save, SubmissionRow, UnitRow, UnitState
from shoal.hub.storage import Reader, Storage, tables
from shoal.hub.storage.postgres import PostgresStorage
from shoal.hub.storage.tables import Outgoing
from shoal.protocol import LedgerEntry, PolicyRef

POLICY = PolicyRef(incarnation=0, version=0, digest="d" * 64)


def node(number: int = 1) -> NodeRow:
    return NodeRow(f"{number:032x}", f"{number:064x}", "worker", f"n{number}", registered_at_ms=number)


def lease(unit: int, attempt: int = 0, who: int = 1, deadline_ms: int = 100, request: str = "request-1") -> LeaseRow:
    name, row = f"u{unit}a{attempt}", node(who)
    return LeaseRow(
        name, unit, row.node, attempt, request, 0, 0, POLICY.digest, issued_at_ms=unit, deadline_ms=deadline_ms
    )


def submission(unit: int, attempt: int = 0, name: str | None = None) -> SubmissionRow:
    row = lease(unit, attempt)
    return SubmissionRow(
        name or f"{unit:064x}", row.lease, unit, row.node, 0, 0, POLICY.digest, size_bytes=5, received_at_ms=unit
    )


def leased(unit: int, **changes: object) -> list[Command]:
    return [Save(UnitRow(unit, f"task-{unit}", UnitState.LEASED), None), Save(lease(unit, **changes), None)]


def on_postgres(request: Request) -> Storage:
    storage = PostgresStorage(request.getfixturevalue("prepared_url"))
    names = ", ".join(f'"{name}"' for name in tables.metadata.tables if name != "meta")
    with storage.write(exclusive=True) as transaction:  # emptied, not made again: that is ten times as fast
        transaction._connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY CASCADE"))
        transaction._connection.execute(text("DELETE FROM meta WHERE key <> 'schema_version'"))
    return storage


def post(storage: Storage, limit: int = 1000) -> list[Outgoing]:
    """Move so many rows from the outbox into the chain, as the service does."""
    with storage.write(exclusive=True) as transaction:
        outgoing, entries = transaction.outbox(limit), list[LedgerEntry]()
        last = transaction.ledger_last()
        for row in outgoing:
            last = ledger.append(last, row.kind, row.body, row.at_ms)
            entries.append(last)
        if entries:
            transaction.post(entries, outgoing[-1].id)
    return outgoing


class Stored:
    """The calls of a reader or a writer, each in a transaction of its own."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._storage.read() if hasattr(Reader, name) else self._storage.write() as transaction:
                return getattr(transaction, name)(*arguments, **options)

        return call


def changed(row: NodeRow, **changes: Any) -> Save[NodeRow]:
    return Save(replace(row, **changes), row.state)


def apply(storage: Storage, *commands: Command) -> None:
    with storage.write() as transaction:
        transaction.apply(commands)
