"""What a server may hand out, and how a request waits for what is on its way.

A catalogue answers two questions about a name: is it there, and will it come? The origin's folder only knows the first;
a relay knows both, because a signed manifest told it what to expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from shoal.shardcast.tree import Tree


class Catalogue(Protocol):
    """What a server may hand out."""

    def find(self, key: str) -> Path | None:
        """The file, if it may be served now."""

    def expects(self, key: str) -> bool:
        """Whether a file that is not there now is on its way."""

    def health(self) -> dict[str, Any]:
        """Numbers for /health."""


class FolderCatalogue:
    """A tree that somebody publishes into: what is there is whole, and nothing else is promised."""

    def __init__(self, folder: Path) -> None:
        self._tree = Tree(folder)

    def find(self, key: str) -> Path | None:
        path = self._tree.path(key)
        return path if path.is_file() else None

    def expects(self, key: str) -> bool:  # noqa: ARG002
        return False

    def health(self) -> dict[str, Any]:
        return {"role": "origin", "versions": [f"{place[0]}.{place[1]}" for place in self._tree.places()]}


class Arrivals:
    """Lets requests wait for a name, and any thread say that it is there."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._lock = threading.Lock()

    def attach(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            self._loop = loop

    def notify(self, key: str) -> None:
        """From any thread. Before `attach` nobody can be waiting, so nothing is lost."""
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
