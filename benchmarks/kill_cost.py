"""What does a `kill -9` of each process cost a run?

    python benchmarks/kill_cost.py [--settle 4] [--roles hub,trainer] [--json]

One run of recipes/tiny.toml (two workers, staleness 2, a learning rate so small that every step is the same work).
For each process in turn: some undisturbed steps, `kill -9` of its recorded pid, some more steps.

    kill ──► started again (another pid) ──► at work: a hub or source answers; a trainer, validator or worker has
      │                                       finished something that it began after the kill
      └── steps from here until `--settle` steps after it is at work, each minus the median undisturbed step = cost

A cost below zero is a step that happened to be quick; anything within a second or so of zero is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).parents[1]
ROLES = ("hub", "origin", "relay-0", "trainer", "validator-0", "worker-0")
SETTINGS = (
    "run.steps=100000",
    "run.max_staleness=2",
    "worker.count=2",
    "trainer.evaluate_every=0",
    "trainer.learning_rate=1e-12",
)
DEADLINE_S = 300.0
POLL_S = 0.02
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Cost:
    """What one kill cost: seconds until there was another process, until it was at work, and of the run's time."""

    role: str
    started_s: float
    at_work_s: float
    steps_s: float


class Watched:
    """The run, seen through its folder and its sockets."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self._path = path
        self._process = process

    def wait_until(self, what: str, condition: Callable[[], bool]) -> float:
        """Seconds until the condition holds."""
        began_s = time.monotonic()
        while not condition():
            if self._process.poll() is not None:
                raise SystemExit(f"the run ended while waiting for {what}: {self._path}.output")
            if time.monotonic() - began_s > DEADLINE_S:
                raise SystemExit(f"waited {DEADLINE_S:.0f} s for {what}")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def pid(self, role: str) -> int | None:
        try:
            pids: dict[str, int] = json.loads((self._path / "processes.json").read_text())
        except FileNotFoundError:
            return None
        return pids.get(role)

    def query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """What the hub's database says; nothing while it is being made."""
        database = f"file:{self._path / 'hub' / 'hub.db'}?mode=ro"
        try:
            with closing(sqlite3.connect(database, uri=True, timeout=10)) as connection:
                return connection.execute(statement, values).fetchall()
        except sqlite3.OperationalError:
            return []

    def versions(self) -> list[int]:
        """When each version was announced, in milliseconds."""
        return [at_ms for (at_ms,) in self.query("SELECT announced_at_ms FROM policies ORDER BY version")]

    def is_at_work(self, role: str, since_ms: int) -> bool:
        """Whether a process that was started after `since_ms` has done something useful."""
        kind = role.partition("-")[0]
        if kind in ("hub", "origin", "relay"):
            return self._answers(kind)
        if kind == "trainer":
            return any(at_ms > since_ms for at_ms in self.versions())
        if kind == "validator":
            return bool(self.query("SELECT 1 FROM submissions WHERE decided_at_ms > ? LIMIT 1", since_ms))
        done = "SELECT 1 FROM leases JOIN nodes USING (node) WHERE name = ? AND issued_at_ms > ? AND leases.state = ?"
        return bool(self.query(done, role, since_ms, "submitted"))

    def _answers(self, kind: str) -> bool:
        """Whether the server answers; a relay once it has the newest version, too."""
        endpoints = json.loads((self._path / "endpoints.json").read_text())
        url = endpoints["relays"][0] if kind == "relay" else endpoints[kind]
        try:
            answer = httpx2.get(f"{url}/health", timeout=1)
        except httpx2.HTTPError:
            return False
        newest = f"0.{len(self.versions()) - 1}"
        return answer.is_success and (kind != "relay" or answer.json()["head"] == newest)


@dataclass(frozen=True)
class Kill:
    """Which versions were out when it was killed, and when it was through: the steps in between are disturbed."""

    role: str
    version: int
    settled: int
    started_s: float
    at_work_s: float


def kill(run: Watched, role: str, settle: int) -> Kill:
    """Kill it after some undisturbed steps, and watch it come back."""
    await_steps(run, settle)
    pid = run.pid(role)
    assert pid is not None, f"{role} is not running"
    version, since_ms = len(run.versions()) - 1, round(time.time() * 1000)
    os.kill(pid, signal.SIGKILL)
    started_s = run.wait_until(f"another {role}", lambda: run.pid(role) not in (None, pid))
    at_work_s = started_s + run.wait_until(f"{role} to work", lambda: run.is_at_work(role, since_ms))
    await_steps(run, settle)
    return Kill(role, version, len(run.versions()) - 1, started_s, at_work_s)


def await_steps(run: Watched, count: int) -> None:
    target = len(run.versions()) + count
    run.wait_until(f"{count} steps", lambda: len(run.versions()) >= target)


def costs(announced_ms: Sequence[int], kills: Sequence[Kill]) -> tuple[float, list[Cost]]:
    """The median undisturbed step, and what each kill cost beyond as many of those as there were steps."""
    steps_s = [(after - before) / 1000 for before, after in pairwise(announced_ms)]
    disturbed = {step for each in kills for step in range(each.version, each.settled)}
    calm = [length_s for step, length_s in enumerate(steps_s) if step not in disturbed and step >= WARM_UP_STEPS]
    median_s = statistics.median(calm)
    found = []
    for each in kills:
        extra_s = sum(steps_s[step] - median_s for step in range(each.version, each.settled))
        found.append(Cost(each.role, each.started_s, each.at_work_s, extra_s))
    return median_s, found


@contextmanager
def running(path: Path) -> Iterator[Watched]:
    """A run in `path`, stopped afterwards."""
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    recipe = ROOT / "recipes" / "tiny.toml"
    command = [sys.executable, "-m", "shoal.cli", "run", str(recipe), str(path), *settings]
    with path.with_suffix(".output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield Watched(path, process)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, running(Path(folder) / "run") as run:
        run.wait_until("the first versions", lambda: len(run.versions()) > WARM_UP_STEPS)
        kills = [kill(run, role, options.settle) for role in options.roles.split(",")]
        median_s, found = costs(run.versions(), kills)
    if options.json:
        document = {"machine": machine(), "median_step_s": median_s, "kills": [asdict(cost) for cost in found]}
        print(json.dumps(document, indent=2))
        return
    print(f"{machine()}; undisturbed step {median_s:.2f} s (median)\n")
    print("| killed | started again | at work again | cost to the run |\n|---|---|---|---|")
    for cost in found:
        print(f"| {cost.role} | {cost.started_s:.1f} s | {cost.at_work_s:.1f} s | {cost.steps_s:.1f} s |")


def machine() -> str:
    from importlib.metadata import version

    return f"{os.cpu_count()} cores, {platform.machine()}, torch {version('torch')}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a kill -9 of each process costs a run.")
    parser.add_argument("--settle", type=int, default=4, help="undisturbed steps before and after each kill")
    parser.add_argument("--roles", default=",".join(ROLES), help="which processes, in this order")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
