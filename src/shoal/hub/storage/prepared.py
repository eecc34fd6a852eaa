"""Statements that are built and compiled once, and then only run.

    name, build ─ the first time ─► SQLAlchemy statement ─► text and names of its parameters ─┐
    values ───────────────────────────────────────────────────────────────────────────────────┴► driver

Building a statement of SQLAlchemy's costs ten times what SQLite needs to carry it out: under load the hub would do
little else. Reading an answer through SQLAlchemy costs half as much again, so SQLite's driver is called directly.
What is asked with every request takes this route; the rest is written as it reads best.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ClauseElement, Connection
from sqlalchemy.exc import DBAPIError


@dataclass(frozen=True)
class _Compiled:
    """`order` are the names of the parameters, where the driver wants them by position."""

    text: str
    fixed: dict[str, Any]
    order: tuple[str, ...] | None


class Answer(NamedTuple):
    """The rows that a statement returned, and how many it changed."""

    rows: list[tuple[Any, ...]]
    changed: int


_COMPILED: dict[tuple[bool, type, str], _Compiled] = {}


def run(
    connection: Connection,
    driver: Any,
    statement: tuple[type, str],
    build: Callable[[], ClauseElement],
    values: Mapping[str, Any],
) -> Answer:
    """Run a statement, known by a class and its name there, with these values for its `bindparam`s. `driver` is
    SQLite's own connection, if it is that database."""
    key = (driver is None, *statement)
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = _COMPILED[key] = _compile(connection, build())
    filled = {**compiled.fixed, **values} if compiled.fixed else values
    if compiled.order is None:
        result = connection.exec_driver_sql(compiled.text, dict(filled))
        rows = [tuple(row) for row in result] if result.returns_rows else []
        return Answer(rows, result.rowcount)
    try:
        cursor = driver.execute(compiled.text, [filled[name] for name in compiled.order])
        return Answer(cursor.fetchall(), cursor.rowcount)
    except sqlite3.Error as error:
        raise DBAPIError.instance(compiled.text, None, error, sqlite3.Error) from error


def driver_of(connection: Connection) -> Any:
    """SQLite's own connection; None for another database's."""
    return connection.connection.driver_connection if connection.dialect.name == "sqlite" else None


def _compile(connection: Connection, statement: ClauseElement) -> _Compiled:
    compiled = statement.compile(dialect=connection.dialect, compile_kwargs={"render_postcompile": True})
    order = getattr(compiled, "positiontup", None)
    return _Compiled(str(compiled), dict(compiled.params or {}), None if order is None else tuple(order))
