"""A real `shoal run` for a test: started, watched through what it leaves on disk, hit, and never left behind.

    test ─ start_run ─► shoal run, in a session of its own, output in a file ─► hub, trainer, workers: likewise
     │
     ├─ run.wait_until   a condition, a deadline, and "the run ended meanwhile"
     ├─ run.kill_when    polls a condition, stops the process, looks again, and only then kills: a moment that was seen
     └─ leaving the `with`: SIGTERM to the run; then SIGKILL, one by one, to whatever still names the run's folder

Everything else here reads the run folder: pids, the hub's database, the ledger, receipts in the workers' logs.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.protocol import LedgerEntry

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
DEADLINE_S = 280.0
POLL_S = 0.02
MOMENT_POLL_S = 0.003  # moments that a process is to be killed in may last a few milliseconds
GRACE_S = 20.0
RECEIPT = re.compile(r"receipt for ([0-9a-f]{64})")


@dataclass(frozen=True)
class Run:
    """A `shoal run` that was started, and its folder."""

    path: Path
    process: subprocess.Popen[bytes]
    output: Path

    def wait_until(
        self, what: str, condition: Callable[[], bool], timeout_s: float = DEADLINE_S, poll_s: float = POLL_S
    ) -> None:
        """Poll until the condition holds; fails if the run ends first, or the time is over."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended while waiting for {what}: {self.said()}"
            assert time.monotonic() < end_s, f"waited {timeout_s:.0f} s for {what}: {self.said()}"
            time.sleep(poll_s)  # polling with a deadline: the other side is another process

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def said(self, characters: int = 3000) -> str:
        """The end of what it has printed."""
        return self.output.read_text(errors="replace")[-characters:]

    def pids(self) -> dict[str, int]:
        """Role → pid, as the supervisor recorded them."""
        try:
            pids: dict[str, int] = json.loads((self.path / "processes.json").read_text())
        except FileNotFoundError:
            return {}
        return pids

    def kill(self, name: str) -> int:
        """Kill -9 by recorded pid; returns the pid."""
        self.wait_until(f"{name} to run", lambda: name in self.pids())
        pid = self.pids()[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_when(self, name: str, what: str, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> int:
        """Kill -9 while the condition holds for certain: it is looked at once more while the process stands still."""
        killed: list[int] = []

        def caught() -> bool:
            if condition() and (pid := self.pids().get(name)) is not None and kill_if(pid, condition):
                killed.append(pid)
            return bool(killed)

        self.wait_until(f"{what}, to kill {name}", caught, timeout_s, MOMENT_POLL_S)
        return killed[0]

    def wait_until_back(self, name: str, killed: int) -> None:
        """Until the supervisor has started the next process of this name."""
        self.wait_until(f"{name} to be started again", lambda: self.pids().get(name, killed) != killed)


def kill_if(pid: int, condition: Callable[[], bool]) -> bool:
    """Stop a process, look, and kill it or let it continue."""
    hit = False
    with suppress(ProcessLookupError):  # it ended meanwhile
        os.kill(pid, signal.SIGSTOP)
        try:
            hit = condition()
        finally:
            os.kill(pid, signal.SIGKILL if hit else signal.SIGCONT)
    return hit


REWARD = """
tasks = [(f"{number:04d}=", "") for number in range(500)]


def score(prompt: str, completion: str, answer: str) -> float:
    return float(len(completion) % 2)  # differs within nearly every group of a policy that babbles
"""


def scripted(folder: Path) -> list[str]:
    """Settings of a run in which only the trainer loads torch, with tasks whose rewards differ whatever is said."""
    (folder / "reward.py").write_text(REWARD)
    return [
        f"environment.file={folder / 'reward.py'}", "worker.engine=scripted",
        "worker.units_per_lease=4", "run.group_size=4", "run.max_new_tokens=8", "trainer.evaluate_every=0",
        "trainer.guards.divergence.action=off",  # a scripted engine computes another model than the trainer
    ]  # fmt: skip


@contextmanager
def start_run(
    folder: Path, overrides: Sequence[str] = (), arguments: Sequence[str] = (), env: Mapping[str, str] | None = None,
    recipe: Path | None = RECIPE, verb: str = "run", prefix: Sequence[str] = (),
) -> Iterator[Run]:  # fmt: skip
    """`shoal run RECIPE folder --set …`; without a recipe the folder is resumed. It leaves no process."""
    settings = [part for override in overrides for part in ("--set", override)]
    given = [] if recipe is None else [str(recipe)]
    command = [*prefix, sys.executable, "-m", "shoal.cli", verb, *given, str(folder), *settings, *arguments]
    path = folder.with_name(f"{folder.name}.output")
    with path.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})}, start_new_session=True,
        )  # fmt: skip
    try:
        yield Run(folder, process, path)
    finally:
        end(process, folder)


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Leave nothing: the supervisor stops its children; what outlives it is killed by pid."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    for pid in processes_of(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> dict[int, str]:
    """Every process of this machine whose command line names the folder, or something in it: pid → command line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if str(folder) in command:
                found[int(entry.name)] = command
    return found


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """What the hub's database says, read while the hub may be running."""
    with closing(sqlite3.connect(f"file:{folder / 'hub' / 'hub.db'}?mode=ro", uri=True, timeout=10)) as database:
        return database.execute(query).fetchall()


def glimpse(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """The same; nothing while the hub is still making its database."""
    if not (folder / "hub" / "hub.db").exists():
        return []
    try:
        return rows(folder, query)
    except sqlite3.OperationalError:
        return []


def ledger(folder: Path) -> list[LedgerEntry]:
    names = ("index", "kind", "body", "at_ms", "previous", "hash")
    found = rows(folder, 'SELECT "index", kind, body, at_ms, previous, hash FROM ledger ORDER BY "index"')
    return [LedgerEntry(**{**dict(zip(names, row, strict=True)), "body": json.loads(row[2])}) for row in found]


def receipts(folder: Path) -> list[str]:
    """The digest of every submission for which a worker's log says that it holds the hub's receipt."""
    logs = sorted((folder / "logs").glob("worker-*.log"))
    return [digest for log in logs for digest in RECEIPT.findall(log.read_text(errors="replace"))]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]


def parcels(folder: Path, worker: str) -> list[str]:
    """Finished groups in a worker's outbox, not yet promised by the hub."""
    outbox = folder / worker / "outbox"
    return sorted(path.name for path in outbox.glob("*.submission"))


def checkpoints(folder: Path) -> list[int]:
    """The versions that the trainer has saved and kept."""
    names = [path.name for path in (folder / "trainer" / "checkpoints").glob("[0-9]*.[0-9]*")]
    return sorted(int(name.partition(".")[0]) for name in names)
