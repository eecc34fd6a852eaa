"""The files: `groups-FIRST-LAST.parquet`, each with whole groups in order, written once and renamed into place.

A file's metadata says up to which verdict it goes; so the newest file says where its writer continues after a kill.
Small files are merged now and then; one whose groups are all in another is left over by a kill, and ignored.

Beyond the budget texts and tokens are kept of a sample of the groups, drawn by their names and the run's secret. Of
groups that were not accepted four times as many are kept.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ResourceError
from shoal.records.schema import BULK, FORMAT, schema
from shoal.runtime.crash import point
from shoal.runtime.files import FolderLock, ensure_folder, resource_error, write_atomically
from shoal.runtime.stop import StopToken

if TYPE_CHECKING:
    import pyarrow as pa

NAMED = re.compile(r"groups-(\d{10})-(\d{10})\.parquet")
ROWS_PER_GROUP, SMALL_ROWS, MERGED = 256, 4096, 8
PREFERRED, LEAST_RATE = 4.0, 2.0**-12  # numbers and reasons of all stay: below this rate nothing else is left to drop
Cursor = tuple[int, str]
"""The time of the last verdict that was written, and its submission."""


class Segments:
    """The folder's one writer is the hub that does the run's background work; anybody may read."""

    def __init__(self, folder: Path, budget_bytes: int = 0, secret: bytes = b"") -> None:
        """`secret` decides with a submission's name whether it is kept: who sends it can choose the name."""
        self.folder, self.budget_bytes, self._secret = folder, budget_bytes, secret
        self.next_group, self.cursor, self.rate = 0, (0, ""), 1.0
        self._lock = FolderLock(folder)

    def open(self) -> None:
        """For writing: continue behind the newest file. `ResourceError` while another hub of this folder writes."""
        ensure_folder(self.folder)
        self._lock.acquire(StopToken())
        try:
            for left in self.folder.glob(".groups-*"):
                left.unlink(missing_ok=True)
            if paths := self.paths():
                said = self._said(paths[-1])
                self.next_group = _range(paths[-1])[1] + 1
                self.cursor, self.rate = (int(said["decided_at_ms"]), str(said["submission"])), float(said["rate"])
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        self._lock.release()

    def paths(self) -> list[Path]:
        """In the order of their groups, without leftovers of a merge."""
        try:
            found = sorted(path for path in self.folder.iterdir() if NAMED.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise resource_error("read", self.folder, error) from error
        ranges = {path: _range(path) for path in found}
        return [path for path in found if not any(_is_within(ranges[path], other) for other in ranges.values())]

    def keeps(self, submission: str, outcome: str) -> bool:
        rate = self.rate if outcome == "accepted" else min(1.0, PREFERRED * self.rate)
        drawn = hmac.digest(self._secret, submission.encode(), "sha256") if self._secret else bytes.fromhex(submission)
        return int.from_bytes(drawn[:6], "big") < rate * 2**48

    def append(self, table: pa.Table, cursor: Cursor) -> Path:
        """Write groups that are numbered from `next_group` on."""
        first, last = table["group"][0].as_py(), table["group"][-1].as_py()
        path = self._write(table, first, last, cursor)
        self.next_group, self.cursor = last + 1, cursor
        self._merge()
        size_bytes = sum(each.stat().st_size for each in self.paths()) if self.budget_bytes else 0
        if size_bytes > self.budget_bytes and self.rate > LEAST_RATE:
            self._thin()
        return path

    def _merge(self) -> None:
        """Join the newest files once there are several small ones."""
        newest = self.paths()[-MERGED:]
        if len(newest) == MERGED and all(int(self._said(path)["rows"]) < SMALL_ROWS for path in newest):
            self._join(newest, [self._read(path) for path in newest])

    def _thin(self) -> None:
        """Halve the rate, and leave the bulk of the groups out that it excludes now."""
        import pyarrow.compute as pc

        self.rate /= 2
        for path in self.paths():
            table = self._read(path)
            pairs = zip(table["submission"].to_pylist(), table["outcome"].to_pylist(), strict=True)
            kept = pc.and_(table["kept"], [self.keeps(submission, outcome) for submission, outcome in pairs])
            for name in ("kept", *BULK):
                there = schema().field(name)
                column = kept if name == "kept" else pc.if_else(kept, table[name], None)
                table = table.set_column(table.schema.get_field_index(name), there, column)
            self._join([path], [table])

    def _join(self, old: Sequence[Path], tables: Sequence[pa.Table]) -> None:
        import pyarrow as pa

        said = self._said(old[-1])
        self._write(
            pa.concat_tables(tables), _range(old[0])[0], _range(old[-1])[1],
            (int(said["decided_at_ms"]), str(said["submission"])),
        )  # fmt: skip
        if len(old) > 1:
            for path in old:
                path.unlink(missing_ok=True)

    def _write(self, table: pa.Table, first: int, last: int, cursor: Cursor) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        said = {"decided_at_ms": cursor[0], "submission": cursor[1], "rate": self.rate, "rows": table.num_rows}
        sink, path = pa.BufferOutputStream(), self.folder / f"groups-{first:010d}-{last:010d}.parquet"
        labelled = table.replace_schema_metadata({FORMAT: json.dumps(said)})
        pq.write_table(labelled, sink, compression="zstd", row_group_size=ROWS_PER_GROUP)
        point("hub.records.before_write")
        write_atomically(path, sink.getvalue().to_pybytes())
        point("hub.records.after_write")
        return path

    def _said(self, path: Path) -> Mapping[str, Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            said = json.loads((pq.read_schema(path).metadata or {})[FORMAT])
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise ResourceError(f"{path} holds no records of rollouts ({error}): move it away") from error
        return dict(said)

    def _read(self, path: Path, columns: Sequence[str] | None = None) -> pa.Table:
        return read_table(path, columns)


def read_table(path: Path, columns: Sequence[str] | None = None, row_group: int | None = None) -> pa.Table:
    """A file, or one of its parts of `ROWS_PER_GROUP` rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(pq.ParquetFile(path))
            names = None if columns is None else list(columns)
            return file.read(names) if row_group is None else file.read_row_group(row_group, names)
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise ResourceError(f"{path} cannot be read ({error}): remove it, or restore it from a backup") from error


def _is_within(groups: tuple[int, int], other: tuple[int, int]) -> bool:
    return groups != other and other[0] <= groups[0] and groups[1] <= other[1]


def _range(path: Path) -> tuple[int, int]:
    found = NAMED.fullmatch(path.name)
    assert found is not None, "only files of this name are listed"
    return int(found[1]), int(found[2])
