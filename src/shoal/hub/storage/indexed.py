"""Tables in this process: dictionaries that can undo a transaction, and indexes that every change keeps.

    table[key] = row ─► may it be? (unique) ─► journal: the row that was there ─► rows ─► indexes
    the transaction fails ─► the journal, backwards ─► rows and indexes as before it

A write costs what it changes, whatever the table holds: a simulated hour of ten thousand workers writes millions of
times into tables of hundreds of thousands of rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from typing import Any, Generic, Protocol, TypeVar, overload

from shoal.hub.storage.protocol import StaleRow

K = TypeVar("K")
R = TypeVar("R")
T = TypeVar("T")
K_contra = TypeVar("K_contra", contravariant=True)
R_contra = TypeVar("R_contra", contravariant=True)

_ABSENT: Any = object()


class Index(Protocol[K_contra, R_contra]):
    """Told of every row that comes and goes; a row that changes goes and comes."""

    def check(self, key: K_contra, row: R_contra) -> None:
        """Raise `StaleRow` if the row may not come."""
        ...

    def add(self, key: K_contra, row: R_contra) -> None: ...

    def remove(self, key: K_contra, row: R_contra) -> None: ...


class Journal:
    """What a transaction has overwritten in tables that share this journal, in order; outside of one, nothing."""

    def __init__(self) -> None:
        self._overwritten: list[tuple[Table[Any, Any], Any, Any]] | None = None

    def note(self, table: Table[Any, Any], key: Any, before: Any) -> None:
        if self._overwritten is not None:
            self._overwritten.append((table, key, before))

    def begin(self) -> None:
        self._overwritten = []

    def undo(self) -> None:
        """The transaction has failed: put everything back as it was."""
        overwritten, self._overwritten = self._overwritten or [], None
        for table, key, before in reversed(overwritten):
            table.restore(key, before)

    def forget(self) -> None:
        """The transaction has ended well."""
        self._overwritten = None


class Table(MutableMapping[K, R]):
    """Rows by key."""

    def __init__(self, *indexes: Index[K, R]) -> None:
        self._rows: dict[K, R] = {}
        self._indexes = indexes
        self.journal = Journal()

    def __getitem__(self, key: K) -> R:
        return self._rows[key]

    def __setitem__(self, key: K, row: R) -> None:
        before = self._rows.get(key, _ABSENT)
        for index in self._indexes:
            index.check(key, row)
        self.journal.note(self, key, before)
        self._put(key, before, row)

    def __delitem__(self, key: K) -> None:
        before = self._rows[key]
        self.journal.note(self, key, before)
        self._put(key, before, _ABSENT)

    def restore(self, key: K, row: Any) -> None:
        """Put a row back, or take one away that was not there, without a note of it."""
        self._put(key, self._rows.get(key, _ABSENT), row)

    def _put(self, key: K, before: Any, row: Any) -> None:
        if before is not _ABSENT:
            for index in self._indexes:
                index.remove(key, before)
        if row is _ABSENT:
            self._rows.pop(key, None)
            return
        self._rows[key] = row
        for index in self._indexes:
            index.add(key, row)

    def __iter__(self) -> Iterator[K]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    @overload
    def get(self, key: K, /) -> R | None: ...

    @overload
    def get(self, key: K, /, default: R | T) -> R | T: ...

    def get(self, key: K, /, default: Any = None) -> Any:
        return self._rows.get(key, default)

    def keys(self) -> KeysView[K]:
        return self._rows.keys()

    def values(self) -> ValuesView[R]:
        return self._rows.values()

    def items(self) -> ItemsView[K, R]:
        return self._rows.items()


class Grouped(Generic[K, R]):
    """Keys by what `value_of` says of their rows; None: in no group."""

    def __init__(self, value_of: Callable[[R], Hashable | None]) -> None:
        self._value_of = value_of
        self._groups: dict[Hashable, dict[K, None]] = {}

    def check(self, key: K, row: R) -> None:
        """Any row may come."""

    def add(self, key: K, row: R) -> None:
        value = self._value_of(row)
        if value is not None:
            self._groups.setdefault(value, {})[key] = None

    def remove(self, key: K, row: R) -> None:
        value = self._value_of(row)
        if value is None:
            return
        group = self._groups[value]
        del group[key]
        if not group:
            del self._groups[value]

    def of(self, value: Hashable) -> Collection[K]:
        """The keys of a group."""
        return self._groups.get(value, {}).keys()

    def groups(self) -> KeysView[Any]:
        return self._groups.keys()


class Ordered(Generic[K, R]):
    """Keys in the order of what `place_of` says of their rows; None: in no place."""

    def __init__(self, place_of: Callable[[R], tuple[int, ...] | None]) -> None:
        self._place_of = place_of
        self._entries: list[tuple[tuple[int, ...], K]] = []

    def check(self, key: K, row: R) -> None:
        """Any row may come."""

    def add(self, key: K, row: R) -> None:
        place = self._place_of(row)
        if place is not None:
            insort(self._entries, (place, key))

    def remove(self, key: K, row: R) -> None:
        place = self._place_of(row)
        if place is not None:
            del self._entries[bisect_left(self._entries, (place, key))]

    def until(self, last: int) -> list[K]:
        """The keys whose place begins with `last` or less, in order."""
        end = bisect_right(self._entries, last, key=lambda entry: entry[0][0])
        return [key for _place, key in self._entries[:end]]

    def newest(self, count: int) -> list[K]:
        """The last `count` keys, backwards."""
        return [key for _place, key in self._entries[: -count - 1 : -1]]

    def first(self) -> K | None:
        return self._entries[0][1] if self._entries else None

    def last(self) -> K | None:
        return self._entries[-1][1] if self._entries else None


class Unique(Generic[K, R]):
    """At most one row for each value of `value_of`; None: as many as there are. `what` names it in the refusal."""

    def __init__(self, what: str, value_of: Callable[[R], Hashable | None]) -> None:
        self._what = what
        self._value_of = value_of
        self._keys: dict[Hashable, K] = {}

    def check(self, key: K, row: R) -> None:
        value = self._value_of(row)
        if value is not None and self._keys.get(value, key) != key:
            raise StaleRow(f"two rows of {type(row).__name__} have the same {self._what}: {value}")

    def add(self, key: K, row: R) -> None:
        value = self._value_of(row)
        if value is not None:
            self._keys[value] = key

    def remove(self, key: K, row: R) -> None:  # noqa: ARG002  a value is of one key
        value = self._value_of(row)
        if value is not None:
            self._keys.pop(value, None)

    def find(self, value: Hashable) -> K | None:
        return self._keys.get(value)


class Counted(Generic[K, R]):
    """How many rows there are for each value of `value_of`."""

    def __init__(self, value_of: Callable[[R], Hashable]) -> None:
        self._value_of = value_of
        self.counts: Counter[Any] = Counter()

    def check(self, key: K, row: R) -> None:
        """Any row may come."""

    def add(self, key: K, row: R) -> None:  # noqa: ARG002  only how many
        self.counts[self._value_of(row)] += 1

    def remove(self, key: K, row: R) -> None:  # noqa: ARG002  only how many
        value = self._value_of(row)
        self.counts[value] -= 1
        if not self.counts[value]:
            del self.counts[value]


class Told(Generic[K, R]):
    """An index that is two functions: of a row that comes, and of one that goes."""

    def __init__(self, comes: Callable[[R], None], goes: Callable[[R], None]) -> None:
        self._comes, self._goes = comes, goes

    def check(self, key: K, row: R) -> None:
        """Any row may come."""

    def add(self, key: K, row: R) -> None:  # noqa: ARG002  the row says it all
        self._comes(row)

    def remove(self, key: K, row: R) -> None:  # noqa: ARG002  the row says it all
        self._goes(row)
