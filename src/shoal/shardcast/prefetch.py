"""Fetching ahead: as soon as a version is out it is fetched in the background, while work on the one before goes on.

    source ──(long poll)──► a newer head ─► downloader.fetch in the background ─► on this disk when it is asked for
                                             gives way at once to a fetch that somebody waits for

Whatever goes wrong here costs nothing but time: whoever needs the version fetches it then, and hears of the failure.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from shoal.errors import BroadcastError, ShoalError
from shoal.protocol import PolicyRef
from shoal.runtime.stop import StopToken
from shoal.shardcast.download import Downloader
from shoal.shardcast.transfer import Superseded

log = logging.getLogger(__name__)

WAIT_S = 10.0  # how long a source may hold the question; below the time after which silence counts as failure
PACE_S = 1.0  # between two questions to a source that does not hold them
FETCH_S = 3600.0
END_S = 5.0


class Prefetch:
    """A thread that keeps the newest version on this disk.

    >>> with Prefetch(downloader, stop):                                 # doctest: +SKIP
    ...     work()
    """

    def __init__(self, downloader: Downloader, stop: StopToken) -> None:
        self._downloader = downloader
        self._stop = stop
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The thread ends when its question does; nobody waits longer than `END_S` for it."""
        self._closing.set()
        if self._stop.is_set():
            self._thread.join(END_S)

    def _run(self) -> None:
        follower = self._downloader.follower()
        unfetched: PolicyRef | None = None  # it gave way to somebody who may have given up since
        try:
            while not self._ended():
                newer = follower.newer(0.0 if unfetched else WAIT_S) or unfetched
                if newer is not None and not self._ended():
                    unfetched = None if self._fetch(newer) else newer
                if newer is None or unfetched:
                    self._closing.wait(PACE_S)
        finally:
            follower.close()

    def _fetch(self, ref: PolicyRef) -> bool:
        """Fetch it, or fail to; false if that had to give way."""
        try:
            self._downloader.fetch(ref, FETCH_S, background=True)
        except Superseded as error:
            log.debug("%s", error)
            return False
        except BroadcastError as error:
            log.info("could not be fetched ahead: %s", error)
        except ShoalError as error:  # a full disk, say: whoever needs the version ends by it
            log.warning("fetching ahead has ended; versions are fetched when they are needed: %s", error)
            self._closing.set()
        except Exception:
            log.exception("fetching ahead has ended; versions are fetched when they are needed")
            self._closing.set()
        return True

    def _ended(self) -> bool:
        return self._closing.is_set() or self._stop.is_set()
