"""Schema 3: for a fleet. Leases with two deadlines, nodes with windows, suspensions and owners; the ledger's outbox and
what its entries are about; a leader of several hubs.

Old leases keep the one deadline that they have as both. What old ledgers are about is filled in.
"""

from __future__ import annotations

import json
from typing import Any

from alembic import op
from sqlalchemy import BigInteger, Column, Connection, Integer, String, Text, text

from shoal.ledger import subjects
from shoal.protocol import LedgerEntry

revision = "0002"
down_revision = "0001"

PAGE = 1000
NODES = {
    "owner": (String, "''"),
    "protocol": (Integer, "1"),
    "window": (Integer, "0"),
    "lapsed": (Integer, "0"),
    "lapses": (Integer, "0"),
    "pace_ms": (BigInteger, "0"),
    "suspensions": (Integer, "0"),
    "soft": (Integer, "0"),
}
LEASES = {"hard_deadline_ms": (BigInteger, "0"), "progress": (BigInteger, "0"), "granted": (Integer, "1")}


def upgrade() -> None:
    for table, columns in (("nodes", NODES), ("leases", LEASES)):
        for name, (kind, default) in columns.items():
            op.add_column(table, Column(name, kind(), nullable=False, server_default=text(default)))
    op.add_column("nodes", Column("until_ms", BigInteger()))
    op.add_column("leases", Column("ended_at_ms", BigInteger()))
    op.execute("UPDATE leases SET hard_deadline_ms = deadline_ms")
    op.create_table(
        "ledger_subjects",
        Column("subject", String, primary_key=True),
        Column("index", BigInteger, primary_key=True, autoincrement=False),
    )
    op.create_table(
        "ledger_outbox",
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("kind", String, nullable=False),
        Column("body", Text, nullable=False),
        Column("at_ms", BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "leaders",
        Column("name", String, primary_key=True),
        Column("holder", String, nullable=False),
        Column("until_ms", BigInteger, nullable=False),
    )
    _fill_subjects(op.get_bind())


def _fill_subjects(connection: Connection) -> None:
    columns = 'SELECT "index", kind, body, at_ms, previous, hash FROM ledger'
    page = text(f'{columns} WHERE "index" > :after ORDER BY "index" LIMIT {PAGE}')
    insert = text('INSERT INTO ledger_subjects (subject, "index") VALUES (:subject, :index)')
    after = -1
    while rows := connection.execute(page, {"after": after}).mappings().all():
        found: list[dict[str, Any]] = []
        for row in rows:
            entry = LedgerEntry(**{**row, "body": json.loads(row["body"])})
            found += [{"subject": subject, "index": entry.index} for subject in subjects(entry)]
        if found:
            connection.execute(insert, found)
        after = rows[-1]["index"]
