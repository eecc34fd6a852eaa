"""Rows of the database as the hub's dataclasses, and back. What is no number or text there is kept as text.

Reading goes past `__init__`: with up to 33 frozen fields that takes longer than the query.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import lru_cache
from typing import Any, Generic, TypeVar, get_origin

from pydantic import BaseModel
from sqlalchemy import Table

from shoal.hub.state.commands import AddVerdict, RaiseAlarm
from shoal.hub.state.rows import EvaluationRow, LeaseRow, NodeRow, ShownRow, SubmissionRow, TaskRow, UnitRow
from shoal.hub.storage import tables

R = TypeVar("R")


class Mapped(Generic[R]):
    """A table whose columns are the fields of `kind`. `columns` lists them for a SELECT, `is_named` finds a row by its
    keys. `insert`, `update` and `upsert` take values by the names of the fields. An update leaves alone what a row is
    named by and refers to, and finds only a row that is still in the state `:was`."""

    def __init__(self, table: Table, kind: type[R]) -> None:
        self._kind, self.name = kind, table.name
        self._names = tuple(each.name for each in fields(kind))  # type: ignore[arg-type]
        self.keys = [column.name for column in table.primary_key.columns]
        self._parse: list[tuple[str, Callable[[Any], Any]]] = []
        self._dump: list[tuple[str, Callable[[Any], Any]]] = []
        for name, (sort, _) in tables.field_types(kind).items():
            parse, dump = _conversions(sort)
            self._parse += [(name, parse)] if parse else []
            self._dump += [(name, dump)] if dump else []
        self.columns = ", ".join(f'{table.name}."{name}"' for name in self._names)
        self.size = len(self._names)
        self.is_named = " AND ".join(f"{key} = :{key}" for key in self.keys)
        self.insert = insert(table)
        fixed = {*self.keys, *(column.name for column in table.columns if column.foreign_keys)}
        changes = ", ".join(f'"{name}" = :{name}' for name in self._names if name not in fixed)
        self.update = f"UPDATE {table.name} SET {changes} WHERE {self.is_named} AND state = :was"
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(self.keys)}) DO UPDATE SET " + ", ".join(
            f'"{name}" = excluded."{name}"' for name in self._names if name not in self.keys
        )

    def read(self, row: Sequence[Any]) -> R:
        """From a row that begins with the table's columns."""
        made = object.__new__(self._kind)
        values = made.__dict__
        values.update(zip(self._names, row, strict=False))
        for name, parse in self._parse:
            values[name] = parse(values[name])
        return made

    def write(self, row: R) -> dict[str, Any]:
        values = dict(vars(row))
        for name, dump in self._dump:
            values[name] = dump(values[name])
        return values


def insert(table: Table, but: str = "") -> str:
    """A new row, each column by its name; `but` is one that the database numbers."""
    names = [column.name for column in table.columns if column.name != but]
    listed = ", ".join(f'"{name}"' for name in names)
    return f"INSERT INTO {table.name} ({listed}) VALUES ({', '.join(f':{name}' for name in names)})"


def _conversions(sort: Any) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """How a field of this type is read from its column and written to it; None: as it is."""
    if get_origin(sort) is dict:
        return json.loads, json.dumps
    if get_origin(sort) is tuple:
        return lru_cache(4096)(lambda text: tuple(json.loads(text))), json.dumps
    if sort is bool:
        return bool, None
    if isinstance(sort, type) and issubclass(sort, StrEnum):
        return {member.value: member for member in sort}.__getitem__, lambda member: member.value
    if isinstance(sort, type) and issubclass(sort, BaseModel):
        return lru_cache(4096)(sort.model_validate_json), lambda model: model.model_dump_json()
    return None, None


NODES = Mapped(tables.nodes, NodeRow)
UNITS = Mapped(tables.units, UnitRow)
LEASES = Mapped(tables.leases, LeaseRow)
SHOWN = Mapped(tables.shown, ShownRow)
SUBMISSIONS = Mapped(tables.submissions, SubmissionRow)
VERDICTS = Mapped(tables.verdicts, AddVerdict)
TASKS = Mapped(tables.tasks, TaskRow)
EVALUATIONS = Mapped(tables.evaluations, EvaluationRow)
PRESENCE = Mapped(tables.presence, tables.Presence)
ALARMS = Mapped(tables.alarms, RaiseAlarm)
OUTBOX = Mapped(tables.ledger_outbox, tables.Outgoing)
