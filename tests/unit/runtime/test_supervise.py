"""The supervisor over real processes: tiny `python -c` children, signals, and a supervisor killed with -9."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit import eventually
from shoal.errors import ResourceError
from shoal.runtime import STOPPED_CODE, Backoff, StopToken
from shoal.runtime.supervise import Ending, ProcessSpec, ProcessView, RestartPolicy, Supervisor, last_line

DEADLINE_S = 20.0
QUICK = RestartPolicy(Backoff(0.01, 0.02), max_short_lives=3, healthy_s=60.0, grace_s=5.0)
SLEEP = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.05)"


def alive(pid: int) -> bool:
    """True while the process runs; a zombie that nobody has reaped yet has ended."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip() != "" and not state.strip().startswith("Z")


class Bench:
    """A supervisor under test whose children are killed whatever happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop = StopToken()
        self.supervisor: Supervisor | None = None

    def spec(self, name: str, code: str, **options: object) -> ProcessSpec:
        argv = (sys.executable, "-S", "-c", code)
        return ProcessSpec(name, argv, self.folder / f"{name}.log", **options)  # type: ignore[arg-type]

    def make(self, *specs: ProcessSpec, policy: RestartPolicy = QUICK) -> Supervisor:
        self.supervisor = Supervisor(specs, self.stop, self.folder / "processes.json", policy)
        return self.supervisor

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def recorded(self) -> dict[str, int]:
        pids: dict[str, int] = json.loads((self.folder / "processes.json").read_text())
        return pids


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    if bench.supervisor is not None:
        bench.supervisor.shut_down()


def poll_until(supervisor: Supervisor, condition: Callable[[], bool], what: str) -> None:
    def step() -> bool:
        assert supervisor.poll() is None
        return condition()

    eventually(step, otherwise=what)


def view(supervisor: Supervisor, name: str) -> ProcessView:
    return next(process for process in supervisor.processes() if process.name == name)


def states(supervisor: Supervisor) -> list[str]:
    return [process.state for process in supervisor.processes()]


def test_a_killed_process_is_started_again(bench: Bench) -> None:
    supervisor = bench.make(bench.spec("worker", SLEEP))
    poll_until(supervisor, lambda: "up" in bench.log("worker"), "the first life")
    first = supervisor.pids["worker"]
    assert bench.recorded() == {"worker": first}
    os.kill(first, signal.SIGKILL)
    poll_until(supervisor, lambda: supervisor.pids.get("worker", first) != first, "a second life")
    assert bench.recorded() == {"worker": supervisor.pids["worker"]}
    again = view(supervisor, "worker")
    assert (again.state, again.restarts, again.why) == ("running", 1, "was killed by SIGKILL")
    poll_until(supervisor, lambda: bench.log("worker").count("up") == 2, "output of the second life, same log")


def test_a_crash_loop_of_an_essential_process_ends_the_run_with_a_sentence(bench: Bench) -> None:
    code = "import sys; print('the disk is on fire', file=sys.stderr); sys.exit(7)"
    ending = bench.make(bench.spec("hub", code), bench.spec("other", SLEEP)).run()
    assert ending.exit_code == 1
    assert "hub died 3 times in a row" in ending.message
    assert "exit code 7" in ending.message
    assert "the disk is on fire" in ending.message
    assert bench.log("hub").count("fire") == 3


def test_crash_loop_of_an_optional_process_does_not_end_the_run(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    worker = bench.spec("worker", "import sys; print('no luck'); sys.exit(1)", essential=False)
    supervisor = bench.make(worker, bench.spec("trainer", SLEEP, when_done="end"))
    poll_until(supervisor, lambda: "giving up: worker" in caplog.text, "giving up")
    for _ in range(50):
        assert supervisor.poll() is None
    assert list(supervisor.pids) == ["trainer"]
    assert (states(supervisor)[0], view(supervisor, "worker").restarts) == ("given up", 2)
    assert bench.log("worker").count("no luck") == 3


def test_a_long_life_clears_the_count_of_short_ones(bench: Bench) -> None:
    policy = RestartPolicy(Backoff(0.001, 0.001), max_short_lives=3, healthy_s=0.0)
    deaths = bench.folder / "deaths"
    code = f"import sys; open({str(deaths)!r}, 'a').write('x'); sys.exit(1)"
    supervisor = bench.make(bench.spec("hub", code), policy=policy)
    poll_until(supervisor, lambda: deaths.exists() and len(deaths.read_text()) >= 5, "more deaths than the limit")


@pytest.mark.parametrize("code", [2, 3, 5])
def test_a_mistake_of_the_user_is_not_retried(bench: Bench, code: int) -> None:
    child = f"import sys; print('shoal: port 80 is taken', file=sys.stderr); sys.exit({code})"
    supervisor = bench.make(bench.spec("hub", child))
    assert supervisor.run() == Ending(code, "hub: port 80 is taken")
    assert view(supervisor, "hub").why == f"ended with exit code {code}", "what it said is said by the ending"
    assert bench.log("hub").count("port 80") == 1


SHUT_OUT = "import sys; print('shoal: this node is banned: sampling.seed', file=sys.stderr); sys.exit(6)"


def test_excluded_process_rests_and_the_run_continues(bench: Bench) -> None:
    cheater = bench.spec("worker", SHUT_OUT, essential=False, when_done="rest")
    supervisor = bench.make(cheater, bench.spec("trainer", SLEEP, when_done="end"))
    poll_until(supervisor, lambda: view(supervisor, "worker").state == "resting", "the worker to rest")
    for _ in range(50):
        assert supervisor.poll() is None
    assert bench.log("worker").count("banned") == 1
    seen = view(supervisor, "worker")
    assert (seen.pid, seen.restarts) == (None, 0)
    assert seen.why == "was shut out by the hub: this node is banned: sampling.seed"


def test_processes_as_people_see_them(bench: Bench) -> None:
    policy = RestartPolicy(Backoff(30.0, 30.0), max_short_lives=3)
    dies = bench.spec("relay", "import sys; print('no luck'); sys.exit(1)", essential=False)
    rests = bench.spec("worker", "print('once')", when_done="rest")
    supervisor = bench.make(bench.spec("hub", SLEEP), dies, rests, policy=policy)
    poll_until(supervisor, lambda: states(supervisor) == ["running", "restarting", "resting"], "their states")
    hub, relay, worker = supervisor.processes()
    assert (hub.name, hub.pid, hub.restarts, hub.why) == ("hub", supervisor.pids["hub"], 0, "")
    assert (relay.pid, relay.restarts, relay.why) == (None, 0, "ended with exit code 1: no luck")
    assert (worker.pid, worker.why) == (None, "is done")
    assert all(0 <= process.since_s < DEADLINE_S for process in (hub, relay, worker))


def test_the_run_ends_with_the_trainer_and_takes_the_others_along(bench: Bench) -> None:
    gate = bench.folder / "gate"
    trainer = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    supervisor = bench.make(bench.spec("hub", SLEEP), bench.spec("trainer", trainer, when_done="end"))
    poll_until(supervisor, lambda: "up" in bench.log("hub"), "the hub")
    hub = supervisor.pids["hub"]
    gate.touch()
    assert supervisor.run() == Ending(0, "")
    assert not alive(hub)
    assert bench.recorded() == {}


@pytest.mark.parametrize("when_done", ["end", "rest"])
def test_one_that_somebody_told_to_stop_is_not_done_and_comes_back(bench: Bench, when_done: str) -> None:
    code = f"import sys\nsys.exit({STOPPED_CODE})"
    supervisor = bench.make(bench.spec("trainer", code, when_done=when_done))
    poll_until(supervisor, lambda: view(supervisor, "trainer").restarts == 1, "a second life")
    assert "was told to stop by somebody" in view(supervisor, "trainer").why


def test_stopping_ends_every_child_cleanly(bench: Bench) -> None:
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.05)"
    )
    supervisor = bench.make(bench.spec("a", polite), bench.spec("b", polite))
    poll_until(supervisor, lambda: "up" in bench.log("a") and "up" in bench.log("b"), "both up")
    bench.stop.set("SIGTERM")
    ending = supervisor.run()
    assert ending == Ending(130, "stopped (SIGTERM)")
    assert "bye" in bench.log("a")
    assert "bye" in bench.log("b")


def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(bench: Bench) -> None:
    stubborn = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: print('grandchild', child, flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    supervisor = bench.make(bench.spec("stubborn", stubborn), policy=RestartPolicy(grace_s=0.2))
    poll_until(supervisor, lambda: "grandchild" in bench.log("stubborn"), "the grandchild")
    grandchild = int(bench.log("stubborn").split()[-1])
    pid = supervisor.pids["stubborn"]
    supervisor.shut_down()
    assert not alive(pid)
    eventually(lambda: not alive(grandchild))


IMPATIENCE = """
import sys
from pathlib import Path
from shoal.runtime.stop import stop_on_signals
from shoal.runtime.supervise import ProcessSpec, RestartPolicy, Supervisor
folder = Path(sys.argv[1])
deaf = (
    "import signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "print('up', flush=True)\\n"
    "while True: time.sleep(0.05)"
)
stop = stop_on_signals(supervising=True)
spec = ProcessSpec("deaf", (sys.executable, "-S", "-c", deaf), folder / "deaf.log")
policy = RestartPolicy(grace_s=600.0)
supervisor = Supervisor([spec], stop, folder / "processes.json", policy)
ending = supervisor.run(on_end=lambda: print("ending", flush=True))
print(ending.message, flush=True)
sys.exit(ending.exit_code)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_no_child_and_no_traceback(tmp_path: Path, second: signal.Signals) -> None:
    command = [sys.executable, "-c", IMPATIENCE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        log = tmp_path / "deaf.log"
        try:
            known = tmp_path / "processes.json"
            eventually(lambda: log.exists() and "up" in log.read_text() and known.exists())
            child = json.loads(known.read_text())["deaf"]
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "ending\n"
            assert alive(child), "it is given time to end"
            process.send_signal(second)
            process.send_signal(second)
            assert process.wait(DEADLINE_S) == 130
            said = process.stdout.read()
            assert said.endswith("stopped (SIGINT)\n")
            assert "Traceback" not in said
            assert not alive(child)
        finally:
            process.kill()


def test_a_command_that_does_not_exist_is_one_sentence(bench: Bench) -> None:
    missing = ProcessSpec("hub", ("/nowhere/at/all",), bench.folder / "hub.log")
    with pytest.raises(ResourceError, match="cannot start hub"):
        bench.make(missing).run()


ORPHANAGE = """
import sys
from pathlib import Path
from shoal.runtime.stop import STOPPED_CODE, StopToken
from shoal.runtime.supervise import ProcessSpec, Supervisor
folder = Path(sys.argv[1])
child = (
    "import os\\n"
    "from shoal.runtime.stop import StopToken\\n"
    "from shoal.runtime.supervise import follow_supervisor\\n"
    "stop = StopToken()\\n"
    "follow_supervisor(stop)\\n"
    "print('pid', os.getpid(), flush=True)\\n"
    "stop.wait(60)\\n"
    "print('stopped:', stop.reason, flush=True)"
)
spec = ProcessSpec("child", (sys.executable, "-c", child), folder / "child.log")
Supervisor([spec], StopToken(), folder / "processes.json").run()
"""


def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", ORPHANAGE, str(tmp_path)])
    log, processes = tmp_path / "child.log", tmp_path / "processes.json"
    try:
        eventually(lambda: log.exists() and "pid" in log.read_text() and processes.exists())
        child = json.loads(processes.read_text())["child"]
        assert alive(child)
        supervisor.kill()
        supervisor.wait(DEADLINE_S)
        eventually(lambda: not alive(child))
        assert "stopped: the supervisor is gone" in log.read_text()
    finally:
        supervisor.kill()
        supervisor.wait(DEADLINE_S)


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert last_line(path) == "no log was written"
    path.write_text("\n\n")
    assert last_line(path) == "its log is empty"
    path.write_text("x" * 10_000 + "\nshoal: the port is taken\n\n")
    assert last_line(path) == "the port is taken"
