"""The hub as a process: binds its port itself, serves until told to stop, answers what is in flight."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from shoal.errors import ResourceError
from shoal.hub.app import create_app
from shoal.hub.service import Hub
from shoal.hub.settings import HubConfig, HubSettings
from shoal.runtime.stop import StopToken

GRACE_S = 4
STOP_CHECK_S = 0.2
BACKLOG = 512


def run_hub(config: HubConfig, stop: StopToken, on_ready: Callable[[str], None]) -> None:
    """Serve until `stop` is set. `on_ready` gets the URL once connections are answered.

    Long polls end at once when stopping; other requests have a few seconds to be answered.
    """
    listener = bind(config.settings)
    with contextlib.closing(listener):
        app = create_app(config)
        server = _Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=75,
                backlog=BACKLOG,
            ),
            ready=lambda: on_ready(url_of(listener, config.settings.host)),
        )
        watcher = threading.Thread(target=_stop_when_told, args=(server, app.state.hub, stop), name="hub-stop")
        watcher.start()
        try:
            server.run(sockets=[listener])
        finally:
            server.finished.set()
            watcher.join()
            app.state.hub.close()


def bind(settings: HubSettings) -> socket.socket:
    """A listening socket, or one sentence about why not."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"port {settings.port} on {settings.host}"
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(
                f"{where} is taken: stop the program that uses it, or choose another port (hub.port; 0 takes any)"
            ) from error
        if error.errno == errno.EACCES:
            raise ResourceError(f"{where} needs more rights: choose a port above 1023 (hub.port)") from error
        raise ResourceError(f"cannot listen on {where}: {error.strerror or error}; check hub.host") from error
    return listener


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
        if stop.wait(STOP_CHECK_S):
            hub.context.changes.close()
            server.should_exit = True
            return
