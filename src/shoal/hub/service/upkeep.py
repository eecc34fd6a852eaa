"""What happens without being asked: leases and audits that ran out, nonces that are no longer needed."""

from __future__ import annotations

from shoal.hub.changes import Topic
from shoal.hub.service.context import Context
from shoal.hub.state import audits

NONCES_EVERY_MS = 60_000


class Upkeep:
    """`tick` is called about once a second, so that a run goes on although nobody asks for anything."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._nonces_at_ms = 0

    def tick(self) -> None:
        context, now_ms = self._context, self._context.clock.now_ms()
        with context.storage.read() as reader:
            late_leases, late_audits = reader.overdue_holdings(now_ms), reader.overdue_audits(now_ms)
        if late_leases or late_audits:
            with context.decision(sweep=True) as (transaction, moment):
                transaction.apply(audits.expire(transaction.overdue_audits(moment.now_ms), moment.now_ms))
        if late_audits:
            context.changes.notify(Topic.AUDITS)
        if now_ms - self._nonces_at_ms >= NONCES_EVERY_MS:
            self._nonces_at_ms = now_ms
            with context.storage.write(durable=False) as transaction:
                transaction.forget_nonces(now_ms)
