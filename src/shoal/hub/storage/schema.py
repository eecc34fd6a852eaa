"""The schema of a database: made new, brought up to date, or refused.

    no tables ────────► all of them at once, as in `tables` (a test holds that the migrations lead to the same)
    older schema ─────► Alembic's migrations, one after the other, in the transaction that opened the database
    this one ─────────► nothing
    newer, or foreign ► refused

`meta.schema_version` is the truth for us: an older shoal that opens the database reads it and refuses. Beside it stands
Alembic's own mark, the name of the last migration. Everything happens in one transaction, which fails as a whole.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, select, text, update

from shoal.errors import ConfigError
from shoal.hub.storage import tables
from shoal.runtime.crash import point

OLDEST = 2
"""The first schema that migrations lead on from; before it there were only unfinished versions of shoal."""


def revision_of(schema_version: int) -> str:
    """Alembic's name for a schema: the first migration makes the oldest one.

    >>> revision_of(2), revision_of(3)
    ('0001', '0002')
    """
    return f"{schema_version - OLDEST + 1:04d}"


def prepare(connection: Connection, where: str, upgrade: bool = True) -> None:
    """Make sure that the database has this version's schema; `where` is what it is called in messages.

    Without `upgrade` nothing is changed: hubs of an older shoal may be at work there, and could not go on.
    """
    if not inspect(connection).has_table(tables.meta.name):
        if not upgrade:
            raise ConfigError(f"there is no run in {where}; has its hub been started?")
        tables.metadata.create_all(connection, checkfirst=False)
        connection.execute(tables.meta.insert().values(key="schema_version", value=str(tables.SCHEMA_VERSION)))
        _stamp(connection, revision_of(tables.SCHEMA_VERSION))
        return
    found = _version(connection, where)
    if found < tables.SCHEMA_VERSION:
        if not upgrade:
            raise ConfigError(
                f"{where} has the schema of an older shoal ({found}, this one's is {tables.SCHEMA_VERSION}), and its "
                "hubs may be running: use the shoal that they run, or stop them all and start one of this version first"
            )
        _upgrade(connection, found)


def unhurried(connection: Connection) -> Connection:
    """The same transaction without the limits that keep a hub's short ones short: whole tables are gone through."""
    if connection.dialect.name == "postgresql":
        for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(text(f"SET LOCAL {limit} TO 0"))
    return connection


def _version(connection: Connection, where: str) -> int:
    query = select(tables.meta.c.value).where(tables.meta.c.key == "schema_version")
    found: str | None = connection.execute(query).scalar_one_or_none()
    if found is None or not found.isdigit():
        raise ConfigError(f"{where} is not a hub's database; move it away or use another one")
    if int(found) > tables.SCHEMA_VERSION:
        raise ConfigError(
            f"{where} was written by a newer shoal (schema {found}, this one knows {tables.SCHEMA_VERSION}): "
            "upgrade shoal, or use another folder"
        )
    if int(found) < OLDEST:
        raise ConfigError(
            f"{where} was written by an older shoal (schema {found}, this one needs {OLDEST} or newer): "
            "finish that run with the version that began it, or start another one in another folder"
        )
    return int(found)


def _stamp(connection: Connection, revision: str) -> None:
    """Say to Alembic where the database stands. Written by hand: its import is slow, and rarely needed."""
    connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version (version_num) VALUES (:revision)"), {"revision": revision})


def _upgrade(connection: Connection, found: int) -> None:
    from alembic import command
    from alembic.config import Config

    unhurried(connection)
    if not inspect(connection).has_table("alembic_version"):
        _stamp(connection, revision_of(found))
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "shoal.hub.storage:migrations")
    command.upgrade(config, revision_of(tables.SCHEMA_VERSION))
    version = update(tables.meta).where(tables.meta.c.key == "schema_version")
    connection.execute(version.values(value=str(tables.SCHEMA_VERSION)))
    point("hub.schema.before_commit")
