"""The schema of a database: created, accepted, or refused.

    no tables ──────► all of them at once, as in `tables`
    this schema ────► nothing to do
    another one ────► refused: a run is finished with the shoal that began it

There are no migrations before the first release: nobody has a database of an earlier schema.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, select, text

from shoal.errors import ConfigError
from shoal.hub.storage import tables


def prepare(connection: Connection, where: str, create: bool = True) -> None:
    """Make sure that the database has this version's schema; `where` names it in messages. Without `create` an empty
    database is refused."""
    if inspect(connection).has_table(tables.meta.name):
        _check_version(connection, where)
        return
    if not create:
        raise ConfigError(f"there is no run in {where}; has its hub been started?")
    tables.metadata.create_all(connection, checkfirst=False)
    connection.execute(tables.meta.insert().values(key="schema_version", value=str(tables.SCHEMA_VERSION)))


def unhurried(connection: Connection) -> Connection:
    """The same transaction without the limits that keep a hub's short ones short: whole tables are gone through."""
    if connection.dialect.name == "postgresql":
        for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(text(f"SET LOCAL {limit} TO 0"))
    return connection


def _check_version(connection: Connection, where: str) -> None:
    query = select(tables.meta.c.value).where(tables.meta.c.key == "schema_version")
    found: str | None = connection.execute(query).scalar_one_or_none()
    if found is None or not found.isdigit():
        raise ConfigError(f"{where} is not a hub's database; move it away or use another one")
    if int(found) > tables.SCHEMA_VERSION:
        raise ConfigError(
            f"{where} was written by a newer shoal (schema {found}, this one knows {tables.SCHEMA_VERSION}): "
            "upgrade shoal, or use another folder"
        )
    if int(found) < tables.SCHEMA_VERSION:
        raise ConfigError(
            f"{where} was written by an older shoal (schema {found}, this one needs {tables.SCHEMA_VERSION}): "
            "finish that run with the version that began it, or start another one in another folder"
        )
