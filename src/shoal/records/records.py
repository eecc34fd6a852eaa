"""Reading what was kept. What is one value a rollout is held in memory, texts and tokens are read when asked for."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from shoal.records.schema import NARROW, RolloutRecord, records_of
from shoal.records.segments import ROWS_PER_GROUP, Segments, read_table

if TYPE_CHECKING:
    import pyarrow as pa

Order = Literal["newest", "oldest", "worst", "best", "longest", "random", "changed"]
ORDERS: tuple[Order, ...] = get_args(Order)
FILE, ROW = "file", "row"


@dataclass(frozen=True)
class Wanted:
    """Which rollouts, and in which order. `text` is looked for in prompt and completion, for `seconds` at most.
    `changed`: those of the tasks whose mean reward differs most between the oldest and the newest version that has
    them."""

    order: Order = "newest"
    outcome: str = ""
    reason: str = ""
    node: str = ""
    task: str = ""
    text: str = ""
    unit: int | None = None
    step: int | None = None
    version: int | None = None
    limit: int = 5
    after: int = 0
    seed: int = 0
    seconds: float = 10.0


class Records:
    columns = NARROW

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments, self._read = Segments(folder), dict[Path, Any]()
        self._joined: pa.Table | None = None

    def __len__(self) -> int:
        return int(self.table().num_rows)

    def table(self) -> pa.Table:
        """All rollouts without texts and tokens, in order; files that were written since the last call are read now."""
        import pyarrow as pa

        paths = self._segments.paths()
        if self._joined is None or list(self._read) != paths:
            found = {}
            for number, path in enumerate(paths):
                try:
                    table = self._read[path] if path in self._read else read_table(path, NARROW)
                except FileNotFoundError:  # merged meanwhile
                    return self.table()
                rows = pa.array(range(table.num_rows), pa.int64())
                files = pa.array([number] * table.num_rows, pa.int32())
                found[path] = table.select(NARROW).append_column(FILE, files).append_column(ROW, rows)
            self._read, self._joined = found, pa.concat_tables(found.values()) if found else empty()
        return self._joined

    def find(self, wanted: Wanted = Wanted(), among: pa.Table | None = None) -> list[RolloutRecord]:
        """Without texts and tokens, but with them where `wanted.text` is given. `among`: rows of the table."""
        table = self._sorted(self._filtered(wanted, self.table() if among is None else among), wanted)
        if wanted.text:
            return list(self._containing(table, wanted))
        return list(records_of(table.slice(wanted.after, wanted.limit).select(NARROW)))

    def whole(self, found: Iterable[RolloutRecord]) -> list[RolloutRecord]:
        """The same rollouts with texts, tokens, and the checks of their group."""
        import pyarrow.compute as pc

        rollouts = []
        for each in found:
            table = self.table()
            place = table.filter(pc.and_(pc.equal(table["group"], each.group), pc.equal(table["sample"], each.sample)))
            rollouts += [next(iter(records_of(self._bulk(file, row)))) for file, row in _places(place)]
        return rollouts

    def at(self, group: int, sample: int) -> list[RolloutRecord]:
        """That rollout without texts and tokens, if it is there."""
        import pyarrow.compute as pc

        table = self.table()
        found = table.filter(pc.and_(pc.equal(table["group"], group), pc.equal(table["sample"], sample)))
        return list(records_of(found.select(NARROW)))

    def counts(self, column: str) -> dict[str, int]:
        import pyarrow.compute as pc

        counted = pc.value_counts(self.table()[column])
        return {str(pair["values"].as_py()): int(pair["counts"].as_py()) for pair in counted}

    def _filtered(self, wanted: Wanted, table: pa.Table) -> pa.Table:
        import pyarrow.compute as pc

        if wanted.text:  # of others no text is there
            table = table.filter(table["kept"])
        for name in ("outcome", "unit", "step", "version"):
            value = getattr(wanted, name)
            if value not in ("", None):
                table = table.filter(pc.equal(table[name], value))
        for name in ("reason", "node", "task"):  # the beginning of a name is enough
            if value := getattr(wanted, name):
                table = table.filter(pc.starts_with(table[name], value))
        return table

    def _sorted(self, table: pa.Table, wanted: Wanted) -> pa.Table:
        import pyarrow.compute as pc

        by: list[tuple[str, str]] = [("group", "descending"), ("sample", "ascending")]
        if wanted.order in ("worst", "best"):
            table = table.filter(pc.is_valid(table["reward"]))
            by = [("reward", "ascending" if wanted.order == "worst" else "descending"), *by]
        elif wanted.order == "longest":
            by = [("tokens", "descending"), *by]
        elif wanted.order == "oldest":
            by[0] = ("group", "ascending")
        elif wanted.order == "changed":
            places = changed_tasks(table)
            order = [places.get(task, len(places)) for task in table["task"].to_pylist()]
            return table.take(sorted(range(len(order)), key=lambda row: (order[row], row)))
        elif wanted.order == "random":
            order = list(range(table.num_rows))
            random.Random(wanted.seed).shuffle(order)
            return table.take(order[: wanted.after + wanted.limit] if not wanted.text else order)
        return table.sort_by(by)

    def _containing(self, table: pa.Table, wanted: Wanted) -> Iterator[RolloutRecord]:
        ends_s, left, skipped = time.monotonic() + wanted.seconds, wanted.limit, wanted.after
        for file, row in _places(table):
            if left == 0 or time.monotonic() > ends_s:
                return
            [each] = records_of(self._bulk(file, row))
            if wanted.text in (each.prompt or "") or wanted.text in (each.completion or ""):
                if skipped:
                    skipped -= 1
                    continue
                left -= 1
                yield each

    def _bulk(self, file: int, row: int) -> pa.Table:
        part, place = divmod(row, ROWS_PER_GROUP)
        return read_table(list(self._read)[file], None, part).slice(place, 1)


def changed_tasks(table: pa.Table) -> dict[str, int]:
    """The rank of each task that several versions answered, by how much its mean reward differs between the first and
    the last of them."""
    rewards: dict[str, dict[int, float]] = defaultdict(dict)
    for row in means(table, "reward", "task", "version"):
        rewards[row["task"]][row["version"]] = row["reward_mean"]
    changes = {task: abs(by[max(by)] - by[min(by)]) for task, by in rewards.items() if len(by) > 1}
    return {task: place for place, task in enumerate(sorted(changes, key=lambda task: (-changes[task], task)))}


def means(table: pa.Table, value: str, *by: str) -> list[dict[str, Any]]:
    """Of each group of rows that are equal in `by`: the mean of a column, and how many rows have it."""
    import pyarrow.compute as pc

    there = table.filter(pc.is_valid(table[value]))
    return list(there.group_by(list(by)).aggregate([(value, "mean"), (value, "count")]).to_pylist())


def _places(table: pa.Table) -> Sequence[tuple[int, int]]:
    return list(zip(table[FILE].to_pylist(), table[ROW].to_pylist(), strict=True))


def empty() -> pa.Table:
    import pyarrow as pa

    from shoal.records.schema import schema

    kinds = [*((name, schema().field(name).type) for name in NARROW), (FILE, pa.int32()), (ROW, pa.int64())]
    return pa.table({name: pa.array([], kind) for name, kind in kinds})
