"""The ledger's outbox: what decisions recorded, moved into the hash chain in order, by the leader alone.

    decisions, at any hub ─► outbox ─► post: one exclusive transaction, so that nobody is half-way through recording
                                        └► entries hashed onto the last one ─► ledger; rows dropped from the outbox

Accepting work thus never waits for the chain's last row. Nothing is lost or posted twice, whoever is killed when: the
rows move from one table to the other in one transaction, and two that post at the same time do so one after the other.
"""

from __future__ import annotations

from shoal import ledger
from shoal.hub.service.context import Context
from shoal.protocol import LedgerEntry
from shoal.runtime.crash import point

POSTED_AT_A_TIME = 500
"""Others wait while a page is posted, so a long outbox is posted in pages."""


class Posting:
    def __init__(self, context: Context) -> None:
        self._context = context

    def post(self) -> None:
        """Move all that is in the outbox now, if this hub leads: whoever reads the ledger here reads its own writes."""
        if not self._context.leads:
            return
        with self._context.storage.read() as reader:
            left = reader.outbox_length()
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
