"""The only way out of `shoal join --sandbox`: one unix socket for each address that the run has, and nothing else.

    sandbox (no network)                                 │ outside
    connect(host, port) ─► /run/shoal/HASH ──────────────┼─► Forwarder ─► that host and port, at the address that was
                            none there: refused          │                looked up and checked when the socket was made

The forwarder reads nothing of what it carries: who is at the other end is proven inside, by TLS and signatures.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from shoal.runtime import targets

log = logging.getLogger(__name__)

CONNECT_S = 10.0
IDLE_S = 600.0
MAX_CONNECTIONS = 256
MAX_ENDPOINTS = 256
PIECE = 256 * 1024

Endpoint = tuple[str, int]


class Forwarder:
    """Sockets in `folder`; `allow` says which. To be closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listeners: dict[Endpoint, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._wakened = socket.socketpair()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._lock, self._places = threading.Lock(), threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="forwarder", daemon=True)
        self._thread.start()

    def allow(self, given: Iterable[str], named: Iterable[str], reach: targets.Reach) -> None:
        """From now on these URLs, and no others: `given` by the user, `named` by a hub. An address that was allowed
        before keeps the numbers that it was looked up with."""
        wanted: dict[Endpoint, tuple[str, targets.Reach | None]] = {}
        for url in given:  # a name may lead elsewhere by now than to the hub that was met; numbers cannot
            endpoint = targets.endpoint_of(url)
            wanted[endpoint] = (url, reach if targets.as_number(endpoint[0]) is None else None)
        for url in named:
            with contextlib.suppress(targets.TargetRefused):
                targets.check_url(url)
                wanted.setdefault(targets.endpoint_of(url), (url, reach))
        if len(wanted) > MAX_ENDPOINTS:
            log.warning("the run has %d addresses; the sandbox reaches the first %d", len(wanted), MAX_ENDPOINTS)
            wanted = dict(islice(wanted.items(), MAX_ENDPOINTS))
        with self._lock:
            for endpoint in [each for each in self._listeners if each not in wanted]:
                self._stop(endpoint)
            for endpoint, (url, checked) in wanted.items():
                if endpoint not in self._listeners:
                    self._start(endpoint, url, checked)

    def close(self) -> None:
        self._closed = True
        self._wake.send(b"x")
        self._thread.join()
        with self._lock:
            for endpoint in list(self._listeners):
                self._stop(endpoint)
        self._selector.close()
        for each in (self._wake, self._wakened):
            each.close()

    def _start(self, endpoint: Endpoint, url: str, reach: targets.Reach | None) -> None:
        proxy, listener = targets.proxy_of(url), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:  # addresses are looked up once; a proxy looks them up itself
            found = targets.addresses(*endpoint, reach) if proxy is None else []
            if proxy is not None:
                targets.check_behind_proxy(*endpoint, reach)
            listener.bind(str(self.folder / targets.socket_name(*endpoint)))
            listener.listen(64)
            listener.setblocking(False)
        except (OSError, UnicodeError) as error:  # UnicodeError: of a name that no lookup takes
            listener.close()
            log.warning("%s cannot be reached from the sandbox: %s", url, error)
            return
        self._listeners[endpoint] = listener
        self._selector.register(listener, selectors.EVENT_READ, (endpoint, proxy, found))
        self._wake.send(b"x")

    def _stop(self, endpoint: Endpoint) -> None:
        listener = self._listeners.pop(endpoint)
        self._selector.unregister(listener)
        listener.close()
        (self.folder / targets.socket_name(*endpoint)).unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is self._wakened:
                    self._wakened.recv(64)
                    continue
                with contextlib.suppress(OSError):  # closed meanwhile
                    inside, _ = key.fileobj.accept()  # type: ignore[union-attr]  # all others are listeners
                    if self._places.acquire(blocking=False):
                        threading.Thread(target=self._carry, args=(inside, *key.data), daemon=True).start()
                    else:
                        inside.close()

    def _carry(self, inside: socket.socket, endpoint: Endpoint, proxy: targets.Proxy | None, found: list[str]) -> None:
        def reached() -> socket.socket:
            if proxy is not None:
                return proxy.connect(CONNECT_S, tunnel_to=targets.netloc(*endpoint))
            return targets.first_answer(found, endpoint[1], CONNECT_S)

        try:
            with contextlib.closing(inside), contextlib.closing(reached()) as outside:
                back = threading.Thread(target=_pump, args=(outside, inside), daemon=True)
                back.start()
                _pump(inside, outside)
                back.join()
        except OSError as error:
            log.debug("%s:%d cannot be reached: %s", *endpoint, error)
        finally:
            self._places.release()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until one side has ended; then the other side is told."""
    source.settimeout(IDLE_S)
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        source.shutdown(socket.SHUT_RD)
