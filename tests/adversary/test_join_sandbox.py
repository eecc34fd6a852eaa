"""What `shoal join --sandbox` keeps from whatever runs inside: the network, the home folder, everything but its folder.

The attacks run in the very sandbox that the worker runs in, made by the same functions.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kit import Capture, Logs, Patch, TempPaths
from kit.hostile import HostileHub, hostile_hub, hub
from kit.sandbox import needs_bubblewrap
from shoal.cli.main import main
from shoal.errors import ResourceError
from shoal.run import sandbox
from shoal.run.sandbox import Forwarder
from shoal.runtime import StopToken, targets
from shoal.runtime.exchange import ClientRequest, HttpClient, Limit
from shoal.runtime.targets import PUBLIC_ONLY, Nearness, Reach, TargetRefused, connect, nearness, socket_name, way_out

DEADLINE_S = 60
INSIDE = """
import json, os, pathlib, socket, sys
from shoal.runtime.exchange import ClientRequest, HttpClient, Limit
from shoal.runtime.stop import StopToken
given = json.loads(sys.argv[1])
found = {}

def attempt(name, action):
    try:
        found[name] = [True, str(action())[:200]]
    except Exception as error:
        found[name] = [False, f"{type(error).__name__}: {error}"]

def get(url):
    return HttpClient().send(ClientRequest("GET", url), Limit(10, StopToken())).status

def tcp(host, port):
    return socket.create_connection((host, port), timeout=5)

def abstract():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\\0" + given["abstract"])

def write(path, text="x"):
    pathlib.Path(path).write_text(text)

attempt("the hub", lambda: get(given["hub"] + "/run"))
attempt("another port", lambda: get(given["other"] + "/run"))
attempt("a socket to the hub", lambda: tcp("127.0.0.1", given["hub_port"]))
attempt("a socket to another port", lambda: tcp("127.0.0.1", given["other_port"]))
attempt("a socket to a public address", lambda: tcp("8.8.8.8", 53))
attempt("an abstract socket", abstract)
attempt("home", lambda: pathlib.Path(given["planted"]).read_text())
attempt("home listing", lambda: sorted(os.listdir(pathlib.Path(given["planted"]).parent)))
attempt("etc shadow", lambda: open("/etc/shadow").read())
attempt("own folder", lambda: write(given["folder"] + "/inside"))
attempt("beside its folder", lambda: write(given["folder"] + "/../beside"))
attempt("tmp", lambda: write("/tmp/" + given["mark"]))
attempt("usr", lambda: write("/usr/" + given["mark"]))
attempt("packages", lambda: write(os.path.join(sys.prefix, given["mark"])))
attempt("shoal", lambda: write(os.path.join(given["package"], given["mark"])))
attempt("sockets", lambda: write("/run/shoal/" + given["mark"]))
attempt("the parent", lambda: os.kill(given["parent"], 0))
attempt("processes", lambda: [name for name in os.listdir("/proc") if name.isdigit()])
attempt("host name", socket.gethostname)
setting = pathlib.Path("/proc/sys/kernel/core_pattern")
attempt("the kernel's settings", lambda: write(setting, setting.read_text()))
own = ("self", "thread-self", str(os.getpid()))
kernel = [os.path.join(at, name) for top in os.listdir("/proc") if top not in own
          for at, _, names in os.walk("/proc/" + top) for name in names]
attempt("a file of the kernel", lambda: [path for path in kernel if os.access(path, os.W_OK)][0])
attempt("the name of its own thread", lambda: write("/proc/thread-self/comm", "worker"))
attempt("the machine's private keys", lambda: os.listdir("/etc/ssl/private"))
attempt("another user namespace", lambda: os.system("unshare --user true 2>/dev/null") and 1 / 0)
sizes = [(found.f_blocks * found.f_frsize) for found in map(os.statvfs, ("/tmp", "/dev/shm"))]
attempt("all of the memory", lambda: max(sizes) > 2**31 or 1 / 0)
attempt("mount", lambda: os.system("mount -t tmpfs none /mnt 2>/dev/null") and 1 / 0)
print(json.dumps({"found": found, "environment": dict(os.environ)}))
"""


__all__ = ["hub"]  # a fixture


@pytest.fixture
def other() -> Iterator[HostileHub]:
    with hostile_hub() as served:
        yield served


@needs_bubblewrap
def test_inside_reaches_the_run_and_own_folder(hub, other, tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "TORCH_HUB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    folder = tmp_path / "node"
    folder.mkdir()
    mark = f"shoal-test-{os.urandom(8).hex()}"
    listening = socket.socket(socket.AF_UNIX)
    with (
        closing(listening), tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix=".shoal-test-") as planted,
        tempfile.TemporaryDirectory(prefix="shoal-") as sockets, closing(Forwarder(Path(sockets))) as forwarder,
    ):  # fmt: skip
        listening.bind(f"\0{mark}")
        listening.listen()
        planted.write("a private key")
        planted.flush()
        forwarder.allow([hub.url], [], Reach(Nearness.LOOPBACK))
        given = {
            "hub": hub.url, "other": other.url, "planted": planted.name, "folder": str(folder), "mark": mark,
            "hub_port": int(hub.url.rpartition(":")[2]), "other_port": int(other.url.rpartition(":")[2]),
            "package": str(Path(targets.__file__).parents[1]), "parent": os.getpid(), "abstract": mark,
        }  # fmt: skip
        around = [str(shutil.which("bwrap")), *sandbox._options(folder, forwarder.folder)]
        ran = subprocess.run(
            [*around, "--", sys.executable, "-c", INSIDE, json.dumps(given)], env=sandbox._environment(),
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout)
    found: dict[str, list[Any]] = said["found"]
    succeeded = {name for name, (ok, _) in found.items() if ok}
    allowed = {"the hub", "own folder", "tmp", "processes", "host name", "the name of its own thread"}
    # The home may be on the way to the interpreter, and this test's folder is in /tmp: both are empty but for that.
    assert succeeded - {"home listing", "beside its folder"} == allowed, found
    assert "no hub or source of the run" in found["another port"][1]
    assert mark not in found["home"][1]
    assert Path(planted.name).name not in found["home listing"][1]
    assert found["processes"][1] == "['1']"
    assert found["host name"][1] == "sandbox"
    assert "secret" not in said["environment"].values()
    assert (folder / "inside").read_text() == "x"
    assert not (tmp_path / "beside").exists()
    assert not Path("/tmp", mark).exists()
    assert [asked.path for asked in hub.requests] == ["/run"]
    assert other.requests == []


FORBIDDEN = "echo 'bwrap: No permissions to create new namespace' >&2; exit 1"
OLD = "for word; do case $word in %s) echo 'bwrap: Unknown option' >&2; exit 1;; esac; done"


@pytest.mark.parametrize(("program", "complaint"), [
    ("", "install bubblewrap"), (FORBIDDEN, "allow user namespaces"),
    (OLD % "--disable-userns", "Install bubblewrap 0.8 or newer"), (OLD % "--size", "Install bubblewrap 0.8 or newer"),
])  # fmt: skip
def test_join_without_a_working_sandbox_ends(hub, tmp_path, monkeypatch, capsys, program, complaint):
    """There is no bubblewrap, it may not, or it makes every sandbox but one with this option."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if program:
        (tmp_path / "bin" / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bin" / "bwrap").chmod(0o755)
    words = ["join", hub.url, "--engine", "scripted", "--no-check", "--sandbox", "--folder", str(tmp_path / "node")]
    assert main(words) == 3
    assert complaint in capsys.readouterr().err
    assert {asked.path for asked in hub.requests} == {"/run"}, "nobody registered"


def test_home_inside_the_interpreters_folder_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    """As where shoal is installed into the system's own Python, in a container whose home is below it."""
    home = tmp_path / "python" / "home"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    with pytest.raises(ResourceError, match="and with it your home folder"):
        sandbox._read_only()
    monkeypatch.setattr(sys, "prefix", str(home / "venv"))
    sandbox._read_only()


@needs_bubblewrap
def test_exit_code_of_the_worker_is_passed_on(hub: HostileHub, tmp_path: Path, capfd: Capture) -> None:
    hub.answers["/nodes"] = (403, {}, b'{"code": "node.banned", "message": "go away"}')
    words = ["join", hub.url, "--engine", "scripted", "--no-check", "--sandbox", "--folder", str(tmp_path / "node")]
    assert main(words) == 6
    assert "go away" in capfd.readouterr().err


DEAF_AT_FIRST = """
import json, os, signal, sys
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1) if not told else os._exit(7))
with os.fdopen(int(sys.argv[2]), "w") as info:
    json.dump({"child-pid": os.getpid()}, info)
while True:
    signal.pause()
"""


def test_worker_that_misses_the_first_signal_is_stopped_by_the_next(tmp_path: Path, monkeypatch: Patch) -> None:
    """The first process of a sandbox hears no signal before it listens."""
    program = tmp_path / "bwrap"
    program.write_text(f"#!{sys.executable}\n{DEAF_AT_FIRST}")
    program.chmod(0o755)
    monkeypatch.setattr(sandbox, "STOP_EVERY_S", 0.1)
    stop = StopToken()
    stop.set("SIGTERM")
    assert sandbox._watched([str(program)], stop, lambda: None) == 7


LOGGED_IN = """
import ctypes, sys
from shoal.run import sandbox
from shoal.runtime.stop import StopToken
keyctl, add_key, mark, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode(), sys.argv[4]
libc = ctypes.CDLL(None)
libc.syscall(keyctl, 1, b"login")
libc.syscall(add_key, b"user", mark, b"secret", 6, -3)
assert libc.syscall(keyctl, 10, -3, b"user", mark, 0) > 0, "no keyrings"
sys.exit(sandbox._watched([program], StopToken(), lambda: None))
"""
LOOKS_FOR_A_KEY = """
import ctypes, os, sys
os.close(int(sys.argv[2]))
sys.exit(9 if ctypes.CDLL(None).syscall(KEYCTL, 10, -3, b"user", b"MARK", 0) > 0 else 0)
"""


def test_worker_has_no_key_of_the_users_session(tmp_path: Path) -> None:
    """By the function that starts it, which makes a keyring of its own."""
    machine, mark = os.uname().machine, f"shoal-test-{os.urandom(8).hex()}"
    keyctl, add_key = sandbox.KEYCTL.get(machine), {"x86_64": 248, "aarch64": 217}.get(machine)
    program = tmp_path / "bwrap"
    program.write_text(f"#!{sys.executable}\n{LOOKS_FOR_A_KEY.replace('KEYCTL', str(keyctl)).replace('MARK', mark)}")
    program.chmod(0o755)
    ran = subprocess.run(
        [sys.executable, "-c", LOGGED_IN, str(keyctl), str(add_key), mark, str(program)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if "no keyrings" in ran.stderr or keyctl is None:
        pytest.skip("this kernel, or its container, has no keyrings")
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def forwarder(tmp_path_factory: TempPaths, monkeypatch: Patch) -> Iterator[Forwarder]:
    """With a client beside it that believes to be inside a sandbox."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as sockets, closing(Forwarder(Path(sockets))) as forwarder:
        monkeypatch.setenv(targets.SANDBOX, str(forwarder.folder))
        yield forwarder


def asked(host: str, port: int) -> bytes:
    with closing(connect(host, port, 5.0, None)) as connection:
        connection.sendall(b"GET /run HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def resolving(monkeypatch: Patch, address_of: Callable[[Any], Any]) -> None:
    """Names lead to these addresses."""
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **options: known(address_of(host), *rest, **options))


def port_of(hub: HostileHub) -> int:
    return int(hub.url.rpartition(":")[2])


def test_forwarder_reaches_what_is_allowed_while_it_is(forwarder, hub, other):
    reach = Reach(Nearness.LOOPBACK)
    forwarder.allow([hub.url], [other.url], reach)
    assert asked("127.0.0.1", port_of(hub)).startswith(b"HTTP/1.1 200")
    assert asked("127.0.0.1", port_of(other)).startswith(b"HTTP/1.1 200")
    forwarder.allow([hub.url], [], reach)
    assert asked("127.0.0.1", port_of(hub)).startswith(b"HTTP/1.1 200")
    with pytest.raises(TargetRefused):
        way_out("127.0.0.1", port_of(other))


@pytest.mark.parametrize("host", ["b\u00fccher.example", "xn--bcher-kva.example", "B\u00dcCHER.example"])
def test_name_in_another_script_has_one_way_out(forwarder, hub, monkeypatch, host):
    resolving(monkeypatch, lambda _: "127.0.0.1")
    url = hub.url.replace("127.0.0.1", host)
    forwarder.allow([url], [], Reach(Nearness.LOOPBACK))
    with closing(HttpClient()) as http:
        assert http.send(ClientRequest("GET", f"{url}/run"), Limit(10, StopToken())).status == 200


def test_targets_that_a_public_hub_may_not_name_are_unreachable(forwarder, hub, other):
    named = [other.url, "http://169.254.169.254/", "ftp://8.8.8.8", "http://a:b@8.8.8.8:80"]
    forwarder.allow([hub.url], named, Reach(Nearness.PUBLIC))
    assert [path.name for path in forwarder.folder.iterdir()] == [socket_name("127.0.0.1", port_of(hub))]


def test_name_keeps_its_first_address(forwarder: Forwarder, hub: HostileHub, monkeypatch: Patch) -> None:
    found = ["127.0.0.1", "127.0.0.9"]
    resolving(monkeypatch, lambda host: found.pop(0) if host == "hub.example" else host)
    monkeypatch.setattr(targets, "nearness", lambda text: Nearness.PUBLIC if text == "127.0.0.1" else nearness(text))
    url = hub.url.replace("127.0.0.1", "hub.example")
    for _ in range(2):
        forwarder.allow([], [url], Reach(Nearness.PUBLIC))
        assert asked("hub.example", port_of(hub)).startswith(b"HTTP/1.1 200")
    assert found == ["127.0.0.9"], "looked up once"


def test_named_hub_moved_to_loopback_has_no_way_out(forwarder: Forwarder, hub: HostileHub, monkeypatch: Patch) -> None:
    """It was met at a public address; by the time of the forwarder's lookup its name leads to this machine."""
    resolving(monkeypatch, lambda host: "127.0.0.1" if host == "hub.example" else host)
    url = hub.url.replace("127.0.0.1", "hub.example")
    forwarder.allow([url], [], Reach(Nearness.PUBLIC))
    with pytest.raises(TargetRefused):
        way_out("hub.example", port_of(hub))
    forwarder.allow([url, hub.url], [], Reach(Nearness.PUBLIC))
    assert asked("127.0.0.1", port_of(hub)).startswith(b"HTTP/1.1 200"), "what the user gave in numbers cannot move"


def test_long_and_many_names_do_not_exhaust_the_forwarder(forwarder: Forwarder, monkeypatch: Patch) -> None:
    resolving(monkeypatch, lambda _: "8.8.8.8")
    monkeypatch.setattr(sandbox, "MAX_ENDPOINTS", 3)
    long = f"{'a' * 60}.{'b' * 60}.{'c' * 60}.example"
    impossible = [f"http://{'a' * 64}.example", "http://a..example"]
    forwarder.allow([], [*impossible, f"http://{long}", *(f"http://h{n}.example" for n in range(9))], PUBLIC_ONLY)
    assert way_out(long, 80) is not None
    assert len(list(forwarder.folder.iterdir())) == 3


def test_socket_that_cannot_be_made_is_a_warning(hub: HostileHub, tmp_path: Path, caplog: Logs) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with closing(Forwarder(folder)) as forwarder:
        forwarder.allow([hub.url], [], PUBLIC_ONLY)
    assert "cannot be reached from the sandbox" in caplog.text


def test_large_bodies_pass_in_both_directions(forwarder: Forwarder) -> None:
    data = os.urandom(8 * 2**20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        forwarder.allow([f"http://127.0.0.1:{port}"], [], Reach(Nearness.LOOPBACK))

        def echo() -> None:
            with suppress(OSError), closing(server.accept()[0]) as connection:
                while piece := connection.recv(65536):
                    connection.sendall(piece)

        with ThreadPoolExecutor(2) as threads, closing(connect("127.0.0.1", port, 30.0, None)) as connection:
            threads.submit(echo)
            threads.submit(lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
            received = bytearray()
            while piece := connection.recv(65536):
                received += piece
    assert bytes(received) == data
