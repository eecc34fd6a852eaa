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
from typing import Any

from sqlalchemy import ClauseElement, Connection
from sqlalchemy.exc import DBAPIError


@dataclass(frozen=True)
class _Compiled:
    """`order` are the names of the parameters, where the driver wants them by position."""

    text: str
    fixed: dict[str, Any]
    order: tuple[str, ...] | None


@dataclass(frozen=True)
class Answer:
    """The rows that a statement returned, and how many it changed."""

    rows: list[tuple[Any, ...]]
    changed: int


_COMPILED: dict[tuple[str, str, str], _Compiled] = {}


def run(
    connection: Connection, who: str, name: str, build: Callable[[], ClauseElement], values: Mapping[str, Any]
) -> Answer:
    """Run the statement `name` of the class `who` with these values for its `bindparam`s."""
    key = (connection.dialect.name, who, name)
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = _COMPILED[key] = _compile(connection, build())
    filled = {**compiled.fixed, **values} if compiled.fixed else values
    if compiled.order is None:
        result = connection.exec_driver_sql(compiled.text, dict(filled))
        rows = [tuple(row) for row in result] if result.returns_rows else []
        return Answer(rows, result.rowcount)
    try:
        cursor = driver_of(connection).execute(compiled.text, [filled[name] for name in compiled.order])
        return Answer(cursor.fetchall(), cursor.rowcount)
    except sqlite3.Error as error:
        raise DBAPIError.instance(compiled.text, None, error, sqlite3.Error) from error


def driver_of(connection: Connection) -> Any:
    """The driver's own connection."""
    return connection.connection.driver_connection


def _compile(connection: Connection, statement: ClauseElement) -> _Compiled:
    compiled = statement.compile(dialect=connection.dialect, compile_kwargs={"render_postcompile": True})
    order = getattr(compiled, "positiontup", None)
    return _Compiled(str(compiled), dict(compiled.params or {}), None if order is None else tuple(order))
