"""Naming who waits for whom, and ending a run in which nothing happens.

    waits as the hub tells them: trainer ─► 3 more groups ─► validator-0 …
    what the supervisor knows:   died, is being restarted, given up, shut out
    what the hub has not heard:  nodes without a heartbeat; and the hub itself, when it does not answer
    notices:                     who is missing, what the owner ordered, ledger entries that nobody appends

The first of them names the symptom, the others the cause. The hub being away is no error by itself: it may be on its
way back up. `Watchdog` decides when it has been too long.
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
from shoal.run.progress import Display, History, Scene, duration, notices, waits_line
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.exchange import limited, read_body
from shoal.runtime.supervise import Ending, ProcessView
from shoal.runtime.text import printable

QUIET_S = 30.0  # six heartbeats
LOADING_S = 90.0  # torch from a cold disk, on a busy machine
SILENT_S = 10.0  # a busy machine makes a hub slow, not silent
REPORTING = ("trainer", "validator", "worker")


@dataclass
class Watchdog:
    """Ends a run in which nothing happens: no step, no verdict, no submission, not even a ledger entry."""

    patience_s: float
    _seen: tuple[object, ...] = ()
    _since_s: float | None = None

    def look(
        self, status: RunStatus | None, now_s: float, processes: Sequence[ProcessView] = (), silent_s: float = 0.0
    ) -> Ending | None:
        """`status` is the hub's last answer; it has not given another for `silent_s`. A run that its owner has paused,
        or that has drained, is left alone."""
        mark: tuple[object, ...] = ()
        halted = False
        if status is not None:
            counts, policy = tuple(sorted(status.submissions.items())), status.policy and status.policy.label
            mark = (status.step, policy, counts, status.ledger.index, len(status.reports))
            halted = status.standing.conduct == "paused" or status.standing.drained
        if self._since_s is None or mark != self._seen or halted:
            self._since_s, self._seen = now_s, mark
            return None
        still_s = now_s - self._since_s
        if still_s < self.patience_s:
            return None
        return Ending(1, f"no progress for {duration(still_s)}: {blame(status, processes, silent_s)}")

    def begin_again(self, now_s: float) -> None:
        """Patience counts from now."""
        self._since_s = now_s


def blame(status: RunStatus | None, processes: Sequence[ProcessView], silent_s: float) -> str:
    """Everything that may explain why nothing happens, in one line."""
    found = list(troubles(status, processes, silent_s).values())
    if status is None or silent_s >= SILENT_S:
        return "; ".join(found or ["the hub does not answer (see logs/hub.log)"])
    said = [*(sentence for _, sentence in notices(status)), waits_line(status), *found]
    return "; ".join(line for line in said if line) or "and nobody says that they wait for anything"


def troubles(status: RunStatus | None, processes: Sequence[ProcessView], silent_s: float) -> dict[str, str]:
    """What is wrong with the processes of this machine: name → sentence."""
    heard_s = min((process.since_s for process in processes if process.name == "hub"), default=0.0)
    found = {}
    for process in processes:
        sentence = _exited(process)
        if not sentence and process.name == "hub":
            sentence = _silent(process, silent_s)
        elif not sentence and status is not None and silent_s < SILENT_S and heard_s >= QUIET_S:
            sentence = _quiet(process, status)
        if sentence:
            found[process.name] = sentence
    return found


def _exited(process: ProcessView) -> str:
    """What the supervisor alone can say; empty if it runs as it should."""
    name, (exit_, _, said) = process.name, process.why.partition(": ")
    said = f": {printable(said)}" if said else ""
    if process.state == "restarting" and process.why:
        ago = f"{',' if exit_[-1].isdigit() else ''} {duration(process.since_s)} ago"
        return f"{name} {exit_}{ago} and is being restarted (#{process.restarts + 1}){said}"
    if process.state == "given up":
        return f"{name} was given up after it {exit_}{said}"
    if process.state == "resting" and process.why != "is done":
        return f"{name} {exit_} and is not started again{said}"
    if process.state == "running" and process.restarts > 1 and process.since_s < QUIET_S:
        return f"{name} was restarted {process.restarts} times, {duration(process.since_s)} ago after it {exit_}{said}"
    return ""


def _silent(hub: ProcessView, silent_s: float) -> str:
    """That the hub does not answer, for longer than it may take; one that was just started needs a while."""
    answered = silent_s < hub.since_s
    since_s = silent_s if answered else hub.since_s
    if since_s < (SILENT_S if answered else QUIET_S):
        return ""
    return f"{_who(hub)} has not answered for {duration(since_s)}: is it stuck? (see logs/hub.log)"


def _quiet(process: ProcessView, status: RunStatus) -> str:
    """That the hub has not heard of a running process for long; empty if it has."""
    role = process.name.partition("-")[0]
    loading = process.since_s < LOADING_S
    if role not in REPORTING or process.state != "running" or status.finished or loading:
        return ""
    seen_ms = [node.last_seen_ms for node in status.nodes if node.role == role and node.name == process.name]
    if not seen_ms:
        return f"{_who(process)} has not reached the hub in the {duration(process.since_s)} since it started"
    quiet_s = (status.now_ms - max(seen_ms)) / 1000
    return f"{_who(process)} has said nothing for {duration(quiet_s)}: is it stuck?" if quiet_s >= QUIET_S else ""


def _who(process: ProcessView) -> str:
    return process.name if process.pid is None else f"{process.name} (pid {process.pid})"


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
        self._url, self._http, self._every_s = url, http or open_http(), every_s
        self._ended, self._lock = threading.Event(), threading.Lock()
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
        self._started_s = self._next_s = self._ticked_s = self.clock.monotonic_s()

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
