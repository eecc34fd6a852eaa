"""Watching a run from outside: the hub is asked in one thread, what it says is shown and judged in another.

StatusPoller (own thread) ──asks──► hub /status         a hub that hangs holds up only this thread
      │ newest answer
      ▼
Reporter.tick (main thread, ten times a second) ─► History ─► Display.show
                                                     └──────► Watchdog ─► Ending
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import httpx
from pydantic import ValidationError

from shoal.client.http import open_http
from shoal.errors import CodecError
from shoal.protocol import RunStatus
from shoal.run.progress import Display, History, Scene
from shoal.run.watchdog import Watchdog
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.exchange import limited, read_body
from shoal.runtime.supervise import Ending, ProcessView

POLL_S = 1.0
TIMEOUT_S = 5.0
SUSPENDED_S = 5.0  # ticks come ten times a second
LAST_TIMEOUT_S = 2.0
MAX_STATUS_BYTES = 16 * 2**20


def fetch_status(url: str, http: httpx.Client, timeout_s: float = TIMEOUT_S) -> RunStatus | None:
    """The run's status; None while the hub does not answer."""
    try:
        with limited(timeout_s), http.stream("GET", f"{url}/status", timeout=timeout_s) as answer:
            if answer.status_code != httpx.codes.OK:
                return None
            return RunStatus.model_validate_json(read_body(answer, MAX_STATUS_BYTES))
    except (httpx.HTTPError, CodecError, ValidationError):
        return None


class StatusPoller:
    """Asks the hub about once a second from `__enter__` to `__exit__`."""

    def __init__(self, url: str, http: httpx.Client | None = None, every_s: float = POLL_S) -> None:
        self._url = url
        self._http = http or open_http()
        self._every_s = every_s
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._newest: RunStatus | None = None
        self._thread = threading.Thread(target=self._poll, name="status", daemon=True)

    def take(self) -> RunStatus | None:
        """The newest answer, unless it was taken before."""
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    def ask(self) -> RunStatus | None:
        """Ask now and wait for the answer, not for long."""
        return fetch_status(self._url, self._http, LAST_TIMEOUT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """By now the hub has ended, so a question that it left unanswered fails at once."""
        self._ended.set()
        self._thread.join(TIMEOUT_S + 1.0)
        self._http.close()

    def _poll(self) -> None:
        while not self._ended.wait(self._every_s):
            status = fetch_status(self._url, self._http)
            with self._lock:
                self._newest = status or self._newest


@dataclass
class Reporter:
    """What `launch` calls ten times a second: takes in what is new, has it shown, and may end the run."""

    source: StatusPoller
    display: Display
    watchdog: Watchdog
    notes: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)
    processes: Callable[[], Sequence[ProcessView]] = tuple
    status: RunStatus | None = None
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self._started_s = self.clock.monotonic_s()
        self._next_s = self._ticked_s = self._started_s

    @property
    def elapsed_s(self) -> float:
        return self.clock.monotonic_s() - self._started_s

    def tick(self) -> Ending | None:
        self._take_in(self.source.take())
        processes, now_s = self.processes(), self.clock.monotonic_s()
        if now_s - self._ticked_s > SUSPENDED_S:  # it was this process that stood still: nobody else is to blame
            self.watchdog.begin_again(now_s)
            self.history.answered_s = self.elapsed_s
        self._ticked_s = now_s
        if now_s >= self._next_s:
            self._next_s = now_s + self.display.every_s
            self._show(processes)
        return self.watchdog.look(self.status, now_s, processes, self.elapsed_s - self.history.answered_s)

    def last_look(self) -> None:
        """Before the hub is stopped: what it has to say at the end."""
        self._take_in(self.source.ask())
        self._show(self.processes())

    def _take_in(self, status: RunStatus | None) -> None:
        if status is not None:
            self.status = status
            self.history.add(status, self.elapsed_s)

    def _show(self, processes: Sequence[ProcessView]) -> None:
        self.display.show(Scene(self.status, processes, self.history, self.elapsed_s, self.notes))
