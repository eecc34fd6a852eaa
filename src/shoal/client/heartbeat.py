"""The heartbeat: a thread that reports every few seconds to the hub what this process does.

    role ─ Activity ─► Heartbeat ─► hub ─► HeartbeatReply ─► on_reply()      in this thread
                                     └─ refused (banned, unknown) ─► refusal   the role checks it and ends

An unreachable hub is not reported here, because the role's own calls report it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.client.hub import HubClient
from shoal.errors import DeadlineExceeded, HubRefused, HubUnreachable, ProtocolError
from shoal.protocol import Heartbeat, HeartbeatReply
from shoal.runtime.clock import Clock, SystemClock

log = logging.getLogger(__name__)

JOIN_S = 5.0
TEXT_LIMIT = 200


class Activity:
    """The present work or wait of a role, and its counters. Thread-safe. `idle_s`: all time but `busy_s`. `paused`: why
    it does no work at all."""

    paused = ""

    def __init__(self, clock: Clock = SystemClock()) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._began, self._busy_s = clock.monotonic_s(), 0.0
        self._doing: tuple[str, float] | None = None  # since when
        self._waiting: tuple[str, float] | None = None
        self._counters: Counter[str] = Counter()
        self._progress: dict[str, int] = {}

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        since_s = self._clock.monotonic_s()
        self._doing = doing, since_s
        try:
            yield
        finally:
            with self._lock:
                self._busy_s += self._clock.monotonic_s() - since_s
                self._doing = None

    def says(self, doing: str) -> None:
        """More about what it is busy with."""
        with self._lock:
            self._doing = self._doing and (doing, self._doing[1])

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        self._waiting = what, self._clock.monotonic_s()
        try:
            yield
        finally:
            self._waiting = None

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counters[name] += amount

    def generated(self, lease: str, tokens: int) -> None:
        with self._lock:
            self._progress[lease] = max(tokens, self._progress.get(lease, 0))

    def ended(self, lease: str) -> None:
        with self._lock:
            self._progress.pop(lease, None)

    def heartbeat(self) -> Heartbeat:
        with self._lock:
            now_s = self._clock.monotonic_s()
            doing, doing_since_s = self._doing or ("", now_s)
            waiting_for, waiting_since_s = self._waiting or ("", now_s)
            busy_s = self._busy_s + now_s - doing_since_s
            times = {"busy_s": round(busy_s, 3), "idle_s": round(now_s - self._began - busy_s, 3)}
            return Heartbeat(
                doing=(self.paused or doing)[:TEXT_LIMIT], waiting_for=waiting_for[:TEXT_LIMIT],
                waiting_s=round(max(0.0, now_s - waiting_since_s), 3), counters={**self._counters, **times},
                progress=dict(self._progress),
            )  # fmt: skip


@dataclass(frozen=True)
class Intervals:
    """`poll_s`: duration of one long poll, and so the longest time until an idle process stops. A hub ends a worker's
    leases after 20 s without a heartbeat. `patience_s`: how long to wait for a hub that does not answer."""

    poll_s: float = 5.0
    heartbeat_s: float = 5.0
    patience_s: float = 600.0


class RegularHeartbeat:
    def __init__(
        self, client: HubClient, every_s: float, activity: Activity, on_reply: Callable[[HeartbeatReply], None]
    ) -> None:
        self._client, self._every_s, self._activity, self._on_reply = client, every_s, activity, on_reply
        self._changed, self._due_s, self._ended = threading.Condition(), 0.0, False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.refusal: HubRefused | None = None

    def __enter__(self) -> RegularHeartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(JOIN_S)

    def soon(self, after_s: float = 0.0) -> None:
        """Beat after so many seconds, if the next regular beat is later."""
        with self._changed:
            self._due_s = min(self._due_s, time.monotonic() + after_s)
            self._changed.notify()

    def once(self) -> None:
        try:
            client = self._client.patient(self._every_s)  # each time: the run may have further hubs by now
            self._on_reply(client.heartbeat(self._activity.heartbeat()))
        except HubRefused as refusal:
            self.refusal = refusal
        except (HubUnreachable, DeadlineExceeded, ProtocolError) as error:
            log.debug("no heartbeat: %s", error)

    def _run(self) -> None:
        while self.refusal is None:
            with self._changed:
                self._due_s = time.monotonic() + self._every_s
            self.once()
            with self._changed:
                while not self._ended and (left_s := self._due_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                if self._ended:
                    return
