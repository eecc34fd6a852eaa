"""What must be known of every row before the first task is drawn: can it be asked, and what question is it?

table ─► batches of the asking columns ─► digest of each prompt, usable or not, within the band or not
                                          (answers are not read: that would be most of the bytes)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.environments.data.cache import data_digest, entry_name, load_arrays, store_arrays
from shoal.environments.data.checking import Problems
from shoal.environments.data.locating import locate
from shoal.environments.data.readers import ROW_LIMIT_BYTES, Batch, Broken, rows_of, values_of
from shoal.environments.data.table import Table
from shoal.environments.formats.protocol import Format
from shoal.environments.formats.registry import DatasetOptions, fit
from shoal.environments.graders.registry import GRADERS, TASK_TYPES
from shoal.environments.questions import BLANK, DIGEST_BYTES, ascii_digest, prompt_digest, question_digest
from shoal.errors import EnvironmentSetupError, UnusableTask

if TYPE_CHECKING:
    import numpy as np

    Flags = np.ndarray[Any, np.dtype[np.bool_]]
    Digests = np.ndarray[Any, np.dtype[np.uint8]]
    Rows = np.ndarray[Any, np.dtype[np.int64]]

VERSION = 3
MOST_KINDS = 1000
SLACK = 1e-9  # of a solve rate that was written with fewer digits
NONE = b"\0" * DIGEST_BYTES
TOO_LARGE = f"the prompt has more than {ROW_LIMIT_BYTES // 2**20} MB"


@dataclass(frozen=True)
class Band:
    """Which solve rates to keep, and of which column."""

    column: str
    low: float
    high: float


@dataclass(frozen=True)
class Scan:
    """One entry per row: the prompt's digest, whether it can be asked, whether its solve rate is in the band, its kind.

    `graders` are those that the rows need. `kinds` are the kinds that rows call themselves (a row that names none is of
    the kind ""), `kind_of` has the number of each row's.
    """

    digests: Digests
    usable: Flags
    kept: Flags
    kind_of: np.ndarray[Any, np.dtype[np.int32]]
    kinds: tuple[str, ...]
    graders: tuple[str, ...]
    problems: Problems


def scan(table: Table, layout: Format, band: Band | None) -> Scan:
    """Look at all rows; what was found is remembered until a file changes."""
    chosen = band and [band.column, band.low, band.high]
    about = (VERSION, table.identities(), layout.signature, chosen, sorted({*GRADERS, *TASK_TYPES}))
    name = entry_name("scan", *about)
    known = load_arrays(name)
    if known is not None and len(known[0]["usable"]) == table.rows:
        arrays, beside = known
        problems = Problems.from_json(**beside["problems"])
        return Scan(**arrays, kinds=tuple(beside["kinds"]), graders=tuple(beside["graders"]), problems=problems)
    found = _scan(table, layout, band)
    beside = {"problems": found.problems.as_json(), "kinds": found.kinds, "graders": found.graders}
    store_arrays(name, {key: getattr(found, key) for key in ("digests", "usable", "kept", "kind_of")}, beside)
    return found


def _scan(table: Table, layout: Format, band: Band | None) -> Scan:
    import numpy as np

    problems, graders, first = Problems(), set[str](), 0
    digests, kept, hashes, kinds, kind_of = bytearray(), [], [], dict[str, int](), []
    columns = tuple(
        dict.fromkeys([*layout.asks, *([layout.id] if layout.id else []), *([band.column] if band else [])])
    )
    for batch in table.scan(columns):
        found = _Batch(batch, layout, first, problems)
        digests += found.digests()
        graders |= found.graders
        kind_of.append(np.fromiter((_numbered(kind, kinds) for kind in found.kinds()), np.int32, found.size))
        hashes.extend([_hashes(batch[layout.id], found.size)] if layout.id else [])
        kept.append(_within(batch[band.column], band) if band else np.ones(found.size, bool))
        first += found.size
    matrix = np.frombuffer(bytes(digests), np.uint8).reshape(first, DIGEST_BYTES)
    usable: Flags = np.asarray(matrix.any(axis=1))
    if layout.id:
        usable = usable & ~_repeats(np.concatenate(hashes), layout.id, table, problems, usable)
    return Scan(
        matrix, usable, np.concatenate(kept), np.concatenate(kind_of), tuple(kinds), tuple(sorted(graders)), problems
    )


def _numbered(kind: str, kinds: dict[str, int]) -> int:
    """The number of a kind; whatever comes after very many has none of its own."""
    return kinds.setdefault(kind if kind in kinds or len(kinds) < MOST_KINDS else "", len(kinds))


class _Batch:
    """One batch on its way to digests; a row that cannot be asked has the digest of zeros and is a problem."""

    def __init__(self, batch: Batch, layout: Format, first: int, problems: Problems) -> None:
        self._batch, self._layout, self._first, self._problems = batch, layout, first, problems
        self.size = len(batch[layout.asks[0]])
        self.graders: set[str] = set()

    def kinds(self) -> list[str]:
        """What each row says of which kind it is; the grader, where rows say nothing."""
        column = self._layout.kinds
        if not column:
            return [self._layout.grader] * self.size
        return [value[:100] if isinstance(value, str) else "" for value in values_of(self._batch[column])]

    def digests(self) -> bytes:
        texts = _texts(self._batch[self._layout.plain]) if self._layout.plain else None
        return self._one_by_one() if texts is None else self._plain(texts)

    def _plain(self, texts: list[bytes]) -> bytes:
        """Prompts that are a column of text: the quick way, and one by one only where something is wrong."""
        wrong = self._unknown_kinds()
        if all(map(bytes.isascii, texts)) and max(map(len, texts), default=0) <= ROW_LIMIT_BYTES:
            digests: list[bytes | str] = [ascii_digest(text) for text in texts]
        else:
            digests = [self._digest(text) for text in texts]
        if wrong or BLANK in digests or any(isinstance(digest, str) for digest in digests):
            self._leave_out(digests, texts, wrong)
        return b"".join(digests)  # type: ignore[arg-type]

    def _leave_out(self, digests: list[bytes | str], texts: list[bytes], wrong: dict[int, str]) -> None:
        for number, (digest, text) in enumerate(zip(digests, texts, strict=True)):
            if number in wrong or isinstance(digest, str) or digest == BLANK:
                reason = wrong.get(number) or (digest if isinstance(digest, str) else self._blank(number, text))
                self._problems.add(self._first + number, reason)
                digests[number] = NONE

    @staticmethod
    def _digest(text: bytes) -> bytes | str:
        """The prompt's digest, or what is wrong with it."""
        if len(text) > ROW_LIMIT_BYTES:
            return TOO_LARGE
        try:
            return prompt_digest(text.decode())
        except UnicodeDecodeError:
            return "the prompt is not UTF-8"

    def _blank(self, number: int, text: bytes) -> str:
        missing = not text and not self._batch[self._layout.plain][number].is_valid
        return f"{self._layout.plain} is {'missing' if missing else 'empty'}"

    def _unknown_kinds(self) -> dict[int, str]:
        """Row of the batch → what is wrong with its task type."""
        kinds = self._layout.kinds
        if not kinds:
            self.graders.add(self._layout.grader)
            return {}
        values = [value if isinstance(value, str) else _told_type(value) for value in values_of(self._batch[kinds])]
        known: dict[str, str] = {}
        for value in set(values):
            try:
                self.graders.add(self._layout.judge(value))
            except UnusableTask as error:
                known[value] = str(error)
        return {number: known[value] for number, value in enumerate(values) if value in known} if known else {}

    def _one_by_one(self) -> bytes:
        """Prompts that are made of several columns, or are conversations."""
        digests = bytearray()
        for number, row in enumerate(rows_of(self._batch)):
            try:
                digests += self._asked(row)
            except UnusableTask as error:
                self._problems.add(self._first + number, str(error))
                digests += NONE
        return bytes(digests)

    def _asked(self, row: dict[str, Any] | Broken) -> bytes:
        if isinstance(row, Broken):
            raise UnusableTask(row.reason)
        question = self._layout.question(row)
        if len(question.prompt) > ROW_LIMIT_BYTES:
            raise UnusableTask(TOO_LARGE)
        self.graders.add(question.kind)
        return question_digest(question.prompt, question.history)


def _told_type(value: Any) -> str:
    """A task type that is no text, as text: a list or a record can be no key."""
    return value.reason if isinstance(value, Broken) else str(value)[:100]


def _texts(column: Any) -> list[bytes] | None:
    """The bytes of every value of a column of text, without making strings of them; None if it is no such column."""
    import numpy as np

    kind = "list" if isinstance(column, list) else str(column.type)
    if kind not in ("string", "large_string"):
        return None
    _valid, offsets, data = column.buffers()
    width = np.int64 if kind == "large_string" else np.int32
    cuts = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1]
    blob = b"" if data is None else data.slice(int(cuts[0]), int(cuts[-1] - cuts[0])).to_pybytes()
    return [blob[begin:end] for begin, end in pairwise((cuts - cuts[0]).tolist())]


def _hashes(column: Any, size: int) -> np.ndarray[Any, Any]:
    """A number for each id; 0 where there is none."""
    import numpy as np

    texts = _texts(column)
    if texts is not None:  # the hash of nothing is 0
        return np.fromiter(map(hash, texts), np.int64, size)
    values = column if isinstance(column, list) else column.to_pylist()
    return np.fromiter(
        (0 if value is None else hash(str(value).encode(errors="replace")) for value in values), np.int64, size
    )


def _repeats(hashes: np.ndarray[Any, Any], column: str, table: Table, problems: Problems, usable: Flags) -> Flags:
    """Rows whose id an earlier row has. Equal hashes of 64 bits are taken for equal ids."""
    import numpy as np

    order = np.argsort(hashes, kind="stable")
    again = np.zeros(len(hashes), bool)
    same = (hashes[order][1:] == hashes[order][:-1]) & (hashes[order][1:] != 0)
    again[order[1:][same]] = True
    again &= usable
    for count, row in enumerate(np.flatnonzero(again).tolist()):
        problems.add(row, f"{column} {_told(table, row, column)}is that of an earlier row" if count < 100 else REPEATED)
    return again


REPEATED = "its id is that of an earlier row"


def _told(table: Table, row: int, column: str) -> str:
    try:
        return f"{str(table.row(row, (column,))[column])[:60]!r} "
    except UnusableTask:
        return ""  # an id that is no text


def _within(column: Any, band: Band) -> Flags:
    import numpy as np

    values = column if isinstance(column, list) else column.to_pylist()
    if any(isinstance(value, str) for value in values):
        raise EnvironmentSetupError(f"column {band.column} holds text, not solve rates; check options.solve_rate")
    rates = np.array([_rate(value) for value in values], float)
    return (rates >= band.low - SLACK) & (rates <= band.high + SLACK)


def _rate(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


LARGEST_SHARE = 5
"""At most a fifth of the questions is held out, of a data set that is small."""


@dataclass(frozen=True)
class Splits:
    """Row numbers of each split, ascending. `shared` rows are in neither: their question is a held-out one."""

    train: Rows
    held_out: Rows
    shared: int


def split_one(found: Scan, held_out_size: int) -> Splits:
    """Hold out the questions with the lowest digests, each by its first row; rows that repeat one are in no split."""
    import numpy as np

    rows = np.flatnonzero(found.usable & found.kept)
    keys = _keys(found)[rows]
    questions, firsts = np.unique(keys, return_index=True)
    size = min(held_out_size, len(questions) // LARGEST_SHARE)
    held_out = np.sort(rows[firsts[:size]])
    aside = np.isin(keys, questions[:size])
    return Splits(train=rows[~aside], held_out=held_out, shared=int(aside.sum()) - len(held_out))


def split_two(found: Scan, held_out: Scan, held_out_size: int) -> Splits:
    """Train on one data set and hold out another; rows of the first whose question the second has are left out.

    All questions of the second count, also those beyond `held_out_size`: nobody can say later that they were clean.
    """
    import numpy as np

    rows = np.flatnonzero(found.usable & found.kept)
    aside = np.isin(_keys(found)[rows], _keys(held_out)[held_out.usable])
    others = np.flatnonzero(held_out.usable)[:held_out_size]
    return Splits(train=rows[~aside], held_out=others, shared=int(aside.sum()))


def _keys(found: Scan) -> np.ndarray[Any, Any]:
    """The first 64 bits of each digest as a number: two of a million questions share them with odds of 1 to 10^7."""
    import numpy as np

    return np.ascontiguousarray(found.digests[:, :8]).view(">u8").ravel().astype(np.uint64)


SOLVE_RATE = "solve_rate"


@dataclass(frozen=True, eq=False)
class Opened:
    """A data set that can be read: its table, how rows become tasks, what every row is, and which data it is."""

    path: Path
    table: Table
    layout: Format
    found: Scan
    digest: str


def open_data(path: Path, options: DatasetOptions) -> Opened:
    """Open the data set at `path`. What is wrong with its columns is said first: reading all of it may take long.

    The digest is computed in a thread beside the scan.
    """
    table = Table(locate(path, options.split))
    layout = fit(options.format, table.columns, options.wanted)
    band = band_of(options, table.columns)
    table.agree([*layout.columns, *([band.column] if band else [])])
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(data_digest, table.paths)
        return Opened(path, table, layout, scan(table, layout, band), digest.result())


def band_of(options: DatasetOptions, columns: tuple[str, ...]) -> Band | None:
    """The solve rates to keep, with their column."""
    if options.keep_solve_rate is None:
        return None
    named = [options.solve_rate] if options.solve_rate else [name for name in columns if name.startswith(SOLVE_RATE)]
    if len(named) != 1 or named[0] not in columns:
        raise EnvironmentSetupError(
            f"keep_solve_rate needs one column of solve rates, not {', '.join(named) or 'none'};"
            f" there are {', '.join(columns)}: set environment.options.solve_rate"
        )
    return Band(named[0], *options.keep_solve_rate)
