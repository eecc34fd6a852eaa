"""The hub as a process: binds its port itself, serves until told to stop, answers what is in flight.

    accepted ─► of its address too many, or of all: 429 or 503, closed
       │
       ▼
    head ──(10 s, 16 KiB)──► request ──► answer ──(read at a floor)──► idle ──(75 s)──► closed

A slow sender of heads and a reader that does not read cost one connection each, for a bounded time and number of bytes.
(Slow bodies are `auth`'s, which knows the sender.) Nothing is read on before a request is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import resource
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shoal.errors import ResourceError
from shoal.hub.http.app import create_app
from shoal.hub.http.middleware import CONNECTION, Edge
from shoal.hub.limits import Addresses
from shoal.hub.settings import HubConfig, HubSettings
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.lock import FolderLock
from shoal.runtime.stop import StopToken
from shoal.shardcast.server import local_url

GRACE_S, STOP_CHECK_S, TAKEN_S = 4, 0.2, 2.0
LOCK_WAIT_S = 15.0  # for a former hub of this folder that is just ending
BACKLOG = 512
FILES_KEPT = 128  # open files that connections leave for the database, submissions and the log
FILES_WANTED = 65_536
HEAD_S, MAX_HEAD_BYTES, IDLE_S = 10.0, 16 * 1024, 75
READ_CHECK_S, READ_FLOOR_BYTES_S = 20.0, 4 * 1024
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time


def run_hub(config: HubConfig, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Serve until `stop` is set; `on_ready` gets the URL once connections are answered. Raises `DiskError` if what is
    received can no longer be kept."""
    with _place(config, stop) as listener:
        app = create_app(config)
        hub, server = app.state.hub, uvicorn.Server(_server_config(app, config.settings))
        # A thread of its own: in the main one, uvicorn would take the signals, which are `runtime.stop`'s.
        serving = threading.Thread(target=server.run, args=([listener],), name="hub")
        serving.start()
        try:
            while serving.is_alive() and not server.started:
                serving.join(0.01)
            if server.started:
                on_ready(local_url(config.settings.host, listener.getsockname()[1]))
            while serving.is_alive() and hub.context.failure is None and not stop.wait(STOP_CHECK_S):
                pass
        finally:
            hub.context.changes.close()
            server.should_exit = True
            serving.join()
            hub.close()
    if hub.context.failure is not None:
        raise hub.context.failure


@contextlib.contextmanager
def _place(config: HubConfig, stop: StopToken) -> Iterator[socket.socket]:
    """The folder's lock and the port. The lock first: the folder's last hub may be ending, and has the port until then.
    A new folder is made only once the port is ours. Hubs of one database may share a folder."""
    with contextlib.ExitStack() as stack:
        is_new, is_alone = not config.folder.exists(), not config.settings.database
        if is_alone and not is_new:
            stack.enter_context(FolderLock(config.folder).acquire(stop, LOCK_WAIT_S))
        listener = stack.enter_context(contextlib.closing(bind(config.settings, stop)))
        if is_alone and is_new:
            stack.enter_context(FolderLock(config.folder).acquire(stop, LOCK_WAIT_S))
        yield listener


def _server_config(app: Starlette, settings: HubSettings) -> uvicorn.Config:
    """A client's address is the socket's; a header counts only where a trusted proxy has set it."""
    edge: Edge = app.state.edge
    edge.addresses = Addresses(settings.trusted_proxies)
    most = allow_files() - FILES_KEPT
    http: Any = partial(HubConnection, edge, settings.connections_per_address or math.inf, most)
    return uvicorn.Config(
        app, http=http, ws="none", lifespan="on", access_log=False, server_header=False,
        log_level="critical",  # what strangers send is no reason to write a line; defects are logged by the app
        proxy_headers=bool(settings.trusted_proxies), forwarded_allow_ips=list(settings.trusted_proxies),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES, timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=IDLE_S,
        backlog=BACKLOG,
    )  # fmt: skip


class HubConnection(asyncio.Protocol):
    """One connection, counted and timed, before uvicorn's own protocol. A trusted proxy and this machine itself have no
    limit. The middleware finds it in the request's state, and says when a request begins and ends."""

    def __init__(
        self, edge: Edge, per_address: float, in_all: int, config: uvicorn.Config, server_state: ServerState,
        app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        self._edge, self._per_address, self._in_all = edge, per_address, in_all
        self._open = server_state.connections
        self._http = H11Protocol(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self._client: str | None = None  # whom it is counted under; None: not admitted
        self._requests = 0  # that have begun and not ended
        self._timers: dict[str, asyncio.TimerHandle] = {}  # "head", "read"
        self.is_gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer, addresses = transport.get_extra_info("peername"), self._edge.addresses or Addresses()
        address = peer[0] if isinstance(peer, tuple) else ""
        client = "" if addresses.is_proxy(address) else addresses.client(address)
        if len(self._open) >= self._in_all:
            self._refuse("503 Service Unavailable", "hub.busy", "the hub has as many connections as it can hold")
        elif client and self._edge.connections[client] >= self._per_address:
            sentence = "your address has as many connections as it may have: close some"
            self._refuse("429 Too Many Requests", "rate.connections", sentence)
        else:
            self._client = client
            self._edge.connections[client] += 1
            self._http.connection_made(self._transport)
            self._start("head", HEAD_S, self._cut)

    def _refuse(self, status: str, code: str, sentence: str) -> None:
        self._edge.metrics.refused(code)
        body = f'{{"code":"{code}","message":"{sentence}"}}'
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._transport.write(f"{head}retry-after: 2\r\nconnection: close\r\n\r\n{body}".encode())
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        for name in list(self._timers):
            self._stop(name)
        if self._client is not None:
            self._edge.connections -= Counter([self._client])  # nothing is kept of whoever has none
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._client is None or self._transport.is_closing():
            return
        if not self._requests and "head" not in self._timers:
            self._start("head", HEAD_S, self._cut)
        try:
            self._http.data_received(data)
        except h11.LocalProtocolError:  # bytes that are no request, in the middle of an answer
            self._cut()

    def began(self) -> None:
        self._stop("head")
        self._requests += 1

    def ended(self) -> None:
        self._requests -= 1
        if not self._transport.is_closing() and self._transport.get_write_buffer_size() > 0:
            self._watch_reader()  # should nobody read it, closing would wait for that

    def pause_writing(self) -> None:
        self._http.pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def _watch_reader(self) -> None:
        self._start("read", READ_CHECK_S, partial(self._check_reader, self._transport.get_write_buffer_size()))

    def _check_reader(self, unread_bytes: int) -> None:
        left_bytes = self._transport.get_write_buffer_size()
        if left_bytes and unread_bytes - left_bytes < READ_FLOOR_BYTES_S * READ_CHECK_S:
            self._cut()
        elif left_bytes:
            self._watch_reader()

    def _cut(self) -> None:
        """End it now. Without lingering: the system would keep what nobody reads for minutes, megabytes of it."""
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self._transport.abort()

    def _start(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = asyncio.get_running_loop().call_later(after_s, action)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def allow_files() -> int:
    """A thousand workers need more open files than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if 0 <= soft < wanted:  # -1 is no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted if soft < 0 else max(wanted, soft)


def bind(settings: HubSettings, stop: StopToken, clock: Clock = SystemClock()) -> socket.socket:
    """A listening socket. A taken port is tried again for a moment: while a hub restarts, a client that connects to it
    may hold the port for an instant, as the other end of its own connection."""
    end_s, where = clock.monotonic_s() + TAKEN_S, f"port {settings.port} on {settings.host}"
    while True:
        # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, every answer waits 40 ms.
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                if clock.monotonic_s() < end_s and not stop.wait(STOP_CHECK_S):
                    continue
                said = f"{where} is taken: stop the program that uses it, or choose another (hub.port; 0 takes any)"
            elif error.errno == errno.EACCES:
                said = f"{where} needs more rights: choose a port above 1023 (hub.port)"
            else:
                said = f"cannot listen on {where}: {error.strerror or error}; check hub.host"
            raise ResourceError(said) from error
