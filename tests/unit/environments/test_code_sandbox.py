"""The sandbox as a machine: it starts, it refuses where it cannot, and its failures are told from bad programs."""

import os
import re
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kit.reward import until
from kit.sandbox import SHORT, children, gone, needs_bubblewrap, run, said
from shoal.environments.graders import grader
from shoal.environments.sandbox import Ran, Sandbox, require_sandbox
from shoal.environments.sandbox import process as process_module
from shoal.environments.sandbox.seccomp import ARCHITECTURES, DENIED, NEWEST, assemble
from shoal.errors import EnvironmentSetupError, ScoringFailure

SLEEPER = b"import time\ntime.sleep(10**6)"
ANSWER = '{"inputs": [""], "outputs": ["1"]}'
SRC = Path(__file__).parents[3] / "src"


@needs_bubblewrap
def test_a_program_ends_as_it_ends() -> None:
    ends = {
        "print(1)": ("well", 0), "raise SystemExit(7)": ("error", 7), "raise SystemExit('no')": ("error", 1),
        "import os; os._exit(9)": ("error", 9), "1/0": ("error", 1),
        "import os; os.abort()": ("signal", -signal.SIGABRT),
        "import signal; signal.setitimer(0, 0.01); signal.pause()": ("signal", -signal.SIGALRM),
    }  # fmt: skip
    assert {code: (ran.ended, ran.status) for code in ends for ran in [run(code)]} == ends


@needs_bubblewrap
def test_installed_packages_are_hidden() -> None:
    code = """
import os, sys
for path in list(sys.path):
    sys.path.append(path + "/site-packages")
try:
    import pydantic
    print("found")
except ImportError:
    print("none", [x for x in sys.path if x.endswith("packages") and os.path.isdir(x) and os.listdir(x)])
"""
    assert said(code) == "none []"


@pytest.mark.parametrize(("script", "setup", "scoring"), [
    ("", "bwrap is not on the PATH.*apt install bubblewrap", "bwrap is not on the PATH"),
    ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
     r"create new namespace.*user\.max_user_namespaces", "No permissions to create new namespace"),
    ("exec /bin/sleep 1000", "no answer within", "no answer within"),
], ids=["there is none", "no namespaces", "no answer"])  # fmt: skip
def test_missing_sandbox_is_refused_with_advice_and_code_is_unscored(script, setup, scoring, tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "START_S", 0.5)
    if script:  # another bwrap on the PATH
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if script else str(tmp_path))
    for prepare in (require_sandbox, grader("code").prepare):  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentSetupError, match=setup):
            prepare()
    with pytest.raises(ScoringFailure, match=scoring):
        grader("code").score(ANSWER, "```python\nprint(1)\n```")


def _parent(process: int) -> int:
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])


@needs_bubblewrap
@pytest.mark.parametrize("victim", ["program", "runner"])
def test_a_program_that_was_killed_from_outside_is_unscored(victim: str) -> None:
    results: list[Ran | ScoringFailure] = []

    def test() -> None:
        try:
            results.append(sandbox.run(b""))
        except ScoringFailure as failure:
            results.append(failure)

    with Sandbox(SLEEPER, SHORT) as sandbox:
        (runner,) = (process for process in children() if _parent(process) in children())
        thread = threading.Thread(target=test)
        thread.start()
        until(lambda: any(_parent(process) == runner for process in children()))
        (program,) = (process for process in children() if _parent(process) == runner)
        os.kill({"program": program, "runner": runner}[victim], signal.SIGKILL)
        thread.join(timeout=20)
    assert isinstance(results[0], ScoringFailure)
    assert "killed" in str(results[0])
    assert not children()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("status", "cpu_s"), [(signal.SIGXCPU, 0.3), (signal.SIGKILL, 0.8), (0, 1.1), (signal.SIGKILL, 0.3)]
)
def test_out_of_time_by_signal_or_account(status: int, cpu_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's two clocks differ on a busy machine: four seconds of the limit's may be 3.7 of the account's. Killed
    long before its time it is unscored."""
    monkeypatch.setattr(process_module.Exchange, "report", lambda _self: (status, cpu_s))
    if (status, cpu_s) == (signal.SIGKILL, 0.3):
        with pytest.raises(ScoringFailure, match="not by itself"):
            run("print(1)")
    else:
        assert run("print(1)").ended == "time"


@needs_bubblewrap
def test_a_program_that_was_not_let_run_is_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that want the processor all the time, more of them than there are processors, by a short clock."""
    monkeypatch.setattr(process_module, "WALL_FACTOR", 0)
    monkeypatch.setattr(process_module, "WALL_GRACE_S", 0.5)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])
    # each in a session of its own, as a sandbox is: the kernel may share processors by session
    busy = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(busy, start_new_session=True) for _ in range(5)]
    try:
        with pytest.raises(ScoringFailure, match="too busy"):
            run("while True: pass")
    finally:
        os.sched_setaffinity(0, cpus)
        for other in others:
            other.kill()
            other.wait(timeout=20)


@needs_bubblewrap
def test_programs_end_when_the_validator_dies() -> None:
    script = f"""
from shoal.environments.sandbox import Limits, Sandbox
with Sandbox({SLEEPER!r}, Limits(cpu_s=600, test_cpu_s=120)) as sandbox:
    print("ready", flush=True)
    sandbox.run(b"")
"""
    validator = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert validator.stdout is not None
        assert validator.stdout.readline() == "ready\n"
        until(lambda: len(children()) >= 3)
        started = children()
    finally:
        validator.kill()
        validator.wait(timeout=20)
        validator.stdout.close()  # type: ignore[union-attr]
    assert gone(started)


@needs_bubblewrap
def test_a_program_that_could_not_be_confined_is_not_run_and_is_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that the kernel does not take: nothing ran, so nothing is worth 0."""
    monkeypatch.setattr(process_module.seccomp, "assemble", lambda _machine: b"\xff" * 8)
    with pytest.raises(ScoringFailure, match="killed"):
        run("print(1)")
    with pytest.raises(EnvironmentSetupError, match="cannot be run safely here"):
        require_sandbox()


UNPRIVILEGED = """
import sys
from shoal.environments.sandbox import Limits, Sandbox, require_sandbox
require_sandbox()
code = b'''
import os, threading, time
n = 0
try:
    open("/proc/1/mem", "rb")
    print("the runner can be looked into")
except OSError:
    pass
try:
    os.fork()
except OSError:
    try:
        while True:
            threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
            n += 1
    except RuntimeError:
        print(10 <= n <= 22, open("/dev/stdin").read(), os.path.exists("/etc"), os.path.exists("/tmp"),
              os.access("/", os.W_OK), flush=True)
        os._exit(0)
'''
with Sandbox(code, Limits(cpu_s=2, threads=20)) as sandbox:
    print([sandbox.run(b"x").output for _ in range(2)])
"""


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; the other tests ran as they are")
def test_it_is_the_same_for_a_user_that_is_not_root(tmp_path: Path) -> None:
    packages = Path(sys.modules["pydantic"].__file__ or "").parents[1]
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{SRC}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"user": 12_345, "group": 12_345, "extra_groups": [], "cwd": "/", "env": environ}
    if not Path(python).exists() or subprocess.run([python, "-c", "import shoal, pydantic"], **options).returncode:  # type: ignore[call-overload]
        pytest.skip(f"no {python} that another user may run with this package")
    done = subprocess.run([python, "-c", UNPRIVILEGED], capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]
    assert done.stderr == ""
    assert done.stdout.strip() == str([b"True x False False False\n"] * 2)


# The filter of system calls, run by a small machine of the same kind as the kernel's

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
BOTH = pytest.mark.parametrize("machine", list(ARCHITECTURES))


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter answers to a call."""
    program = list(struct.iter_unpack("<HBBI", assemble(machine)))
    given = [argument & (1 << 64) - 1 for argument in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *given)
    at, value = 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == 0x06:
            return int(constant)
        else:
            truth = {0x15: value == constant, 0x25: value > constant, 0x45: bool(value & constant)}[code]
            at += if_true if truth else if_false


CALLS = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "tgkill": (234, 131), "prlimit64": (302, 261),
    "fcntl": (72, 25), "read": (0, 63), "write": (1, 64), "mmap": (9, 222), "openat": (257, 56), "futex": (202, 98),
    "exit_group": (231, 94), "getrandom": (318, 278), "rt_sigaction": (13, 134), "socketpair": (53, 199),
}  # fmt: skip


@BOTH
def test_calls_are_denied_allowed_or_judged_by_their_arguments_and_unknown_ones_do_not_exist(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    denied = [both[column] for both in DENIED.values() if both[column] is not None]
    assert {number for number in denied if decide(machine, number or 0) != EPERM} == set()
    assert len(set(denied)) == len(denied)

    def allowed(name: str, *arguments: int, answer: int = ALLOW) -> bool:
        return decide(machine, CALLS[name][column], *arguments) == answer

    assert all(allowed(name) for name in list(CALLS)[6:])
    assert allowed("clone", 0x3D0F00), "a thread"
    assert allowed("clone", 0x01200011, answer=EPERM), "a process"
    assert allowed("clone", 0x10000000, answer=EPERM), "a namespace"
    assert allowed("clone3", answer=ENOSYS)
    assert {family for family in range(64) if allowed("socket", family)} == {1}, "only local sockets"
    assert {number for number in range(65) if allowed("tgkill", 1, 1, number)} == {6}, "only abort"
    assert {command for command in range(20) if allowed("fcntl", 3, command, answer=EPERM)} == {10}
    own_stack = {(0, 3)}  # limits are read, and only one's own stack's is set
    everything = {(process, kind) for process in (0, 1) for kind in range(16)}
    for pointer in (0, 0x7F00, 0x7F00_0000_0000, 1 << 32):
        found = {limit for limit in everything if allowed("prlimit64", *limit, pointer, 5)}
        assert found == (own_stack if pointer else everything)
    assert {decide(machine, number) for number in (NEWEST + 1, 0x40000000, 0xFFFFFFFF)} == {ENOSYS}
    assert decide(machine, 0, architecture=0x40000003) == KILL


@BOTH
def test_the_numbers_are_those_of_the_kernel(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"the kernel's headers are not installed ({HEADERS[machine]})")
    pattern = re.compile(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", re.MULTILINE)
    known = {name: int(number) for name, number in pattern.findall(HEADERS[machine].read_text())}
    column = list(ARCHITECTURES).index(machine)
    assert {name: both[column] for name, both in DENIED.items()} == {name: known.get(name) for name in DENIED}
