"""Processes that are started, monitored, restarted and stopped together.

    Supervisor ──start──► child (own session, stdin = a pipe that only the supervisor holds open)
        ▲                   │
        │   exit 0          │  `when_done`: "end" the run, "rest", or "restart" (a server should not end)
        ├───exit 2, 3 or 5──┤  input or machine are at fault: a restart cannot help, the run ends
        ├───exit 6──────────┤  the hub excludes it: it is not restarted; if it is essential, the run ends
        │   anything else   │  restarted after a back-off; several short lives in a row are a crash loop
        └───────────────────┘
    the supervisor is killed ──► the pipe closes ──► `follow_supervisor` stops the child

`shut_down` waits for every child up to a grace period, or until `stop.hurry` is set by a second signal, then kills the
rest. Only pids that this supervisor started and has not reaped are killed, never processes by name.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.runtime.clock import Backoff
from shoal.runtime.files import is_full, resource_error, write_atomically
from shoal.runtime.stop import STOPPED_CODE, SUPERVISED, StopToken

log = logging.getLogger(__name__)

HOPELESS_CODES = (2, 3, 5)  # see errors.py: the same would happen again
SHUT_OUT_CODE = 6  # see errors.py: banned or suspended; the run can continue without it
POLL_S = 0.1
TAIL_BYTES = 4096
ORPHAN_S = 10.0  # for a process to end after its supervisor has ended


@dataclass(frozen=True)
class ProcessSpec:
    """An `essential` process in a crash loop ends the run; another one is given up. After one of the exit codes
    `rests_with` it is not restarted, and the others continue."""

    name: str
    argv: tuple[str, ...]
    log: Path
    essential: bool = True
    when_done: Literal["restart", "rest", "end"] = "restart"
    rests_with: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RestartPolicy:
    """Back-off between lives; `max_short_lives` lives in a row, each below `healthy_s`, are a crash loop."""

    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.5, most_s=10.0))
    max_short_lives: int = 5
    healthy_s: float = 60.0
    grace_s: float = 10.0


@dataclass(frozen=True)
class Ending:
    """How the run ended: exit code and, unless it succeeded, a message that names the process."""

    exit_code: int
    message: str


ProcessState = Literal["running", "restarting", "resting", "given up"]


@dataclass(frozen=True)
class ProcessView:
    """`since_s`: time in this state. `why`: how its last life ended, e.g. `was killed by SIGKILL`; `code`: its exit
    code, negative for a signal."""

    name: str
    state: ProcessState
    pid: int | None
    restarts: int
    why: str
    since_s: float
    code: int | None = None


@dataclass
class _Child:
    spec: ProcessSpec
    changed_s: float
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    short_lives: int = 0
    restart_at_s: float | None = 0.0  # None: not to be started (again)
    given_up: bool = False
    why: str = ""
    code: int | None = None

    def view(self, now_s: float) -> ProcessView:
        state: ProcessState = "given up" if self.given_up else "resting"
        if self.process is not None or self.restart_at_s is not None:
            state = "restarting" if self.process is None else "running"
        pid = None if self.process is None else self.process.pid
        since_s = max(0.0, now_s - self.changed_s)
        return ProcessView(self.spec.name, state, pid, max(0, self.lives - 1), self.why, since_s, self.code)


class Supervisor:
    def __init__(
        self, specs: Sequence[ProcessSpec], stop: StopToken, processes_file: Path,
        policy: RestartPolicy = RestartPolicy(),
    ) -> None:  # fmt: skip
        self._children = [_Child(spec, time.monotonic()) for spec in specs]
        self._stop, self._processes_file, self._policy = stop, processes_file, policy

    def run(
        self, on_tick: Callable[[], Ending | None] = lambda: None, on_end: Callable[[], None] = lambda: None
    ) -> Ending:
        """Start everything and monitor it. `on_tick` is called ten times a second and may end the run; `on_end` is
        called when it has ended, while the other processes still run. No child is left when this returns or raises."""
        try:
            ending = None
            while ending is None and not self._stop.is_set():
                ending = self.poll() or on_tick()
                self._stop.wait(POLL_S)
            if ending is None:
                log.info("stopping (%s)", self._stop.reason)
            on_end()
            return ending or Ending(130, f"stopped ({self._stop.reason})")
        finally:
            self.shut_down()

    def poll(self) -> Ending | None:
        for child in self._children:
            if child.process is not None:
                code = child.process.poll()
                ending = None if code is None else self._ended(child, code)
                if ending is not None:
                    return ending
            elif child.restart_at_s is not None and time.monotonic() >= child.restart_at_s:
                self._start(child)
        return None

    @property
    def pids(self) -> dict[str, int]:
        return {child.spec.name: child.process.pid for child in self._children if child.process is not None}

    def processes(self) -> list[ProcessView]:
        return [child.view(time.monotonic()) for child in self._children]

    def shut_down(self) -> None:
        """SIGTERM to every child, one grace period for all, then SIGKILL to the rest and their children."""
        alive = [(child.spec.name, child.process) for child in self._children if child.process is not None]
        for _, process in alive:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        while any(process.poll() is None for _, process in alive):
            waited_s = time.monotonic() - began_s
            if waited_s >= self._policy.grace_s or self._stop.hurry.wait(POLL_S):
                break
        for name, process in alive:
            if process.poll() is None:
                log.warning("%s did not stop within %.1f s: killing it", name, time.monotonic() - began_s)
                # It is not reaped, so the process group is still its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for child in self._children:
            child.process, child.restart_at_s = None, None
        self._record()

    def _start(self, child: _Child) -> None:
        spec = child.spec
        try:
            with spec.log.open("ab") as output:
                # A session of its own: Ctrl-C in the terminal reaches only the supervisor.
                child.process = subprocess.Popen(
                    spec.argv, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                    env={**os.environ, **spec.env, SUPERVISED: "1"},
                )  # fmt: skip
        except OSError as error:
            raise resource_error(f"start {spec.name} or write its log", spec.log, error) from error
        child.changed_s, child.restart_at_s = time.monotonic(), None
        child.lives += 1
        log.info("%s started (pid %d)", spec.name, child.process.pid)
        self._record()

    def _ended(self, child: _Child, code: int) -> Ending | None:
        spec, now_s, policy = child.spec, time.monotonic(), self._policy
        lived_s, child.changed_s = now_s - child.changed_s, now_s
        assert child.process is not None
        assert child.process.stdin is not None
        child.process.stdin.close()
        child.process, child.code = None, code
        self._record()
        if code == 0 and spec.when_done != "restart":
            child.why = "is done"
            log.info("%s is done", spec.name)
            return Ending(0, "") if spec.when_done == "end" else None
        text, child.why = last_line(spec.log), describe_exit(code)
        if code in spec.rests_with:
            child.why += f": {text}"
            log.error("%s %s", spec.name, child.why)
            return None
        if code in HOPELESS_CODES or (code == SHUT_OUT_CODE and spec.essential):
            return Ending(code, f"{spec.name}: {text}")
        if code == SHUT_OUT_CODE:
            child.why = f"was shut out by the hub: {text}"
            log.warning("%s %s; the run continues without it", spec.name, child.why)
            return None
        child.why += f": {text}" if code > 0 else ""
        child.short_lives = child.short_lives + 1 if lived_s < policy.healthy_s else 0
        if child.short_lives >= policy.max_short_lives:
            child.given_up = True
            often = f"{spec.name} died {child.short_lives} times in a row"
            message = f"{often}, the last time it {describe_exit(code)}: {text} (log: {spec.log})"
            if spec.essential:
                return Ending(1, message)
            log.error("giving up: %s", message)
            return None
        pause_s = policy.backoff.wait_s(child.short_lives)
        child.restart_at_s = now_s + pause_s
        log.warning("%s %s; starting it again in %.1f s", spec.name, child.why, pause_s)
        return None

    def _record(self) -> None:
        write_atomically(self._processes_file, json.dumps(self.pids, indent=2).encode() + b"\n")


def describe_exit(code: int) -> str:
    if code >= 0:
        return "was told to stop by somebody" if code == STOPPED_CODE else f"ended with exit code {code}"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def last_line(path: Path) -> str:
    """The last non-empty line of a log, without the command's own prefix."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return "no log was written"
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "its log is empty")
    if is_full(path.parent) and not line.startswith("shoal: "):  # so the last message is missing
        return f"its log ends with {line!r}: the disk of {path.parent} is full: free some space"
    return line.removeprefix("shoal: ")


def follow_supervisor(stop: StopToken) -> None:
    """In a child: stop when the supervisor is gone, by SIGKILL after the grace period. Does nothing without a
    supervisor. Call it before slow imports."""
    if os.environ.pop(SUPERVISED, None) is None:
        return
    pipe = os.dup(0)  # standard input itself may be closed

    def watch() -> None:
        while os.read(pipe, 1024):  # returns when the other end is closed
            pass
        stop.set("the supervisor is gone")
        threading.Event().wait(ORPHAN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="follow-supervisor", daemon=True).start()


def close_standard_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
