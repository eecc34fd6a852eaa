"""The ledger's outbox: what decisions recorded, moved into the hash chain in order, by the leader alone.

    decisions, at any hub ─► outbox ─► post: one exclusive transaction, so that nobody is half-way through recording
                                        └► entries hashed onto the last one ─► ledger; rows dropped from the outbox

Accepting work thus never waits for the chain's last row. Nothing is lost or posted twice, whoever is killed when: the
rows move from one table to the other in one transaction, and two that post at the same time do so one after the other.
"""

from __future__ import annotations

import threading

from shoal import ledger
from shoal.hub.limits import Buckets
from shoal.hub.service.context import Context
from shoal.protocol import LedgerEntry
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.crash import point

POSTED_AT_A_TIME = 500
"""Others wait while a page is posted, so a long outbox is posted in pages."""


READ_POSTS_PER_S = 4.0
READ_POSTS = 40
"""Posting makes all others wait for a moment, and anyone may read: so many times at once, and then every 250 ms, is it
done for a reader's sake. The upkeep does it each second anyway."""
PATIENCE_S = 1.0


class Posting:
    """The buckets of readers go by real time, whatever clock the hub goes by."""

    def __init__(self, context: Context, clock: Clock = SystemClock()) -> None:
        self._context = context
        self._clock = clock
        self._lock = threading.Lock()
        self._readers = Buckets(READ_POSTS_PER_S, READ_POSTS / READ_POSTS_PER_S)

    def post(self) -> None:
        """Move all that is in the outbox now, if this hub leads."""
        if self._context.leads:
            with self._lock:
                self._post_all(self._outgoing())

    def post_for_reader(self) -> None:
        """As `post`, now and then: who reads the ledger here reads its own writes, unless very many read very often."""
        if not self._context.leads or not self._outgoing():
            return
        if self._readers.take("", self._clock.monotonic_s()) > 0 or not self._lock.acquire(timeout=PATIENCE_S):
            return
        try:
            self._post_all(self._outgoing())  # somebody else may have done it meanwhile
        finally:
            self._lock.release()

    def _outgoing(self) -> int:
        with self._context.storage.read() as reader:
            return reader.outbox_length()

    def _post_all(self, left: int) -> None:
        while left > 0:
            left -= POSTED_AT_A_TIME
            self._post_page()

    def _post_page(self) -> None:
        with self._context.storage.write(exclusive=True) as transaction:
            outgoing = transaction.outbox(POSTED_AT_A_TIME)
            entries: list[LedgerEntry] = []
            last = transaction.ledger_last()
            for row in outgoing:
                last = ledger.append(last, row.kind, row.body, row.at_ms)
                entries.append(last)
            if entries:
                transaction.post(entries, outgoing[-1].id)
                point("hub.ledger.before_commit")
        if entries:
            point("hub.ledger.after_commit")
