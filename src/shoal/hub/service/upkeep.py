"""What happens without a request; of several hubs on one database the leader does it.

Rows move from the outbox into the ledger in one exclusive transaction: accepting work never waits for the chain's last
row, and nothing is lost or posted twice if a hub is killed at any point.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

from shoal import ledger
from shoal.errors import DiskError, ShoalError
from shoal.hub.buckets import Buckets
from shoal.hub.changes import Topic
from shoal.hub.service.archiving import Archiving
from shoal.hub.service.context import Context, holders
from shoal.hub.service.measuring import Evaluating
from shoal.hub.state import UNDECIDED_SUBMISSIONS, Moment, audits, credits, leases, nodes
from shoal.hub.storage import Reader
from shoal.protocol import MAX_SKEW_MS, LedgerEntry
from shoal.runtime import Clock, SystemClock, point

POSTED_AT_A_TIME = 500  # others wait while a page is posted, so a long outbox is posted in pages
READ_POSTS_PER_S, READ_POSTS = 4.0, 40  # for readers, who may be anyone: posting makes all others wait for a moment
TICK_S = 1.0
PATIENCE_S, FORGET_EVERY_MS, NONCES_PER_PAGE = 1.0, 60_000, 5_000
MATURED_PER_TICK = 500  # after a long pause of the hub much is due; others get their turn in between
ALARMS_LOGGED = 20
ASLEEP_MS = 5_000  # after a longer pause between ticks it was the hub that was away, not the workers

log = logging.getLogger("shoal.hub")


class Posting:
    def __init__(self, context: Context, clock: Clock = SystemClock()) -> None:
        self._context, self._lock = context, threading.Lock()
        self._clock = clock  # readers' buckets go by real time, whatever clock the hub goes by
        self._readers = Buckets(READ_POSTS_PER_S, READ_POSTS / READ_POSTS_PER_S)

    def post(self) -> None:
        if self._context.leads:
            with self._lock:
                self._post_all()

    def post_for_reader(self) -> None:
        """As `post`, so that callers read their own writes, unless very many read very often."""
        if not self._context.leads or not self._outgoing():
            return
        if self._readers.take("", self._clock.monotonic_s()) > 0 or not self._lock.acquire(timeout=PATIENCE_S):
            return
        try:
            self._post_all()
        finally:
            self._lock.release()

    def _outgoing(self) -> int:
        with self._context.storage.read() as reader:
            return reader.outbox_length()

    def _post_all(self) -> None:
        for _ in range(0, self._outgoing(), POSTED_AT_A_TIME):
            with self._context.storage.write(exclusive=True) as transaction:
                outgoing, last = transaction.outbox(POSTED_AT_A_TIME), transaction.ledger_last()
                entries: list[LedgerEntry] = []
                for row in outgoing:
                    last = ledger.append(last, row.kind, row.body, row.at_ms)
                    entries.append(last)
                if entries:
                    transaction.post(entries, outgoing[-1].id)
                    point("hub.ledger.before_commit")
            if entries:
                point("hub.ledger.after_commit")


def note_failure(context: Context, what: str, error: Exception) -> None:
    log.error("%s failed: %s", what, error)
    if isinstance(error, DiskError):
        context.fail(error)


class Upkeep:
    def __init__(self, context: Context, posting: Posting, evaluating: Evaluating, archiving: Archiving) -> None:
        self.context = self._context = context
        self._posting, self._evaluating, self._archiving = posting, evaluating, archiving
        self._forgot_at_ms, self._ticked_ms = 0, context.clock.now_ms()
        self._alarms: list[str] = []

    def tick(self) -> None:
        """All that is due, each by itself: what fails is tried again with the next tick, and stops nothing else."""
        leads = self._context.lead()  # fails while the database is away: for as long, nobody could reach the hub
        now_ms = self._context.clock.now_ms()
        if now_ms - self._ticked_ms > ASLEEP_MS:
            self._context.was_away(self._ticked_ms, now_ms)
        self._ticked_ms = now_ms
        self._context.storage.flush()
        self._context.storage.arrivals.forget_nonces(now_ms - MAX_SKEW_MS)
        self._context.look()
        if not leads:
            self._archiving.rest()
            return
        failures: list[Exception] = []
        post = lambda _now_ms: self._posting.post()  # noqa: E731
        parts = (self._end_overdue, self._end_silent, self._mature, post, self._forget, self._log_alarms)
        for part in (*parts, self._archiving.tick):
            try:
                part(now_ms)
            except Exception as error:  # noqa: BLE001  raised below
                failures.append(error)
        for further in failures[1:]:
            log.error("upkeep failed: %s", further, exc_info=further)
        if failures:
            raise failures[0]  # the caller knows which failures end the hub

    def _log_alarms(self, _now_ms: int) -> None:
        with self._context.storage.read() as reader:
            newest = reader.alarms(ALARMS_LOGGED)
        for message in reversed(newest):
            if message not in self._alarms:
                log.warning("alarm: %s", message)
        self._alarms = newest

    def _forget(self, now_ms: int) -> None:
        """Nonces are kept longer than one hub needs: another hub's clock may be behind by as much as is allowed."""
        if now_ms - self._forgot_at_ms < FORGET_EVERY_MS:
            return
        self._forgot_at_ms = now_ms
        with self._context.storage.write(durable=False) as transaction:
            transaction.forget_shown(now_ms - FORGET_EVERY_MS)
        forgotten = NONCES_PER_PAGE
        while forgotten == NONCES_PER_PAGE:
            with self._context.storage.write(durable=False) as transaction:
                forgotten = transaction.forget_nonces(now_ms - MAX_SKEW_MS, NONCES_PER_PAGE)

    def _end_overdue(self, now_ms: int) -> None:
        context = self._context
        with context.storage.read() as reader:
            late_leases = context.inexcusable(reader.overdue_holdings(now_ms), now_ms)
            late_audits = reader.overdue_audits(now_ms)
        if late_leases or late_audits:
            with context.decision(sweep=True, exclusive=True) as (transaction, moment):
                transaction.apply(audits.put_back(transaction.overdue_audits(moment.now_ms)))
        late_slices = context.rules.evaluation is not None and self._evaluating.expire(now_ms)
        if late_audits or late_slices:
            context.changes.notify(Topic.AUDITS)

    def _end_silent(self, now_ms: int) -> None:
        context, since_ms = self._context, now_ms - nodes.HERE_MS
        if since_ms < context.absence.until_ms:
            return
        with context.storage.read() as reader:
            silent = reader.silent_holdings(since_ms)
        if silent:
            with context.decision(exclusive=True) as (transaction, moment):
                gone = transaction.silent_holdings(since_ms)
                transaction.apply(leases.end(moment, gone, holders(transaction, gone), context.absence))
            context.changes.notify(Topic.LEASES, Topic.BATCHES)

    def _mature(self, now_ms: int) -> None:
        context = self._context
        with context.storage.read() as reader:
            moment = Moment(context.rules, reader.progress(counted=False), now_ms)
            is_due = bool(reader.due_credit(_due_until_ms(reader, moment), 1))
        if is_due:
            with context.decision(exclusive=True) as (transaction, moment):
                due = transaction.due_credit(_due_until_ms(transaction, moment), MATURED_PER_TICK)
                earners = transaction.nodes_named(list({row.node for row in due}))
                verdicts = transaction.verdicts_of([row.submission for row in due])
                transaction.apply(credits.mature(due, earners, verdicts, moment.now_ms))
                point("hub.credit.before_commit")
            point("hub.credit.after_commit")


def _due_until_ms(reader: Reader, moment: Moment) -> int:
    return credits.due_until_ms(moment, is_all_judged=not reader.submissions_in(UNDECIDED_SUBMISSIONS, 1))


async def keep_up(upkeep: Upkeep, in_thread: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
    """Tick until cancelled. A failed tick is logged and tried again, unless the disk is at an end."""
    while True:
        try:
            await in_thread(lambda: upkeep.tick())  # looked up each time
        except ShoalError as error:
            note_failure(upkeep.context, "upkeep", error)
        except Exception:  # a defect must be seen, and must not end the upkeep of a running run
            log.exception("upkeep failed")
        await asyncio.sleep(TICK_S)
