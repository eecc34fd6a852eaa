"""A database with our tables in it, for the tests of storage."""

from __future__ import annotations

import pytest

from kit.postgres import Cluster
from shoal.hub.storage.postgres import PostgresStorage


@pytest.fixture(scope="module")
def prepared_url(postgres: Cluster) -> str:
    """A database with our tables in it."""
    url = postgres.create()
    PostgresStorage(url).close()
    return url
