"""All roles of a run on this machine, supervised, until the trainer is done: what `shoal run` and `shoal demo` do.

recipe ─► run folder ─► endpoints ─► hub, origin, relays, trainer, validators, workers
                                       │ as processes: restarted when they die     (--processes many)
                                       │ as threads: for a debugger                 (--processes one)
                                       ▼
                trainer exits 0 ─► success; exit 2, 3 or 5, a crash loop or no progress ─► the run ends, and says why
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shoal.errors import ConfigError, ShoalError
from shoal.protocol import RunStatus
from shoal.run.folder import RunFolder
from shoal.run.progress import Display, History
from shoal.run.reporter import Reporter, StatusPoller
from shoal.run.roles import command_of, role_names, run_role
from shoal.run.watchdog import Watchdog
from shoal.runtime import logs
from shoal.runtime.clock import SystemClock
from shoal.runtime.lock import FolderLock
from shoal.runtime.sizing import kept_when_finished
from shoal.runtime.stop import StopToken
from shoal.runtime.supervise import Ending, ProcessSpec, ProcessView, Supervisor
from shoal.runtime.text import shoal_command
from shoal.shardcast import Origin
from shoal.shardcast.tree import HEAD

log = logging.getLogger(__name__)

LOCK_WAIT_S = 15.0  # a supervisor that was killed leaves children that need a moment to end
THREAD_GRACE_S = 30.0
# Many processes share these cores, and perhaps one GPU: there, memory in pieces that nobody can use is others' memory.
SHARED_MACHINE = {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
POLL_S = 0.1


@dataclass(frozen=True)
class LaunchOptions:
    processes: Literal["many", "one"] = "many"
    patience_s: float = 600.0
    verbose: bool = False


@dataclass(frozen=True)
class Launched:
    """How a run ended, what the hub said last, and what was seen on the way."""

    ending: Ending
    status: RunStatus | None
    elapsed_s: float
    history: History = field(default_factory=History)


def launch(
    folder: RunFolder,
    options: LaunchOptions,
    stop: StopToken,
    display: Display,
    extra: Sequence[ProcessSpec] = (),
    notes: Mapping[str, str] | None = None,
) -> Launched:
    """Run everything to its end, shown by `display` (which the caller enters and leaves).

    `extra` are further processes, supervised like the recipe's own; `notes` are remarks on workers by name. No process
    and no thread is left when this returns or raises.
    """
    if extra and options.processes == "one":
        raise ConfigError("processes that the recipe does not name cannot run as threads: use --processes many")
    with FolderLock(folder.path).acquire(stop, LOCK_WAIT_S):
        # A live display has the terminal for itself; lines say what the log says of processes, unless there are none.
        to_stderr = not display.live and (options.verbose or options.processes == "one")
        logs.setup("run", folder.path / "logs" / "run.log", options.verbose, stderr=to_stderr)
        if RunFolder.open(folder.path).recipe != folder.recipe:
            raise ConfigError(f"another start has just made another run in {folder.path}; choose another folder")
        await_predecessors(folder, stop, [spec.name for spec in extra])
        endpoints = folder.assign_endpoints()
        display.say(f"run {endpoints.run} in {folder.path}, hub at {endpoints.hub}, logs in {folder.path / 'logs'}")
        display.say(f"to contribute: {shoal_command()} join {endpoints.join}")
        with StatusPoller(endpoints.hub) as source:
            reporter = Reporter(source, display, Watchdog(options.patience_s), notes or {})
            if options.processes == "many":
                ending = _as_processes(folder, stop, reporter, extra)
            else:
                ending = _as_threads(folder, stop, reporter)
        if ending.exit_code == 0:
            remove_caches(folder)
    return Launched(ending, reporter.status, reporter.elapsed_s, reporter.history)


def remove_caches(folder: RunFolder) -> None:
    """What only a run that is going on needs: weights that its workers and validators fetched and its relays mirrored,
    and at the origin what is older than the groups of the last step, which can be checked again (`shoal ledger
    recheck`). If the run is continued, they are fetched and made again."""
    for cache in (*folder.path.glob("worker-*/cache"), *folder.path.glob("validator-*/cache")):
        shutil.rmtree(cache, ignore_errors=True)
    for relay in folder.path.glob("relay-*"):
        for name in ("chunks", "manifests"):
            shutil.rmtree(relay / name, ignore_errors=True)
        (relay / HEAD).unlink(missing_ok=True)
    if not (folder.path / "origin").is_dir():
        return
    try:
        origin = Origin(folder.path / "origin", folder.run_id, folder.key("trainer"))
        origin.keep_newest(kept_when_finished(folder.recipe.run.max_staleness))
    except ShoalError as error:  # its key may be elsewhere
        log.warning("old versions at the origin were not removed: %s", error)


def await_predecessors(folder: RunFolder, stop: StopToken, extra: Sequence[str] = ()) -> None:
    """Wait for processes of an earlier start that are still ending (its supervisor was killed): they hold locks."""
    for name in [*role_names(folder), *extra]:
        if (folder.path / name / ".lock").exists():
            FolderLock(folder.path / name).acquire(stop, LOCK_WAIT_S).release()


# ── as processes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _as_processes(folder: RunFolder, stop: StopToken, reporter: Reporter, extra: Sequence[ProcessSpec]) -> Ending:
    specs = [*(process_spec(folder.path, name) for name in role_names(folder)), *extra]
    supervisor = Supervisor(specs, stop, folder.path / "processes.json")
    reporter.processes = supervisor.processes
    return supervisor.run(reporter.tick, on_end=lambda: _last_look(reporter, stop))


def _last_look(reporter: Reporter, stop: StopToken) -> None:
    """While everything still runs; whoever has pressed Ctrl-C is told that it was heard."""
    if stop.is_set():
        reporter.display.say(f"stopping ({stop.reason}); a second time, what does not end at once is killed")
    reporter.last_look()


def process_spec(path: Path, name: str, cheat: str | None = None) -> ProcessSpec:
    """How a role is supervised: the trainer's end is the run's; the run goes on without a worker or a relay."""
    role = name.partition("-")[0]
    when_done: dict[str, Literal["restart", "rest", "end"]] = {"trainer": "end", "validator": "rest", "worker": "rest"}
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", "shoal.cli", *command_of(path, name, cheat)),
        log=path / "logs" / f"{name}.log",
        essential=role not in ("worker", "relay"),
        when_done=when_done.get(role, "restart"),
        env={name: os.environ.get(name, value) for name, value in SHARED_MACHINE.items()},
    )


# ── as threads ───────────────────────────────────────────────────────────────────────────────────────────────────


class RoleThread(threading.Thread):
    """A role in this process; `error` is what ended it, if anything did."""

    def __init__(self, folder: RunFolder, name: str, stop: StopToken) -> None:
        super().__init__(name=name, daemon=True)
        self._folder = folder
        self._stop_token = stop
        self._started_s = SystemClock().monotonic_s()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            run_role(self._folder, self.name, self._stop_token)
        except BaseException as error:  # handed to the main thread, which decides
            if isinstance(error, ShoalError):  # its line says it all; of a bug one wants to see where
                log.error("%s failed: %s", self.name, error)
            else:
                log.exception("%s failed", self.name)
            self.error = error

    def view(self) -> ProcessView:
        state: Literal["running", "resting"] = "running" if self.is_alive() else "resting"
        since_s = SystemClock().monotonic_s() - self._started_s
        return ProcessView(self.name, state, None, 0, "" if self.is_alive() else "is done", since_s)


def _as_threads(folder: RunFolder, stop: StopToken, reporter: Reporter) -> Ending:
    from transformers import AutoModelForCausalLM  # noqa: F401 - lazily loaded there, by one thread at a time only

    threads = [RoleThread(folder, name, stop) for name in role_names(folder)]
    reporter.processes = lambda: [thread.view() for thread in threads]
    for thread in threads:
        thread.start()
    ending = None
    try:
        while ending is None:
            ending = _thread_ending(threads, stop) or reporter.tick()
            stop.wait(POLL_S)
        _last_look(reporter, stop)
    finally:
        stop.set("the run ended")
        _join(threads, stop)
    late = [thread.name for thread in threads if thread.is_alive()]
    return replace(ending, message=f"{ending.message} (still running: {', '.join(late)})".strip()) if late else ending


def _join(threads: Sequence[RoleThread], stop: StopToken) -> None:
    """Wait for all of them, but no longer than the grace period, and not if somebody is in a hurry."""
    end_s = SystemClock().monotonic_s() + THREAD_GRACE_S
    while any(thread.is_alive() for thread in threads) and SystemClock().monotonic_s() < end_s:
        if stop.hurry.wait(POLL_S):
            return


def _thread_ending(threads: list[RoleThread], stop: StopToken) -> Ending | None:
    """Unlike a process, a thread that failed is not restarted: whoever debugs wants to see it."""
    for thread in threads:
        if thread.error is not None:
            code = thread.error.exit_code if isinstance(thread.error, ShoalError) else 1
            return Ending(code, f"{thread.name}: {thread.error}")
        if thread.name == "trainer" and not thread.is_alive() and not stop.is_set():
            return Ending(0, "")
    return Ending(130, f"stopped ({stop.reason})") if stop.is_set() else None
