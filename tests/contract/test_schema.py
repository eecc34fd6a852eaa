"""The schema on each database: created whole, reopened unchanged, refused if it is another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, inspect, text

from kit import Request
from shoal.errors import ConfigError
from shoal.hub.storage import Storage, open_storage, tables
from shoal.hub.storage.postgres import parsed


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
