"""The schema on each database: made at once or by migrations it is the same, and old databases are brought along."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Inspector, create_engine, inspect, text

from shoal import ledger
from shoal.errors import ConfigError
from shoal.hub.state.machines import LeaseState
from shoal.hub.storage import SqliteStorage, Storage, open_storage, schema, tables
from shoal.hub.storage.postgres import parsed
from shoal.protocol import LedgerEntry, NodeState, PolicyRef

OURS = set(tables.metadata.tables)


@dataclass
class Place:
    """A database that is empty at first: by way of its storage, and past it."""

    folder: Path
    url: str = ""

    def open(self) -> Storage:
        return open_storage(self.url, self.folder)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        engine = create_engine(parsed(self.url) if self.url else f"sqlite:///{self.folder / 'hub.db'}")
        with engine.begin() as connection:
            yield connection
        engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.getfixturevalue("database_url") if request.param == "postgres" else "")


def migrate(connection: Connection, revision: str) -> None:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "shoal.hub.storage:migrations")
    command.upgrade(config, revision)


def described(place: Place) -> dict[str, Any]:
    """All tables with their columns, keys and indexes, in no particular order."""
    with place.connect() as connection:
        inspector = inspect(connection)
        return {name: described_table(inspector, name) for name in inspector.get_table_names() if name in OURS}


def described_table(inspector: Inspector, name: str) -> dict[str, Any]:
    refers = inspector.get_foreign_keys(name)
    return {
        "columns": {(each["name"], str(each["type"]), each["nullable"]) for each in inspector.get_columns(name)},
        "key": inspector.get_pk_constraint(name)["constrained_columns"],
        "unique": {tuple(each["column_names"]) for each in inspector.get_unique_constraints(name)},
        "refers": {(*each["constrained_columns"], each["referred_table"]) for each in refers},
        "indexes": {tuple(each["column_names"]) for each in inspector.get_indexes(name)},
    }


def test_migrations_lead_to_the_very_schema_that_is_made_at_once(place: Place) -> None:
    with place.connect() as connection:
        migrate(connection, "head")
    migrated = described(place)
    with place.connect() as connection:
        for name in [*reversed(tables.metadata.sorted_tables), "alembic_version"]:
            connection.execute(text(f'DROP TABLE "{name}"'))
    place.open().close()
    assert migrated == described(place)
    assert set(migrated) == OURS
    with place.connect() as connection:
        stamped = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    assert stamped == schema.revision_of(tables.SCHEMA_VERSION)


def chain() -> list[LedgerEntry]:
    first = ledger.append(None, "run", {"run": "r"}, 1)
    second = ledger.append(first, "node", {"node": "ab", "role": "worker"}, 2)
    return [first, second, ledger.append(second, "credit", {"node": "ab", "unit": 7, "submission": "s"}, 3)]


def fill_as_schema_2(connection: Connection) -> None:
    """A run as a hub of schema 2 left it: before there was an outbox, or Alembic's mark."""
    migrate(connection, "0001")
    connection.execute(text("DROP TABLE alembic_version"))
    run = json.dumps({"run": "r"})
    rows: dict[str, list[dict[str, Any]]] = {
        "meta": [{"key": "schema_version", "value": "2"}, {"key": "run", "value": run}],
        "nodes": [
            {
                "node": "ab", "public_key": "k", "role": "worker", "name": "n", "registered_at_ms": 5, "software": "",
                "state": "banned", "accepted": 3, "rejected": 1, "inconclusive": 0, "certain": 1, "statistical": 0,
                "credit": 30, "reason": "x", "pending": 4, "streak": 0, "passed": 9, "record": "{}",
            }
        ],
        "units": [{"unit": 7, "task": "t", "state": "leased", "attempt": 1, "failures": 0, "reason": ""}],
        "leases": [
            {
                "lease": "u7a0", "unit": 7, "node": "ab", "attempt": 0, "request": "q", "incarnation": 0, "version": 0,
                "digest": "d", "issued_at_ms": 1, "deadline_ms": 60, "state": "active", "document": "{}",
            }
        ],
        "policies": [{"incarnation": 0, "version": 0, "digest": "d" * 64, "announced_at_ms": 1}],
        "ledger": [{**entry.model_dump(), "body": json.dumps(entry.body)} for entry in chain()],
    }  # fmt: skip
    for table, values in rows.items():
        for row in values:
            names = ", ".join(f'"{name}"' for name in row)
            marks = ", ".join(f":{name}" for name in row)
            connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), row)


def test_a_run_of_schema_2_goes_on(place: Place) -> None:
    with place.connect() as connection:
        fill_as_schema_2(connection)
    storage = place.open()
    with storage.read() as reader:
        assert reader.setting("schema_version") == str(tables.SCHEMA_VERSION)
        assert reader.setting("run") == json.dumps({"run": "r"})
        assert reader.ledger_after(-1, 9) == chain()
        assert (reader.outbox_length(), reader.policy(0, 0)) == (
            0,
            PolicyRef(incarnation=0, version=0, digest="d" * 64),
        )
        node, holding = reader.node("ab"), reader.holding("u7a0")
    assert node is not None
    assert (node.state, node.credit, node.pending, node.passed) == (NodeState.BANNED, 30, 4, 9)
    assert (node.owner, node.protocol, node.window, node.until_ms, node.suspensions) == ("", 1, 0, None, 0)
    assert holding is not None
    assert (holding.lease.state, holding.lease.deadline_ms, holding.lease.hard_deadline_ms) == (
        LeaseState.ACTIVE,
        60,
        60,
    )
    storage.close()
    place.open().close()  # the second time there is nothing to do
    with place.connect() as connection:
        about = connection.execute(text('SELECT subject, "index" FROM ledger_subjects ORDER BY "index", subject')).all()
    assert [tuple(row) for row in about] == [("node:ab", 1), ("node:ab", 2), ("unit:7", 2)]


def test_a_run_of_schema_3_goes_on(place: Place) -> None:
    with place.connect() as connection:
        fill_as_schema_2(connection)
        schema._stamp(connection, "0001")
        migrate(connection, "0002")
        connection.execute(text("UPDATE meta SET value = '3' WHERE key = 'schema_version'"))
        connection.execute(
            text(
                "INSERT INTO submissions (submission, lease, unit, node, incarnation, version, digest, size_bytes, "
                "received_at_ms, state, receipt, rewards, generated_tokens, reason, message, depth) "
                "VALUES ('s', 'u7a0', 7, 'ab', 0, 0, 'd', 1, 1, 'accepted', '', '[1.0, 0.0]', 2, '', '', 'full')"
            )
        )
    storage = place.open()
    with storage.read() as reader:
        assert reader.setting("schema_version") == str(tables.SCHEMA_VERSION)
        row = reader.submission("s")
        assert row is not None
        assert (row.rewards, row.pass_rate) == ((1.0, 0.0), None)
        assert (reader.pool_counts(), reader.evaluations_under_way()) == ({}, [])
    storage.close()


def test_a_migration_that_fails_leaves_everything_as_it_was(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.connect() as connection:
        fill_as_schema_2(connection)
    before = described(place)

    def fail(_entry: LedgerEntry) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(ledger, "subjects", fail)  # what the last step of the migration calls
    with pytest.raises(ConfigError, match="no"):
        place.open()
    assert described(place) == before
    monkeypatch.undo()
    place.open().close()


def test_what_is_newer_older_or_foreign_is_refused(place: Place) -> None:
    place.open().close()
    for version, said in (
        ("99", r"newer shoal \(schema 99.*upgrade shoal"),
        ("1", "older shoal"),
        ("x", "not a hub's"),
    ):
        with place.connect() as connection:
            set_version = text("UPDATE meta SET value = :version WHERE key = 'schema_version'")
            connection.execute(set_version, {"version": version})
        with pytest.raises(ConfigError, match=said):
            place.open()


def test_migrations_come_with_the_package() -> None:
    """As files beside the code: whoever installs a wheel has them."""
    folder = Path(schema.__file__).parent / "migrations"
    names = sorted(path.name for path in (folder / "versions").glob("0*.py"))
    assert (folder / "env.py").is_file()
    assert names[-1].startswith(schema.revision_of(tables.SCHEMA_VERSION))
    assert len(names) == tables.SCHEMA_VERSION - schema.OLDEST + 1


def test_a_new_database_does_without_alembic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import is slow, and every test and demo makes a new database."""
    monkeypatch.setitem(sys.modules, "alembic", None)  # None: importing it fails
    SqliteStorage(tmp_path / "hub.db").close()
