"""The only way out of `shoal join --sandbox`: one unix socket for each address of the run, and nothing else.

    sandbox (no network)                                 │ outside
    connect(host, port) ─► /run/shoal/HASH ──────────────┼─► Forwarder ─► that host and port, at the address that was
                            no socket there: refused     │                resolved and checked when the socket was made

The forwarder does not read what it carries: TLS and signatures inside prove who is at the other end.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer

from shoal.runtime import targets

log = logging.getLogger(__name__)

CONNECT_S = 10.0
IDLE_S = 600.0
MAX_CONNECTIONS = 256
MAX_ENDPOINTS = 256
PIECE = 256 * 1024

Endpoint = tuple[str, int]


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
        """From now on only these URLs: `given` by the user, `named` by a hub. An address that was allowed before
        keeps the numbers that it was resolved to."""
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
