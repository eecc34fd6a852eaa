"""Sends finished work beside generation: a few threads that empty the outbox, oldest first.

Several, because most of a submission's time is the hub's disk and the way there, which they share.

worker ─ put ─► outbox ─► uploader ─ PUT /submissions ─► hub        (or by way of the run's store: `client.delivery`)
   ▲                         │  receipt: removed · final refusal: set aside · no answer: tried again
   └───── `failure` ◄────────┘  the hub is gone for longer than the patience, or this node is shut out
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal.client import HubClient
from shoal.client.delivery import Delivery
from shoal.errors import DeadlineExceeded, HubRefused, ShoalError, ShutOut
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.crash import point
from shoal.runtime.files import resource_error
from shoal.runtime.stop import StopToken
from shoal.worker.outbox import Outbox, Parcel

log = logging.getLogger(__name__)

POLL_S = 0.1
JOIN_S = 10.0
UPLOADS = 4
UNAUTHORISED = 401


class Uploader:
    """Use as a context manager. `failure` is what the worker should end with, if anything."""

    def __init__(
        self, client: HubClient, outbox: Outbox, on_sent: Callable[[Parcel, bool], None], clock: Clock = SystemClock()
    ) -> None:
        self._outbox = outbox
        self._run = client.run_info().run
        self._delivery = Delivery(client, clock)
        self._on_sent = on_sent
        self._clock = clock
        self._end = StopToken()
        self._threads = [
            threading.Thread(target=self._empty, name=f"uploader-{number}", daemon=True) for number in range(UPLOADS)
        ]
        self.failure: ShoalError | None = None

    def __enter__(self) -> Uploader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._end.set("the worker ended")
        end_s = self._clock.monotonic_s() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock.monotonic_s()))
        self._delivery.close()

    def flush(self, timeout_s: float, give_up: Callable[[], bool]) -> bool:
        """Whether everything was sent, at the latest after the time-out, a failure, or when `give_up` says so."""
        end_s = self._clock.monotonic_s() + timeout_s
        while not self._outbox.wait_until_below(self._run, 1, POLL_S):
            if self.failure is not None or give_up() or self._clock.monotonic_s() > end_s:
                return False
        return True

    def _empty(self) -> None:
        while not self._end.is_set() and self.failure is None:
            parcel = self._outbox.take(self._run, POLL_S)
            if parcel is not None:
                self._send(parcel)

    def _send(self, parcel: Parcel) -> None:
        try:
            self._hand_in(parcel)
        except DeadlineExceeded:
            self._outbox.put_back(parcel)
            self._end.wait(POLL_S)  # stopping: try once more until the flush is over
        except (ShoalError, OSError) as error:  # also: the disk has no room for what the hub said
            self._outbox.put_back(parcel)
            self.failure = error if isinstance(error, ShoalError) else resource_error("send", parcel.path, error)

    def _hand_in(self, parcel: Parcel) -> None:
        point("worker.outbox.before_send")
        try:
            receipt = self._delivery.hand_in(parcel.lease, parcel.read())
        except HubRefused as refusal:
            return self._refused(parcel, refusal)
        log.debug("unit %d: receipt for %s", parcel.unit, receipt.submission)
        point("worker.outbox.after_receipt")
        self._outbox.delivered(parcel)
        return self._on_sent(parcel, True)

    def _refused(self, parcel: Parcel, refusal: HubRefused) -> None:
        if refusal.status == UNAUTHORISED or isinstance(refusal, ShutOut):
            self._outbox.put_back(parcel)
            self.failure = refusal  # about this node, not about the parcel: it stays
            return
        self._outbox.refuse(parcel, refusal.code, str(refusal))
        log.warning("unit %d was not taken: %s", parcel.unit, refusal)
        self._on_sent(parcel, False)
