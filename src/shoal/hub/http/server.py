"""The hub as a process: binds its port itself, serves until told to stop, answers what is in flight.

stop is set ─────────┐
the disk takes no    ├─► long polls end ─► requests in flight are answered ─► the process ends
more: `fail` ────────┘                     (with 503 and no promise)          in the second case with the reason
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI

from shoal.errors import ResourceError
from shoal.hub.http.app import create_app
from shoal.hub.http.connections import IDLE_S, MAX_HEAD_BYTES, Gatekeeper, Guard
from shoal.hub.http.middleware import Edge
from shoal.hub.limits import Addresses
from shoal.hub.service import Hub
from shoal.hub.settings import HubConfig, HubSettings
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken

GRACE_S = 4
STOP_CHECK_S = 0.2
TAKEN_S = 2.0
LOCK_WAIT_S = 15.0  # for a former hub of this folder that is just ending
BACKLOG = 512
FILES_KEPT = 128
"""Open files that connections leave for the database, submissions and the log."""
FILES_WANTED = 65_536

log = logging.getLogger("shoal.hub")


def run_hub(config: HubConfig, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Serve until `stop` is set. `on_ready` gets the URL once connections are answered.

    Long polls end at once when stopping; other requests have a few seconds to be answered. Raises `DiskError` if what
    is received can no longer be kept.
    """
    with _place(config, stop) as listener:
        app = create_app(config)
        server = _Server(
            _server_config(app, config.settings), ready=lambda: on_ready(url_of(listener, config.settings.host))
        )
        watcher = threading.Thread(target=_stop_when_told, args=(server, app.state.hub, stop), name="hub-stop")
        watcher.start()
        try:
            server.run(sockets=[listener])
        finally:
            server.finished.set()
            watcher.join()
            app.state.hub.close()
    if app.state.hub.context.failure is not None:
        raise app.state.hub.context.failure


@contextlib.contextmanager
def _place(config: HubConfig, stop: StopToken) -> Iterator[socket.socket]:
    """The folder for itself and the port. The folder first: its last hub may be just ending, and has the port until
    then. A folder that is not there yet is not made for a hub that finds its port taken. Hubs that share a database
    may be many, also in one folder."""
    with contextlib.ExitStack() as stack:
        is_new, is_alone = not config.folder.exists(), not config.settings.database
        if is_alone and not is_new:
            stack.enter_context(FolderLock(config.folder).acquire(stop, LOCK_WAIT_S))
        listener = stack.enter_context(contextlib.closing(bind(config.settings, stop)))
        if is_alone and is_new:
            stack.enter_context(FolderLock(config.folder).acquire(stop, LOCK_WAIT_S))
        yield listener


def _server_config(app: FastAPI, settings: HubSettings) -> uvicorn.Config:
    """What a client's address is, is said by the socket; by a header only where a proxy that is trusted has set it."""
    edge: Edge = app.state.edge
    edge.addresses = Addresses(settings.trusted_proxies)
    room = allow_files() - FILES_KEPT
    gatekeeper = Gatekeeper(edge.addresses, settings.connections_per_address, room, edge.metrics.refused)
    return uvicorn.Config(
        app,
        http=partial(Guard, gatekeeper),  # type: ignore[arg-type]  # called as the class is
        ws="none",
        log_level="critical",  # what strangers send is no reason to write a line; defects are logged by the app
        access_log=False,
        server_header=False,
        lifespan="on",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=IDLE_S,
        backlog=BACKLOG,
    )


def allow_files() -> int:
    """Let this process open as many files as the system lets it: a thousand workers need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("at most %d files can be open (%s): that bounds the connections", soft, error)
            return soft
    return max(wanted, soft)


def bind(settings: HubSettings, stop: StopToken, clock: Clock = SystemClock()) -> socket.socket:
    """A listening socket, or one sentence about why not.

    A taken port is tried for again for a moment: a client that knocks at a hub that is being restarted may hold the
    port for an instant, as the other end of its own connection.
    """
    end_s = clock.monotonic_s() + TAKEN_S
    while True:
        try:
            return _listen(settings)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            if not taken or clock.monotonic_s() >= end_s or stop.wait(STOP_CHECK_S):
                raise ResourceError(_why_not(settings, error)) from error


def _listen(settings: HubSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _why_not(settings: HubSettings, error: OSError) -> str:
    where = f"port {settings.port} on {settings.host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken: stop the program that uses it, or choose another port (hub.port; 0 takes any)"
    if error.errno == errno.EACCES:
        return f"{where} needs more rights: choose a port above 1023 (hub.port)"
    return f"cannot listen on {where}: {error.strerror or error}; check hub.host"


def url_of(listener: socket.socket, host: str) -> str:
    """Where this machine reaches the hub."""
    port = listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


class _Server(uvicorn.Server):
    """Leaves signals to the process (`runtime.stop`), and says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self.finished = threading.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def _stop_when_told(server: _Server, hub: Hub, stop: StopToken) -> None:
    while not server.finished.is_set():
        if stop.wait(STOP_CHECK_S) or hub.context.failure is not None:
            hub.context.changes.close()
            server.should_exit = True
            return
