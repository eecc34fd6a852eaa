"""`shoal run`: all roles of a run on this machine, supervised, until the trainer is done.

recipe ─► run folder ─► endpoints ─► hub, origin, relays, trainer, validators, workers
                                       │ as processes: restarted when they die     (--processes many)
                                       │ as threads: for a debugger                 (--processes one)
                                       ▼
                trainer exits 0 ─► success; exit 2, 3 or 5, a crash loop or no progress ─► the run ends, and says why
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shoal.cli.folder import Endpoints, RunFolder
from shoal.cli.progress import Reporter, Watchdog, summary
from shoal.cli.roles import command_of, role_names, run_role
from shoal.errors import ShoalError
from shoal.runtime import logs
from shoal.runtime.clock import SystemClock
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.runtime.supervise import Ending, ProcessSpec, Supervisor

log = logging.getLogger(__name__)

LOCK_WAIT_S = 15.0  # a supervisor that was killed leaves children that need a moment to end
THREAD_GRACE_S = 30.0
POLL_S = 0.1


@dataclass(frozen=True)
class LaunchOptions:
    processes: Literal["many", "one"] = "many"
    patience_s: float = 600.0
    verbose: bool = False


def launch(folder: RunFolder, options: LaunchOptions, stop: StopToken, say: Callable[[str], None]) -> Ending:
    """Run everything to its end; returns how it ended. No process and no thread of it is left then."""
    clock = SystemClock()
    started_s = clock.monotonic_s()
    with FolderLock(folder.path).acquire(stop, LOCK_WAIT_S):
        logs.setup("run", folder.path / "logs" / "run.log", options.verbose)
        await_predecessors(folder, stop)
        endpoints = folder.assign_endpoints()
        _greet(folder, endpoints, say)
        reporter = Reporter(endpoints.hub, say, Watchdog(options.patience_s))
        run = _as_processes if options.processes == "many" else _as_threads
        ending = run(folder, stop, reporter)
    for line in summary(folder.path / "trainer" / "metrics.jsonl", reporter.status, clock.monotonic_s() - started_s):
        say(line)
    if ending.exit_code == 130:
        say(f"to go on: shoal run --dir {folder.path}")
    if ending.exit_code == 0:
        say(f"the trained model is in {folder.path / 'trainer' / 'export'}")
    return ending


def await_predecessors(folder: RunFolder, stop: StopToken) -> None:
    """Wait for processes of an earlier start that are still ending (its supervisor was killed): they hold locks."""
    for name in role_names(folder):
        if (folder.path / name / ".lock").exists():
            FolderLock(folder.path / name).acquire(stop, LOCK_WAIT_S).release()


def _greet(folder: RunFolder, endpoints: Endpoints, say: Callable[[str], None]) -> None:
    say(f"run {endpoints.run} in {folder.path}, hub at {endpoints.hub}, logs in {folder.path / 'logs'}")
    say(f"to contribute from elsewhere: shoal join {endpoints.join}")


# ── as processes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _as_processes(folder: RunFolder, stop: StopToken, reporter: Reporter) -> Ending:
    specs = [process_spec(folder.path, name) for name in role_names(folder)]
    supervisor = Supervisor(specs, stop, folder.path / "processes.json")
    return supervisor.run(reporter.tick, on_end=reporter.last_look)


def process_spec(path: Path, name: str) -> ProcessSpec:
    """How a role is supervised: the trainer's end is the run's; the run goes on without a worker or a relay."""
    role = name.partition("-")[0]
    when_done: dict[str, Literal["restart", "rest", "end"]] = {"trainer": "end", "validator": "rest", "worker": "rest"}
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", "shoal.cli", *command_of(path, name)),
        log=path / "logs" / f"{name}.log",
        essential=role not in ("worker", "relay"),
        when_done=when_done.get(role, "restart"),
        env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},  # many processes share these cores
    )


# ── as threads ───────────────────────────────────────────────────────────────────────────────────────────────────


class RoleThread(threading.Thread):
    """A role in this process; `error` is what ended it, if anything did."""

    def __init__(self, folder: RunFolder, name: str, stop: StopToken) -> None:
        super().__init__(name=name, daemon=True)
        self._folder = folder
        self._stop_token = stop
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            run_role(self._folder, self.name, self._stop_token)
        except BaseException as error:  # handed to the main thread, which decides
            log.exception("%s failed", self.name)
            self.error = error


def _as_threads(folder: RunFolder, stop: StopToken, reporter: Reporter) -> Ending:
    threads = [RoleThread(folder, name, stop) for name in role_names(folder)]
    for thread in threads:
        thread.start()
    ending = None
    try:
        while ending is None:
            ending = _thread_ending(threads, stop) or reporter.tick()
            stop.wait(POLL_S)
        reporter.last_look()
    finally:
        stop.set("the run ended")
        end_s = SystemClock().monotonic_s() + THREAD_GRACE_S
        for thread in threads:
            thread.join(max(0.0, end_s - SystemClock().monotonic_s()))
    late = [thread.name for thread in threads if thread.is_alive()]
    return replace(ending, message=f"{ending.message} (still running: {', '.join(late)})") if late else ending


def _thread_ending(threads: list[RoleThread], stop: StopToken) -> Ending | None:
    """Unlike a process, a thread that failed is not restarted: whoever debugs wants to see it."""
    for thread in threads:
        if thread.error is not None:
            code = thread.error.exit_code if isinstance(thread.error, ShoalError) else 1
            return Ending(code, f"{thread.name}: {thread.error}")
        if thread.name == "trainer" and not thread.is_alive() and not stop.is_set():
            return Ending(0, "")
    return Ending(130, f"stopped ({stop.reason})") if stop.is_set() else None
