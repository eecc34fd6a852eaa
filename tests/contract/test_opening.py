"""Databases that are opened: made whole or refused, never changed under hubs at work, waited for and copied."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, inspect, select, text

from kit import Patch, Request
from shoal.errors import ConfigError
from shoal.hub import storage
from shoal.hub.storage import StaleRow, Storage, open_storage, postgres, tables
from shoal.hub.storage.copying import connection_of, copy_rows, extents, snapshot
from shoal.hub.storage.postgres import LIMITS, parsed
from shoal.hub.storage.sqlite import SqliteStorage

SCHEMA = "SELECT value FROM meta WHERE key = 'schema_version'"


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
def place(request: Request, tmp_path: Path) -> Place:
    return Place(tmp_path, request.getfixturevalue("database_url") if request.param == "postgres" else "")


def test_new_database_has_all_tables_and_opens_again(place: Place) -> None:
    for _ in range(2):
        storage = place.open()
        with storage.read() as reader:
            assert reader.setting("schema_version") == str(tables.SCHEMA_VERSION)
        storage.close()
    with place.connect() as connection:
        assert set(inspect(connection).get_table_names()) == set(tables.metadata.tables)


@pytest.mark.parametrize(
    ("version", "said"), [("99", r"newer shoal \(schema 99.*upgrade shoal"), ("1", "older shoal"), ("x", "not a hub's")]
)
def test_database_of_another_schema_is_refused(place: Place, version: str, said: str) -> None:
    place.open().close()
    with place.connect() as connection:
        set_version = text("UPDATE meta SET value = :version WHERE key = 'schema_version'")
        connection.execute(set_version, {"version": version})
    with pytest.raises(ConfigError, match=said):
        place.open()
    if place.url:  # nor is it changed by who copies it from a hub at work
        with pytest.raises(ConfigError, match=said):
            snapshot(place.url, place.folder, place.folder / "copy.db")
    with place.connect() as connection:
        assert connection.execute(text(SCHEMA)).scalar_one() == version


def test_snapshot_of_an_empty_database_is_refused(database_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        snapshot(database_url, tmp_path, tmp_path / "copy.db")
    with Place(tmp_path, database_url).connect() as connection:
        assert not inspect(connection).get_table_names()


def test_copies_have_no_statement_time_limits(database_url: str, tmp_path: Path) -> None:
    limits = [name for name in LIMITS if name != "lock_timeout"]
    with (
        closing(open_storage(database_url, tmp_path)) as storage,
        closing(SqliteStorage(tmp_path / "other.db")) as other,
    ):
        with storage.read() as reader:
            extents(reader)
            shown = [connection_of(reader).execute(text(f"SHOW {name}")).scalar_one() for name in limits]
        assert shown == ["0", "0"]
        with storage.read() as reader:  # the next transaction has them again
            assert connection_of(reader).execute(text("SHOW statement_timeout")).scalar_one() == "30s"
        copy_rows(other, storage)
        copy_rows(storage, other)


def test_rows_after_a_copy_get_later_numbers(database_url: str, tmp_path: Path) -> None:
    outbox = tables.ledger_outbox
    row = {"kind": "run", "body": "{}", "at_ms": 1}
    with closing(SqliteStorage(tmp_path / "hub.db")) as source, closing(open_storage(database_url, tmp_path)) as target:
        with source.write() as writer:
            connection_of(writer).execute(outbox.insert(), [{"id": 5, **row}])
        copy_rows(source, target)
        with target.write(exclusive=True) as writer:
            connection_of(writer).execute(outbox.insert(), [row])
            assert connection_of(writer).execute(select(outbox.c.id).order_by(outbox.c.id)).scalars().all() == [5, 6]


def test_busy_database_is_tried_again(database_url: str, tmp_path: Path, monkeypatch: Patch) -> None:
    real, tries = postgres.PostgresStorage, iter(range(100))

    def busy(url: str, create: bool) -> postgres.PostgresStorage:
        if next(tries) < 2:
            raise StaleRow("canceling statement due to lock timeout")
        return real(url, create)

    with monkeypatch.context() as patch:
        patch.setattr(postgres, "PostgresStorage", busy)
        open_storage(database_url, tmp_path).close()
        assert next(tries) == 3
        patch.setattr(storage, "ATTEMPTS", 1)
        tries = iter(range(100))
        with pytest.raises(StaleRow):
            open_storage(database_url, tmp_path)
