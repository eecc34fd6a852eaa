"""Programs that try to get out of the sandbox, to harm the machine, or to be paid for nothing. None of them may.

Every one runs in the real sandbox. What it must not reach (a file, a server, a secret) is really there, outside.
"""

import json
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kit import Patch
from kit.sandbox import SHORT, children, gone, needs_bubblewrap, said
from shoal.environments.graders.code import CodeGrader
from shoal.environments.sandbox import Limits, Sandbox
from shoal.environments.sandbox import process as process_module

pytestmark = needs_bubblewrap

SECRET = "the-hidden-value-58213"
ANSWER = json.dumps({
    "test_cases": [
        {"type": "stdin_stdout", "input": "first\n", "output": SECRET},
        {"type": "stdin_stdout", "input": "second\n", "output": SECRET},
    ],
    "limits": {"cpu_s": 2, "test_cpu_s": 1, "memory_mb": 256, "output_bytes": 1_000_000},
})  # fmt: skip
CALL = json.dumps({
    "test_cases": [{"type": "function_call", "fn_name": "answer", "input": [1], "output": SECRET}],
    "limits": {"cpu_s": 1, "test_cpu_s": 1},
})  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_stays_behind(monkeypatch: Patch) -> Iterator[None]:
    """Whatever a program does: when it is over there is no process of it, and no descriptor open here."""
    monkeypatch.setattr(process_module, "WALL_GRACE_S", 120.0)  # other tests may keep the processors busy
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    yield
    assert not children()
    assert {path.name for path in Path("/proc/self/fd").iterdir()} <= before  # others may be collected meanwhile


def worth(code: str, answer: str = ANSWER) -> tuple[float, str]:
    scored = CodeGrader().score(answer, f"```python\n{code}\n```")
    return scored.value, scored.notes


BOMBS = {
    "fork bomb": ("import os\nwhile True: os.fork()", "error (PermissionError)"),
    "fork bomb that does not give up": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "took longer"),
    "processes": ("import subprocess\nsubprocess.run(['/bin/sh'])", "error"),
    "exec": ("import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])", "error (PermissionError)"),
    "multiprocessing": ("import multiprocessing as m\nm.Process(target=print).start()", "error (PermissionError)"),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**7))", "error (MemoryError)"),
    "memory at once": ("x = b'x' * 10**11", "error (MemoryError)"),
    "memory in a file": ("import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, b'x' * 10**6)",
        "error (OSError)"),
    "endless output": ("while True: print('x' * 10**4)", "printed more than"),
    "endless errors": ("import sys\nwhile True: print('x' * 10**4, file=sys.stderr)", "printed more than"),
    "threads": ("import threading, time\nthreading.stack_size(32768)\nn = 0\ntry:\n  while True:\n"
        "    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n    n += 1\n"
        "except RuntimeError:\n  assert n <= 66, n\n  raise", "error (RuntimeError)"),
    "open files": ("x = [open('/dev/null') for _ in range(10**6)]", "error (OSError)"),
    "pipes": ("import os\nx = [os.pipe() for _ in range(10**6)]", "error (OSError)"),
    "loop in C": ("sum(range(10**13))", "took longer"),
    "powers": ("x = 7 ** 10**9", "took longer"),
    "regular expression": ("import re\nre.match('(a|a)*$', 'a' * 60 + 'b')", "took longer"),
    "deaf to signals": ("import signal\nfor s in set(signal.valid_signals()) - {9, 19}:\n"
        "  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass",
        "took longer"),
    "hard to compile": ("(" * 50_000, "error"),
    "recursion": ("def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()", ""),
}  # fmt: skip


# Each of these takes a second of processor time, and one like it is always tried.
LONG = {"fork bomb that does not give up", "powers", "regular expression", "recursion", "closes and goes on"}


def slow_if_long(names: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


@pytest.mark.parametrize("bomb", slow_if_long(BOMBS))
def test_bomb_scores_zero(bomb: str) -> None:
    code, says = BOMBS[bomb]
    value, notes = worth(code)
    assert value == 0.0
    assert notes.startswith("test 1 of 2: ")
    assert says in notes


SLEEPERS = [
    "import time\ntime.sleep(10**6)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(10**6,)).start()",
    "import atexit, time\natexit.register(time.sleep, 10**6)",
]


@pytest.mark.parametrize("code", SLEEPERS)
def test_waiting_program_is_ended_by_the_clock(code: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(process_module, "WALL_FACTOR", 0)
    monkeypatch.setattr(process_module, "WALL_GRACE_S", 1.0)
    value, notes = worth(code)
    assert value == 0.0
    assert "took longer" in notes


def test_fork_fails_and_only_three_descriptors_are_open() -> None:
    code = "import os\ntry:\n  os.fork()\nexcept OSError as e:\n  print(e.errno)\nimport ctypes\n" + "".join(
        f"print(ctypes.CDLL(None, use_errno=True).{call})\n" for call in ("fork()", "vfork()", "daemon(0, 0)")
    )
    assert said(code).split() == ["1", "-1", "-1", "-1"]
    assert said("import os\nprint(os.listdir('/proc/self/fd'))") == "['0', '1', '2', '3']"  # 3 is the listing itself


def test_nothing_can_be_written_anywhere() -> None:
    code = """
import os
written = []
for folder, inner, _ in os.walk("/"):
    if folder.count("/") > 2 or folder.startswith("/proc"):
        inner.clear()
    for attempt in (lambda: open(folder + "/x", "w"), lambda: os.mkdir(folder + "/d"),
                    lambda: os.symlink("/etc", folder + "/s"), lambda: os.mkfifo(folder + "/f"),
                    lambda: os.chmod(folder, 0o777), lambda: os.rename(folder, "/moved")):
        try:
            attempt()
            written.append(folder)
        except OSError:
            pass
print(written)
"""
    assert said(code) == "[]"


def test_files_outside_are_not_visible() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(SECRET)
        file.flush()
        Path(file.name).chmod(0o644)
        here = [file.name, __file__, str(Path.cwd()), str(Path.home() / ".shoal"), "/etc/shadow", "/etc/passwd", "/etc",
                "/home", "/tmp", "/var", "/sys", "/run", "/bin/sh", "/usr/bin", "/dev/shm", "/dev/pts", "/dev/tty",
                "/dev/mem", "/dev/kmsg"]  # fmt: skip
        code = f"import os\nprint([path for path in {here!r} if os.path.exists(path)])"
        assert said(code) == "[]"


def test_proc_links_of_other_processes_are_closed() -> None:
    code = """
import os
for path in ("/proc/1/root", "/proc/1/cwd", "/proc/self/root/../..", "/proc/1/fd", "/proc/1/map_files"):
    try:
        print(path, sorted(os.listdir(path)))
    except OSError as error:
        print(path, error.errno)
"""
    lines = dict(line.split(" ", 1) for line in said(code).splitlines())
    assert lines["/proc/1/root"] == lines["/proc/1/cwd"] == lines["/proc/1/fd"] == lines["/proc/1/map_files"] == "13"
    assert "'proc'" in lines["/proc/self/root/../.."]
    assert "'etc'" not in lines["/proc/self/root/../.."]


# What it looks for is nowhere in one piece: it would find itself.
HUNTER = f"""
import ctypes, gc, os, sys
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # to be looked into, also by itself
found = []
def look(where, data):
    at = data.find({SECRET[:10].encode()!r})
    while at >= 0:
        if data[at + 10:at + {len(SECRET)}][::-1] == {SECRET[:9:-1].encode()!r}:
            found.append(where)
        at = data.find({SECRET[:10].encode()!r}, at + 1)
def attempt(where, read):
    try:
        look(where, read())
    except (OSError, ValueError):
        pass
for process in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "mem", "maps", "stack", "syscall"):
        attempt(process + name, lambda: open(f"/proc/{{process}}/{{name}}", "rb").read(10**7))
    for name in ("fd", "task", "map_files"):
        attempt(process + name, lambda: str([os.readlink(f"/proc/{{process}}/{{name}}/{{entry}}")
                                             for entry in os.listdir(f"/proc/{{process}}/{{name}}")]).encode())
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps").read().splitlines():
        first, last = (int(x, 16) for x in line.split()[0].split("-"))
        if "r" in line.split()[1] and "[v" not in line:
            memory.seek(first)
            look(line, memory.read(last - first))
for thing in gc.get_objects():
    look("objects", str(thing)[:10**5].encode(errors="replace") if isinstance(thing, (list, dict, tuple)) else b"")
frame = sys._getframe()
while frame:
    look("frame", repr(frame.f_locals).encode(errors="replace"))
    frame = frame.f_back
for number in range(3, 256):
    attempt("descriptor", lambda: os.read(number, 10**6))
print(found, os.environ.get("SHOAL_SECRET"), sys.argv)
"""


def test_expected_output_is_not_found_by_a_search_that_finds_the_input(monkeypatch: Patch) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    kept = os.memfd_create("secret", 0)
    os.write(kept, SECRET.encode())
    os.lseek(kept, 0, os.SEEK_SET)
    os.set_inheritable(kept, True)
    try:
        scored = said(HUNTER)
    finally:
        os.close(kept)
    assert scored == "[] None ['solution.py']"
    assert worth(HUNTER)[0] == 0.0
    # the hunt itself works: what a program is given, it finds
    code = f"given = input()\n{HUNTER}"
    assert said(code, SECRET + "\n") != "[] None ['solution.py']"


def test_second_test_sees_nothing_of_the_first() -> None:
    """Nothing of the first test's input or output is in the memory of the second, nor anything the first left."""
    code = f"""
import builtins, os, sys
word = input()
builtins.left = word
os.environ["LEFT"] = word
sys.modules["left"] = word
os.umask(0o123)
print(word)
{HUNTER}
"""
    with Sandbox(code.encode(), SHORT) as sandbox:
        first = sandbox.run(f"{SECRET}\n".encode())
        second = sandbox.run(b"second\n")
        third = sandbox.run(b"import builtins\n")
    assert first.output.split(b"\n")[1] != b"[] None ['solution.py']"
    assert second.output.split(b"\n")[1] == b"[] None ['solution.py']"
    assert third.output.split(b"\n")[1] == b"[] None ['solution.py']"


def test_changes_of_the_first_test_are_undone() -> None:
    code = """
import builtins, os, resource, sys
print(hasattr(builtins, "left"), os.environ.get("LEFT"), os.umask(0), os.getpriority(os.PRIO_PROCESS, 1),
      resource.getrlimit(resource.RLIMIT_STACK), len(os.sched_getaffinity(1)))
builtins.left = builtins.open = os.environ["LEFT"] = "x"
for attempt in (lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.nice(3),
                lambda: os.sched_setaffinity(1, {min(os.sched_getaffinity(0))}),
                lambda: resource.prlimit(1, resource.RLIMIT_STACK, (2**20, 2**20)),
                lambda: resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))):
    try:
        attempt()
    except OSError:
        pass
"""
    with Sandbox(code.encode(), SHORT) as sandbox:
        first, second = sandbox.run(b""), sandbox.run(b"")
    assert first.ended == second.ended == "well"
    assert first.output == second.output


FORGERIES = {
    "leaves before the tests": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "says that it passed": "print('all tests passed')\nprint('ok')",
    "equal to everything": "class A(str):\n  __eq__ = lambda a, b: True\n  __hash__ = str.__hash__\n"
    "answer = lambda x: A('x')\nprint(A('x'))",
    "another json": "import json\njson.dumps = lambda *a, **k: 'true'\n"
    "json.loads = lambda *a: {}\nanswer = lambda x: 1",
    "other builtins": "import builtins, os\nfor n in ('print', 'len', 'open', 'exec', 'compile', 'isinstance'):\n"
    "  setattr(builtins, n, lambda *a, **k: True)\nos._exit = os.write = lambda *a: True\nanswer = lambda x: True",
    "another runner": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "  frame.f_globals.update(run=print, take=print, forbid=print, until_ended=print, finish=print)\n"
    "  frame = frame.f_back\nanswer = lambda x: True",
    "forged reports": "import os\nfor fd in range(256):\n  try: os.write(fd, b'R' + bytes(64))\n"
    "  except OSError: pass\nanswer = lambda x: True",
    "forged values": "import os\ntry: os.write(3, b'true')\nexcept OSError: pass\nos._exit(0)",
    "values one after the other": "import os\nfor v in (b'null', b'true', b'\"\"', b'[]'):\n"
    "  try: os.write(3, v)\n  except OSError: pass\nanswer = lambda x: 5",
    "deep values": "import os\ntry: os.write(3, b'[' * 60000)\nexcept OSError: pass\nos._exit(0)",
    "closes everything": "import os\nos.closerange(0, 256)",
    "closes and goes on": "import os\nos.closerange(0, 256)\nwhile True: pass",
    "reads and writes everything": "import os\nfor fd in range(256):\n  try: print(os.read(fd, 9))\n"
    "  except OSError: pass\nanswer = lambda x: x",
    "abort": "import os\nos.abort()",
    "forged traceback": "import sys\nsys.excepthook = lambda *a: None\nraise SystemExit('passed')",
    "raises nothing": "import sys\nsys.excepthook = 5\nraise ValueError",
}


@pytest.mark.parametrize("forgery", slow_if_long(FORGERIES))
@pytest.mark.parametrize("answer", [ANSWER, CALL], ids=["printed", "called"])
def test_forgery_scores_zero(forgery: str, answer: str) -> None:
    assert worth(FORGERIES[forgery], answer)[0] == 0.0


KILLERS = {
    "kill": "os.kill(target, 9)", "kill softly": "os.kill(target, 15)",
    "tgkill": "assert not libc.syscall(234, target, target, 9)", "tkill": "assert not libc.syscall(200, target, 9)",
    "pidfd": "signal.pidfd_send_signal(os.pidfd_open(target), 9)", "oneself": "signal.raise_signal(9)",
    "a signal of a pipe": "r, w = os.pipe()\n    fcntl.fcntl(r, 10, 9)\n    fcntl.fcntl(r, 8, target)\n"
    "    fcntl.fcntl(r, 4, fcntl.fcntl(r, 3) | 0x2000)\n    os.write(w, b'x')\n    time.sleep(0.1)",
    "a limit of time": "resource.setrlimit(resource.RLIMIT_CPU, (0, 0))",
    "another's limit": "resource.prlimit(target, resource.RLIMIT_CPU, (0, 0))",
}  # fmt: skip


@pytest.mark.parametrize("how", KILLERS)
def test_no_process_can_be_killed_and_no_kill_feigned(how: str) -> None:
    """A program that is killed from outside is unscored. So none may look as if it was."""
    code = f"""
import ctypes, fcntl, os, resource, signal, time
libc = ctypes.CDLL(None)
for target in (1, -1, 0, os.getppid(), os.getpid()):
  try:
    {KILLERS[how]}
    print("did it", target)
  except (OSError, ValueError, AssertionError):
    pass
print("here")
"""
    with Sandbox(code.encode(), SHORT) as sandbox:
        outputs = [sandbox.run(b"").output, sandbox.run(b"").output]
    assert outputs == [b"here\n"] * 2


@pytest.fixture
def server() -> Iterator[int]:
    """A server on this machine that answers every client."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield int(listening.getsockname()[1])


def test_no_server_can_be_reached(server: int, tmp_path: Path) -> None:
    named, abstract = str(tmp_path / "socket"), f"\0shoal-{os.getpid()}"
    with closing(socket.socket(socket.AF_UNIX)) as one, closing(socket.socket(socket.AF_UNIX)) as other:
        for listening, address in ((one, named), (other, abstract)):
            listening.bind(address)
            listening.listen()
        tmp_path.chmod(0o755)
        code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {server})), (socket.AF_INET, ("8.8.8.8", 53)),
                        (socket.AF_INET6, ("::1", {server})), (socket.AF_UNIX, {named!r}),
                        (socket.AF_UNIX, {abstract!r}), (40, (2, 1024)), (16, (0, 0)), (38, ("hash", "sha256"))):
    try:
        socket.socket(family, socket.SOCK_STREAM if family < 16 or family == 40 else 3).connect(address)
        print("reached", address)
    except OSError as error:
        print(error.errno)
"""
        assert "reached" not in said(code)
        with socket.create_connection(("127.0.0.1", server), timeout=5):
            pass  # it is there


CALLS = {
    "ptrace": (101, 16, 1, 0, 0), "process_vm_readv": (310, 1, 0, 0, 0, 0, 0), "mount": (165, 0, 0, 0, 0, 0),
    "unshare": (272, 0x10000000), "setns": (308, 0, 0), "clone with a user namespace": (56, 0x10000011, 0, 0, 0, 0),
    "bpf": (321, 0, 0, 0), "perf_event_open": (298, 0, 0, -1, -1, 0), "io_uring_setup": (425, 1, 0),
    "userfaultfd": (323, 0), "keyctl": (250, 0, -3, 0), "add_key": (248, 0, 0, 0, 0, -3),
    "shmget": (29, 0, 4096, 0o1600), "mq_open": (240, 0, 0x42, 0o600, 0), "open_by_handle_at": (304, -100, 0, 0),
    "personality": (135, 0x0040000), "chroot": (161, 0), "timer_create": (222, 0, 0, 0), "pidfd_open": (434, 1, 0),
    "setrlimit": (160, 0, 0),
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_forbidden_system_calls_fail_and_unknown_ones_do_not_exist() -> None:
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, (number, *arguments) in {CALLS!r}.items():
    print(name, libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)), ctypes.get_errno(), sep=": ")
"""
    assert said(code).splitlines() == [f"{name}: -1: 1" for name in CALLS]
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (435, 451, 467, 600, 0x40000000 + 39, 0x40000000 + 57):
    print(libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0), ctypes.get_errno())
"""
    assert set(said(code).splitlines()) == {"-1 38"}


def test_no_rights_can_be_gained() -> None:
    code = """
import os
for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0),
                lambda: os.chown("/proc/self", 0, 0), lambda: os.chroot("/proc"), lambda: os.nice(-5)):
    try:
        attempt()
        print("did it")
    except OSError:
        pass
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(os.getuid() != 0, int(status["CapEff"], 16), int(status["CapPrm"], 16), status["NoNewPrivs"], status["Seccomp"])
"""
    assert said(code) == "True 0 0 1 2"


def test_limits_cannot_be_raised() -> None:
    code = """
import resource
for name in ("CPU", "AS", "NPROC", "FSIZE", "NOFILE", "CORE", "DATA", "MEMLOCK"):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("did it", name)
    except (OSError, ValueError):
        pass
print([resource.getrlimit(x)[1] for x in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)])
"""
    assert said(code) == f"[2, {256 << 20}, 0]"


def test_programs_do_not_share_a_limit_of_threads() -> None:
    code = b"""
import threading, time
threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(40)]
for t in threads: t.start()
for t in threads: t.join()
print("all", input())
"""
    boxes = [Sandbox(code, Limits(cpu_s=2, test_cpu_s=2)) for _ in range(3)]
    try:
        assert len(children()) >= 3
        assert [box.run(b"x\n").output for box in boxes] == [b"all x\n"] * 3
    finally:
        started = children()
        for box in boxes:
            box.close()
        assert gone(started)
