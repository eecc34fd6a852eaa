"""`shoal join --sandbox`: the worker in a bubblewrap sandbox without a network; this process is its only way out.

    this process                                            sandbox
    meets the hub, verifies the run, makes the vouch        no network, no home, no other processes, read-only system
    Forwarder: hubs and sources of the run only ◄─ sockets ─ the same worker; it may write to its own folder and /tmp
    passes on SIGTERM and the exit code                     GPU devices, if there are any

    connect(host, port) ─► /run/shoal/HASH ─► Forwarder ─► that host and port, at the address that was resolved and
                           no socket there: refused        checked when the socket was made

The forwarder does not read what it carries: TLS and signatures inside prove who is at the other end.
If such a sandbox cannot be made, the worker does not start: there is never a weaker one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from typing import TYPE_CHECKING

import shoal
from shoal.client import HubClient
from shoal.environments.sandbox.process import advice
from shoal.environments.sandbox.view import INSTALL, ISOLATED, mounted
from shoal.errors import ResourceError, ShoalError
from shoal.runtime import StopToken, printable, targets, write_atomically
from shoal.runtime.targets import SANDBOX

if TYPE_CHECKING:
    from shoal.run.join import JoinRequest

log = logging.getLogger(__name__)
SOCKETS = "/run/shoal"
SYSTEM = "/usr /bin /sbin /lib /lib32 /lib64 /nix/store /opt/rocm /sys/devices /sys/bus/pci".split()  # noqa: SIM905
SETTINGS = (  # of /etc; /etc/ssl has private keys, too
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs", "ssl/openssl.cnf",
    "pki/tls/certs", "pki/ca-trust", "ca-certificates",
)  # fmt: skip
GPUS = ("nvidia*", "dri", "kfd", "dxg")
KEPT = ("PATH", "LANG", "LC_ALL", "TERM", "TZ", "LD_LIBRARY_PATH", "SHOAL_DEBUG", "SSL_CERT_FILE")
KEPT_FAMILIES = ("CUDA_", "NVIDIA_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "ROCM_", "HIP_")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
# Parts of /proc that root could change without a capability. CUDA writes to files of its threads in the rest.
KERNEL = "acpi asound bus driver fs irq mtrr pressure scsi sys sysrq-trigger tty".split()  # noqa: SIM905
TMP_BYTES = 2 * 2**30  # of /tmp and /dev/shm, which are memory
_LIBC = ctypes.CDLL(None)  # loaded before a fork
KEYCTL = {"x86_64": 250, "aarch64": 219}
PROBE_S = LOOK_EVERY_S = 60.0
TICK_S, STOP_EVERY_S = 0.2, 5.0
CONNECT_S = 10.0
IDLE_S = 600.0
MAX_CONNECTIONS = 256
MAX_ENDPOINTS = 256
PIECE = 256 * 1024

Endpoint = tuple[str, int]


def run_in_sandbox(request: JoinRequest, urls: Sequence[str], stop: StopToken, folder: Path, root: str) -> int:
    """The exit code of the worker inside. The hub was met already: `root` is the run's root fingerprint."""
    from shoal.run.owner import vouch_of
    from shoal.worker.settings import identity

    # An owner's key stays outside; only its vouch for this machine goes in.
    vouch, file = vouch_of(identity(folder), request.owner, request.vouch), folder / "vouch.json"
    if vouch is not None:
        write_atomically(file, vouch.model_dump_json().encode(), mode=0o600)
    inside, vouched = tuple(f"{url}/#{root}" for url in urls), None if vouch is None else file
    inner = replace(request, urls=inside, folder=folder, owner=None, vouch=vouched, check=False, sandbox=False)
    bubblewrap = shutil.which("bwrap") if sys.platform.startswith("linux") else None
    if bubblewrap is None:
        raise ResourceError(f"there is no sandbox here: bwrap is not on the PATH of a Linux machine; {INSTALL}")
    with (
        closing(HubClient.of_a_person(urls, 10.0, root, stop)) as client,
        tempfile.TemporaryDirectory(prefix="shoal-") as sockets,
        closing(Forwarder(Path(sockets))) as forwarder,
    ):
        _open_ways(forwarder, urls, client)
        around = [bubblewrap, *_options(folder, forwarder.folder)]
        _probe(around)
        return _watched([*around, "--", *inner.command], stop, lambda: _open_ways(forwarder, urls, client))


def _open_ways(forwarder: Forwarder, urls: Sequence[str], client: HubClient) -> None:
    """To the hubs that the user gave, and to what the run names now. If the hub does not answer, nothing changes."""
    try:
        trusted = client.refreshed_run()
    except ShoalError as error:
        log.debug("the hub was not asked for further hubs and sources: %s", error)
        return
    info = trusted.info
    forwarder.allow(urls, (*info.hubs, *info.sources, *info.last_resort), trusted.reach)


def _watched(command: Sequence[str], stop: StopToken, look: Callable[[], None]) -> int:
    """A stop is passed on to the worker; a second one ends this process, and with it the sandbox."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as info:
        process = subprocess.Popen(
            [command[0], "--info-fd", str(writing), *command[1:]], env=_environment(), pass_fds=[writing],
            stdin=subprocess.DEVNULL, preexec_fn=_own_keyring,
            start_new_session=True,  # Ctrl-C reaches the worker once: passed on below
        )  # fmt: skip
        os.close(writing)
        child = json.loads(info.read() or b"{}").get("child-pid")
    looked_s = time.monotonic()
    while (code := process.poll()) is None and not stop.wait(TICK_S):
        if time.monotonic() - looked_s >= LOOK_EVERY_S:
            looked_s = time.monotonic()
            look()
    while code is None:
        with contextlib.suppress(ProcessLookupError, TypeError):  # it has ended, or never began
            os.kill(child, signal.SIGTERM)  # repeated, because at first pid 1 of the sandbox ignores signals
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(STOP_EVERY_S)
    return code if code >= 0 else 128 - code


def _probe(around: Sequence[str]) -> None:
    """Make the sandbox once around an idle interpreter: what is not permitted fails here."""
    try:
        ran = subprocess.run(
            [*around, "--", sys.executable, "-c", "import shoal"], env=_environment(), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=PROBE_S, check=False, preexec_fn=_own_keyring,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"there is no sandbox here: {error}") from error
    if ran.returncode:
        message = printable(ran.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        todo = "Install bubblewrap 0.8 or newer" if "Unknown option" in message else advice(message)
        raise ResourceError(f"the sandbox cannot be made here: {message or 'bwrap failed'}. {todo}")


def _options(folder: Path, sockets: Path) -> list[str]:
    """Only what is named here is in the sandbox."""
    words = [*ISOLATED, "--unshare-user", "--disable-userns", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    kernel = [f"/proc/{name}" for name in KERNEL]
    words += ["--proc", "/proc", *(word for path in kernel for word in ("--ro-bind-try", path, path)), "--dev", "/dev"]
    words += ["--size", str(TMP_BYTES), "--tmpfs", "/dev/shm"]
    for path in _read_only():
        words += mounted(path)
    for device in (found for pattern in GPUS for found in sorted(Path("/dev").glob(pattern))):
        words += ["--dev-bind-try", str(device), str(device)]
    words += ["--ro-bind", str(sockets), SOCKETS, "--bind", str(folder), str(folder)]
    return [*words, "--remount-ro", "/", "--chdir", str(folder)]


def _read_only() -> list[Path]:
    """The system, the interpreter with its packages, and shoal. Nothing that would show the user's home folder."""
    etc = [Path("/etc") / name for name in SETTINGS]
    own = [Path(sys.prefix), Path(sys.base_prefix), Path(shoal.__file__).parent]
    own += [Path(path) for path in (site.getusersitepackages(), os.environ.get("SSL_CERT_FILE", "")) if path]
    found: list[Path] = [path for path in (*map(Path, SYSTEM), *etc) if path.exists()]
    home = Path(os.path.realpath(Path.home()))
    for path in (each for given in own for each in dict.fromkeys((given.absolute(), Path(os.path.realpath(given))))):
        if path.exists() and not any(path.is_relative_to(other) for other in found if not other.is_symlink()):
            if home.is_relative_to(os.path.realpath(path)):
                why = f"there is no sandbox here: it would have to show {path}, and with it your home folder"
                raise ResourceError(f"{why}; install shoal in a virtual environment of its own")
            found.append(path)
    return found


def _own_keyring() -> None:
    """In the child: an empty kernel session keyring instead of the user's."""
    if (number := KEYCTL.get(os.uname().machine)) is not None:
        _LIBC.syscall(number, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING


def _environment() -> dict[str, str]:
    kept = [name for name in os.environ if name in KEPT or name.startswith(KEPT_FAMILIES)]
    found = {name: os.environ[name] for name in kept if not any(word in name for word in SECRETS)}
    return {**found, "HOME": "/tmp", "LOGNAME": "shoal", SANDBOX: SOCKETS}


class _Connection(BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        endpoint, proxy = self.server.endpoint, self.server.proxy
        try:
            if proxy is not None:
                reached = proxy.connect(CONNECT_S, tunnel_to=targets.netloc(*endpoint))
            else:
                reached = targets.first_answer(self.server.addresses, endpoint[1], CONNECT_S)
            with contextlib.closing(reached) as outside:
                back = threading.Thread(target=_pump, args=(outside, self.request), daemon=True)
                back.start()
                _pump(self.request, outside)
                back.join()
        except OSError as error:
            log.debug("%s:%d cannot be reached: %s", *endpoint, error)
        finally:
            self.server.slots.release()


class _Listener(ThreadingUnixStreamServer):
    """The socket of one address. Host names are resolved once, here; a proxy resolves them itself."""

    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, folder: Path, url: str, reach: targets.Reach | None, slots: threading.Semaphore) -> None:
        self.endpoint, self.proxy, self.slots = targets.endpoint_of(url), targets.proxy_of(url), slots
        self.addresses = targets.addresses(*self.endpoint, reach) if self.proxy is None else []
        if self.proxy is not None:
            targets.check_behind_proxy(*self.endpoint, reach)
        self._path = folder / targets.socket_name(*self.endpoint)
        super().__init__(str(self._path), _Connection)
        threading.Thread(target=self.serve_forever, name="forwarder", daemon=True).start()

    def verify_request(self, *_request: object) -> bool:
        return self.slots.acquire(blocking=False)  # no free slot: the connection is closed

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._path.unlink(missing_ok=True)


class Forwarder:
    """Sockets in `folder`, for the addresses given to `allow`. To be closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listeners: dict[Endpoint, _Listener] = {}
        self._slots = threading.Semaphore(MAX_CONNECTIONS)

    def allow(self, given: Iterable[str], named: Iterable[str], reach: targets.Reach) -> None:
        """From now on only these URLs: `given` by the user, `named` by a hub. An old address is not resolved again."""
        wanted: dict[Endpoint, tuple[str, targets.Reach | None]] = {}
        for url in given:  # a host name may resolve to another address by now; a number cannot
            endpoint = targets.endpoint_of(url)
            wanted[endpoint] = (url, reach if targets.as_number(endpoint[0]) is None else None)
        for url in named:
            with contextlib.suppress(targets.TargetRefused):
                targets.check_url(url)
                wanted.setdefault(targets.endpoint_of(url), (url, reach))
        if len(wanted) > MAX_ENDPOINTS:
            log.warning("the run has %d addresses; the sandbox reaches the first %d", len(wanted), MAX_ENDPOINTS)
            wanted = dict(islice(wanted.items(), MAX_ENDPOINTS))
        for endpoint in [each for each in self._listeners if each not in wanted]:
            self._listeners.pop(endpoint).end()
        for endpoint, (url, checked) in wanted.items():
            if endpoint not in self._listeners:
                try:
                    self._listeners[endpoint] = _Listener(self.folder, url, checked, self._slots)
                except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be resolved
                    log.warning("%s cannot be reached from the sandbox: %s", url, error)

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.end()
        self._listeners.clear()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until one side ends, then tell the other side."""
    source.settimeout(IDLE_S)
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        source.shutdown(socket.SHUT_RD)
