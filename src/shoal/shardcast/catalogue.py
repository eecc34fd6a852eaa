"""What a server may hand out, and how a request waits for what is on its way.

A catalogue answers three questions: is a name there, will it come, and which chunks of a version are there? The
origin's folder only knows the first; a relay knows all, because a signed manifest told it what to expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.shardcast.manifest import Place
from shoal.shardcast.metrics import Metric
from shoal.shardcast.tree import Tree


@dataclass(frozen=True)
class Blob:
    """Bytes on disk: a whole file, or a span of one."""

    path: Path
    offset: int
    size_bytes: int

    @classmethod
    def whole(cls, path: Path) -> Blob | None:
        """The file at `path`, if there is one."""
        try:
            return cls(path, 0, path.stat().st_size)
        except FileNotFoundError:
            return None


class Catalogue(Protocol):
    """What a server may hand out. Asked on the event loop, so no answer may wait for a disk that others write to."""

    def find(self, key: str) -> Blob | None:
        """The bytes of this name, if they may be served now."""

    def expects(self, key: str) -> bool:
        """Whether a name that is not there now is on its way."""

    def have(self, place: Place) -> bytes | None:
        """The two maps of a version (see `Inventory`); None if it is not known here."""

    def have_count(self, place: Place) -> int | None:
        """How many bits are set in the first of them."""

    def lost(self, key: str) -> None:
        """A file that was found is not there, or too short: whoever can get it again does. Not in the event loop."""

    def health(self) -> dict[str, Any]:
        """Numbers for /health; `ok` is false if a person has to look after it."""

    def metrics(self) -> Sequence[Metric]:
        """Numbers for /metrics."""


class FolderCatalogue:
    """A tree that somebody publishes into: what is there is whole, and nothing else is promised."""

    def __init__(self, folder: Path) -> None:
        self._tree = Tree(folder)

    def find(self, key: str) -> Blob | None:
        return Blob.whole(self._tree.path(key))

    def expects(self, key: str) -> bool:  # noqa: ARG002
        return False

    def have(self, place: Place) -> bytes | None:  # noqa: ARG002
        return None

    def have_count(self, place: Place) -> int | None:  # noqa: ARG002
        return None

    def lost(self, key: str) -> None:  # noqa: ARG002
        return  # retention, or somebody who tidies up: nothing here can mend it

    def health(self) -> dict[str, Any]:
        return {"role": "origin", "versions": [f"{place[0]}.{place[1]}" for place in self._tree.places()]}

    def metrics(self) -> Sequence[Metric]:
        return [Metric("versions", "gauge", "Versions held.", len(self._tree.places()))]


class Arrivals:
    """Lets requests wait for a name, and any thread say that it is there.

    Nobody is woken for a name that nobody waits for. A waiter registers first and looks then; whoever brings something
    puts it there first and notifies then: so one of the two always sees the other.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._lock = threading.Lock()

    def attach(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            self._loop = loop

    def notify(self, key: str) -> None:
        """From any thread. Before `attach` nobody can be waiting, so nothing is lost."""
        if key not in self._waiting:
            return
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake, key)

    def waited_for(self, key: str) -> bool:
        return key in self._waiting

    @contextlib.contextmanager
    def waiter(self, key: str) -> Iterator[asyncio.Future[None]]:
        """A future that `notify(key)` fulfils; make it before looking whether the name is there."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            yield future
        finally:
            waiting = self._waiting.get(key, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(key, None)

    def _wake(self, key: str) -> None:
        for future in self._waiting.pop(key, set()):
            if not future.done():
                future.set_result(None)
