"""Storages of every kind, for the tests of storage."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import Request
from kit.postgres import Cluster
from kit.storage import Stored, apply, node, on_postgres
from shoal.hub.state.commands import Save
from shoal.hub.storage import SqliteStorage, Storage
from shoal.hub.storage.postgres import PostgresStorage


@pytest.fixture(scope="module")
def prepared_url(postgres: Cluster) -> str:
    """A database with our tables in it."""
    url = postgres.create()
    PostgresStorage(url).close()
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def storage(request: Request, tmp_path: Path) -> Iterator[Storage]:
    """Each implementation, with two nodes."""
    storage = SqliteStorage(tmp_path / "hub.db") if request.param == "sqlite" else on_postgres(request)
    apply(storage, Save(node(1), None), Save(node(2), None))
    yield storage
    storage.close()


@pytest.fixture
def stored(storage: Storage) -> Stored:
    return Stored(storage)
