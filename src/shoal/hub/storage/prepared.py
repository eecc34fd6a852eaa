"""Statements that are built and compiled once, and then only run.

    name, build ─ the first time ─► SQLAlchemy statement ─► text and names of its parameters ─┐
    values ───────────────────────────────────────────────────────────────────────────────────┴► driver

Building a statement of SQLAlchemy's costs ten times what SQLite needs to carry it out: under load the hub would do
little else. What is asked with every request goes this way; the rest is written as it reads best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ClauseElement, Connection, CursorResult


@dataclass(frozen=True)
class _Compiled:
    """`order` are the names of the parameters, where the driver wants them by position."""

    text: str
    fixed: dict[str, Any]
    order: tuple[str, ...] | None


_COMPILED: dict[tuple[str, str, str], _Compiled] = {}


def run(
    connection: Connection, who: str, name: str, build: Callable[[], ClauseElement], values: Mapping[str, Any]
) -> CursorResult[Any]:
    """Run the statement `name` of the class `who` with these values for its `bindparam`s."""
    key = (connection.dialect.name, who, name)
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = _COMPILED[key] = _compile(connection, build())
    filled = {**compiled.fixed, **values}
    if compiled.order is None:
        return connection.exec_driver_sql(compiled.text, filled)
    return connection.exec_driver_sql(compiled.text, tuple([filled[name] for name in compiled.order]))


def _compile(connection: Connection, statement: ClauseElement) -> _Compiled:
    compiled = statement.compile(dialect=connection.dialect, compile_kwargs={"render_postcompile": True})
    order = getattr(compiled, "positiontup", None)
    return _Compiled(str(compiled), dict(compiled.params or {}), None if order is None else tuple(order))
