"""All roles of a run on this machine, supervised, until the trainer is done: what `shoal run` and `shoal demo` do.

recipe ─► run folder ─► endpoints ─► hub, origin, relays, trainer, validators, workers
                                       │ processes, restarted when they die
                                       ▼
                trainer exits 0 ─► success; exit 2, 3 or 5, a crash loop or no progress ─► the run ends, and says why
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.errors import ConfigError, ShoalError
from shoal.protocol import RunStatus
from shoal.run.folder import RunFolder
from shoal.run.progress import Display, History
from shoal.run.reporter import Reporter, StatusPoller
from shoal.run.roles import command_of, role_names
from shoal.run.watchdog import Watchdog
from shoal.runtime import logs
from shoal.runtime.lock import FolderLock
from shoal.runtime.sizing import kept_when_finished
from shoal.runtime.stop import StopToken
from shoal.runtime.supervise import Ending, ProcessSpec, Supervisor
from shoal.runtime.text import shoal_command
from shoal.shardcast import Origin
from shoal.shardcast.tree import HEAD

log = logging.getLogger(__name__)

LOCK_WAIT_S = 15.0  # a supervisor that was killed leaves children that need a moment to end
# Many processes share these cores, and perhaps one GPU: there, memory in pieces that nobody can use is others' memory.
SHARED_MACHINE = {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Launched:
    """How a run ended, what the hub said last, and what was seen on the way."""

    ending: Ending
    status: RunStatus | None
    elapsed_s: float
    history: History = field(default_factory=History)


def launch(
    folder: RunFolder,
    patience_s: float,
    stop: StopToken,
    display: Display,
    extra: Sequence[ProcessSpec] = (),
    notes: Mapping[str, str] | None = None,
) -> Launched:
    """Run everything to its end, shown by `display` (which the caller enters and leaves).

    `extra` are further processes, supervised like the recipe's own; `notes` are remarks on workers by name. No process
    is left when this returns or raises.
    """
    with FolderLock(folder.path).acquire(stop, LOCK_WAIT_S):
        logs.setup("run", folder.path / "logs" / "run.log", stderr=False)  # the display says it in the terminal
        if RunFolder.open(folder.path).recipe != folder.recipe:
            raise ConfigError(f"another start has just made another run in {folder.path}; choose another folder")
        await_predecessors(folder, stop, [spec.name for spec in extra])
        endpoints = folder.assign_endpoints()
        display.say(f"run {endpoints.run} in {folder.path}, hub at {endpoints.hub}, logs in {folder.path / 'logs'}")
        display.say(f"to contribute: {shoal_command()} join {endpoints.join}")
        with StatusPoller(endpoints.hub) as source:
            reporter = Reporter(source, display, Watchdog(patience_s), notes or {})
            specs = [*(process_spec(folder.path, name) for name in role_names(folder)), *extra]
            supervisor = Supervisor(specs, stop, folder.path / "processes.json")
            reporter.processes = supervisor.processes
            ending = supervisor.run(reporter.tick, on_end=lambda: _last_look(reporter, stop))
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
