"""`shoal run` for real on a machine that misbehaves: each fault has one clear outcome.

    disk full          exit 3, "the disk is full"; nothing lost: with room again the run continues to its end
    port stolen        exit 3, naming the port
    no such folder     exit 3 before anything is started: read-only, no permission
    clock jumps        nothing happens: an hour forth, an hour back, and a hub that restarts in between
    somebody stopped   a worker, the hub, the validator (SIGSTOP): the run continues, and no node is punished
    no progress        the watchdog ends the run and names who is stuck

The engine is the scripted one, so that only the trainer loads torch. Killed processes are in `test_kills`.
"""

import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from kit import Request
from kit.run import Run, glimpse, ledger, metrics, processes_of, rows, scripted, start_run
from kit.smalldisk import in_own_namespace, small_disk
from shoal.ledger import verify
from shoal.run.folder import RunFolder, port_of

LATE = re.compile(
    r"was not taken: lease u\d+a\d+ ran out and unit \d+ is \w+ meanwhile"
    r"|leases? given back: the lease ran out before it was begun"
)
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """A run that takes seconds."""
    return [*scripted(tmp_path), "run.groups_per_step=4"]


def prepare(folder: Path, overrides: list[str]) -> None:
    with start_run(folder, overrides, ["--prepare"]) as prepared:
        assert prepared.wait(60) == 0


def batch_written(folder: Path, step: int) -> Callable[[], bool]:
    return lambda: bool(glimpse(folder, f"SELECT 1 FROM batches WHERE step >= {step}"))


def newest_batch(folder: Path) -> int:
    """The step of the newest batch; -1 before the first."""
    (step,) = rows(folder, "SELECT MAX(step) FROM batches")[0]
    return -1 if step is None else int(step)


def require_progress(run: Run) -> None:
    """Two more steps, in far less time than the hour for which something might be stuck."""
    run.wait_until("more steps", batch_written(run.path, newest_batch(run.path) + 2), timeout_s=120)


def restarted(folder: Path) -> set[str]:
    """The processes that had to be started more than once."""
    started = Counter(re.findall(r"(\S+) started \(pid", (folder / "logs" / "run.log").read_text()))
    return {name for name, times in started.items() if times > 1}


def complaint(run: Run) -> str:
    """The last line that the run printed: why it ended."""
    return run.said().splitlines()[-1]


def require_sound(folder: Path, steps: int) -> None:
    """Every step was trained once, the ledger verifies, its times never go back, and nobody was punished."""
    assert [row["step"] for row in metrics(folder)] == list(range(steps))
    entries = ledger(folder)
    verify(entries)
    times = [entry.at_ms for entry in entries]
    assert times == sorted(times)
    units = [unit for entry in entries if entry.kind == "batch" for unit in entry.body["units"]]
    assert len(units) == len(set(units))
    assert {entry.kind for entry in entries} <= {"run", "node", "policy", "batch", "credit"}, "rejected or sanctioned"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "hub", "hub/blobs", "origin", "relay-0", "trainer", "validator-0", "worker-0"])
def test_full_disk_ends_the_run_and_with_room_it_resumes(tmp_path, request, overrides, part):
    if in_own_namespace(request):
        return
    folder, settings = tmp_path / "run", [*overrides, "run.steps=5"]
    if part:
        prepare(folder, settings)
    with small_disk(folder / part, "32m") as disk:
        if not part:
            prepare(folder, settings)
        with start_run(folder, recipe=None) as run:
            run.wait_until("a batch", batch_written(folder, 1))
            disk.fill()
            assert run.wait(90) == 3, run.said()
            assert re.search(rf"cannot .* {disk.path}.*: the disk is full: free some space", complaint(run))
            assert processes_of(folder) == {}
        if not part:
            with start_run(folder, recipe=None) as run:
                assert run.wait(60) == 3, "there still is no room"
                assert complaint(run).endswith("the disk is full: free some space")
        disk.free()
        with start_run(folder, recipe=None) as run:
            assert run.wait() == 0, run.said()
        require_sound(folder, 5)


@pytest.mark.slow
def test_run_continues_without_its_logs(tmp_path: Path, request: Request, overrides: list[str]) -> None:
    if in_own_namespace(request):
        return
    folder = tmp_path / "run"
    prepare(folder, [*overrides, "run.steps=3"])
    with small_disk(folder / "logs", "1m") as disk, start_run(folder, recipe=None) as run:
        run.wait_until("the run's log", (folder / "logs" / "run.log").exists)
        disk.fill()
        assert run.wait() == 0, run.said()
        assert "Traceback" not in run.said()
        require_sound(folder, 3)


def refusal(folder: Path, overrides: list[str], prefix: Sequence[str] = ()) -> str:
    """What `shoal run` says before it starts anything."""
    with start_run(folder, overrides, prefix=prefix) as run:
        assert run.wait(60) == 3, run.said()
        assert processes_of(folder) == {}
        return complaint(run)


def test_a_read_only_file_system(tmp_path: Path, request: Request, overrides: list[str]) -> None:
    if in_own_namespace(request):
        return
    for is_begun in (True, False):
        with small_disk(tmp_path / f"run-{is_begun}") as disk:
            if is_begun:
                prepare(disk.path, overrides)
            disk.remount("ro")
            assert refusal(disk.path, overrides).endswith("the file system is read-only: choose another folder")


def test_a_folder_without_permission(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    bound = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()  # else root writes everywhere
    said = refusal(tmp_path / "closed", overrides, bound)
    assert "permission denied: choose a folder that this user may write to" in said


def require_end_when_the_port_is_stolen(run: Run, role: str) -> None:
    """Somebody else takes the port of a process while that is being restarted."""
    endpoints = RunFolder.open(run.path).endpoints
    port = port_of(endpoints.hub if role == "hub" else endpoints.relays[0])
    run.kill(role)
    with closing(thief_of(port)):
        assert run.wait(90) == 3, run.said()
    assert complaint(run).startswith(f"shoal: {role}: port {port} on 127.0.0.1 is taken: stop the program that uses it")
    assert processes_of(run.path) == {}


def thief_of(port: int) -> socket.socket:
    """A socket that listens there as soon as the killed process has let go."""
    end_s = time.monotonic() + 10
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < end_s


class WallClock:
    """What all processes of a run believe the time to be, while their monotonic clocks are not changed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.show("+0")
        self.env = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "1",  # left to itself it makes waits for Python's lock spin
        }

    def show(self, offset: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset}\n")
        new.replace(self._file)


@pytest.mark.slow
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (Debian: apt-get install libfaketime)")
def test_clock_that_jumps_an_hour_punishes_nobody(tmp_path: Path, overrides: list[str]) -> None:
    folder, clock = tmp_path / "run", WallClock(tmp_path / "time")
    worker = folder / "logs" / "worker-0.log"
    with start_run(folder, [*overrides, "run.steps=200"], env=clock.env) as run:
        run.wait_until("the first batch", batch_written(folder, 0))
        clock.show("+1h")
        run.wait_until("the jump to be noticed", lambda: "s behind this machine's" in worker.read_text())
        require_progress(run)
        clock.show("-1h")
        run.wait_until("the jump to be noticed", lambda: "s ahead of this machine's" in worker.read_text())
        require_progress(run)
        run.wait_until_back("hub", run.kill("hub"))
        require_progress(run)
        hub = (folder / "logs" / "hub.log").read_text()
        assert re.search(r"this machine's clock is 3\d\d\d s behind what the hub wrote down last", hub)
        assert len(set(re.findall(r"listens at (\S+)", hub))) == 1, "the port was free again at once"
        assert restarted(folder) == {"hub"}
        require_end_when_the_port_is_stolen(run, "hub")
    require_sound(folder, len(metrics(folder)))


@contextmanager
def stopped(run: Run, name: str) -> Iterator[None]:
    """A process that stands still for as long as the block lasts."""
    pid = run.pids()[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the run may have ended, and it with it
            os.kill(pid, signal.SIGCONT)


def held_by(folder: Path, worker: str) -> list[int]:
    """Units that a worker has leases for."""
    query = (
        "SELECT leases.unit FROM leases JOIN nodes ON nodes.node = leases.node "
        f"WHERE leases.state = 'active' AND nodes.name = '{worker}'"
    )
    return [unit for (unit,) in glimpse(folder, query)]


def stop_with_leases(run: Run, worker: str) -> list[int]:
    """Stop a worker while it holds leases; those."""
    found: list[int] = []

    def caught() -> bool:
        if held_by(run.path, worker):
            os.kill(run.pids()[worker], signal.SIGSTOP)
            time.sleep(0.5)  # what it has sent by now is still taken in: only what is left is held by a stopped worker
            found.extend(held_by(run.path, worker))
            if not found:
                os.kill(run.pids()[worker], signal.SIGCONT)
        return bool(found)

    run.wait_until(f"{worker} to hold leases", caught)
    return found


@pytest.mark.slow
def test_stopped_processes_delay_nobody_and_are_not_punished(tmp_path: Path, overrides: list[str]) -> None:
    """At staleness 0 every unit is needed: those of a stopped worker have to be done by the other one."""
    folder = tmp_path / "run"
    settings = [*overrides, "run.steps=200", "run.max_staleness=0", "worker.count=2", "hub.lease_s=3"]
    with start_run(folder, settings) as run:
        units = stop_with_leases(run, "worker-0")
        last = max(units)
        done = f"SELECT 1 FROM units WHERE unit = {last} AND state NOT IN ('open', 'leased', 'submitted')"
        run.wait_until("the other worker to do its units", lambda: bool(glimpse(folder, done)))
        os.kill(run.pids()["worker-0"], signal.SIGCONT)
        log = folder / "logs" / "worker-0.log"
        run.wait_until("it to be told", lambda: bool(LATE.search(log.read_text())))
        accepted = partial(rows, folder, "SELECT accepted FROM nodes WHERE name = 'worker-0'")
        before = accepted()
        run.wait_until("it to continue", lambda: accepted() > before)
        for name in ("hub", "validator-0"):
            with stopped(run, name):
                time.sleep(2)  # as long as a process is away, not until something happens
            require_progress(run)
        assert restarted(folder) == set()
        require_end_when_the_port_is_stolen(run, "relay-0")
    require_sound(folder, len(metrics(folder)))


@pytest.mark.slow
def test_silent_hub_is_waited_for_and_logged(tmp_path: Path, overrides: list[str]) -> None:
    folder = tmp_path / "run"
    with start_run(folder, [*overrides, "run.steps=2000"]) as run:
        run.wait_until("the first batch", batch_written(folder, 0))
        logs = [folder / "logs" / f"{name}.log" for name in ("worker-0", "validator-0", "trainer")]
        with stopped(run, "hub"):
            for log in logs:
                run.wait_until(f"{log.name} to say so", lambda log=log: "does not answer" in log.read_text())
        require_progress(run)
        assert restarted(folder) == set()
        for log in logs:
            assert "answers again, after" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["validator-0", "hub"])
def test_run_without_progress_ends_and_names_the_process(tmp_path: Path, overrides: list[str], name: str) -> None:
    folder = tmp_path / "run"
    with start_run(folder, [*overrides, "run.steps=2000"], ["--patience", "30"]) as run:
        run.wait_until("the first batch", batch_written(folder, 0))
        with stopped(run, name):
            assert run.wait(120) == 1, run.said()
        assert re.match(rf"shoal: no progress for \d+ s: {name} \(pid \d+\) was halted", complaint(run))
        assert processes_of(folder) == {}
