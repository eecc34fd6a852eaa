"""The hub as a process: binds its port itself, serves until told to stop, answers what is in flight."""

import asyncio
import contextlib
import ctypes
import math
import socket
from collections.abc import Callable, Iterator

from shoal.hub.http.app import App, Pages
from shoal.hub.service import Hub
from shoal.hub.settings import HubConfig, HubSettings
from shoal.runtime import FolderLock, StopToken
from shoal.runtime.http import OpenConnections, bind
from shoal.runtime.limits import allow_files
from shoal.shardcast.server import public_url

GRACE_S = 4.0
LOCK_WAIT_S = 15.0  # for a former hub of this folder that is just ending
LEAST_CONNECTIONS, CONNECTIONS = 40, 2.5  # of one address: at least so many, and for each request a second
FILES_KEPT = 128  # open files that connections leave for the database, submissions and the log

M_ARENA_MAX, ARENAS = -8, 2  # the C library gives each thread a heap of its own, which keeps what that thread has freed


def run_hub(
    config: HubConfig, stop: StopToken, on_ready: Callable[[str], None], pages: Callable[[Hub], Pages] | None = None
) -> None:
    """Serve until `stop` is set; `on_ready` gets the URL once connections are answered. Raises `DiskError` if what is
    received can no longer be kept."""
    with contextlib.suppress(OSError, AttributeError):  # of glibc; others have no arenas
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)
    with _place(config, stop) as listener:
        app = App(config, pages=pages)
        try:
            asyncio.run(_serve(app, config.settings, listener, stop, on_ready))
        finally:
            app.hub.close()
    if app.hub.context.failure is not None:
        raise app.hub.context.failure


async def _serve(
    app: App, settings: HubSettings, listener: socket.socket, stop: StopToken, on_ready: Callable[[str], None]
) -> None:
    """A client's address is the socket's; a header counts only where a trusted proxy has set it."""
    addresses, rate = app.edge.addresses, settings.requests_per_address_s
    most = max(LEAST_CONNECTIONS, CONNECTIONS * rate) if rate else math.inf, allow_files() - FILES_KEPT
    client_of = lambda peer: "" if addresses.is_proxy(peer) else addresses.client(peer)  # noqa: E731
    connections = OpenConnections(app.answer, app.metrics.refused, client_of, *most)
    async with app.lifespan():
        hub = app.hub.context
        await connections.serve(
            listener, ended=lambda: hub.failure is not None or stop.is_set(),
            on_ready=lambda: on_ready(public_url(settings.host, listener.getsockname()[1])),
            on_end=hub.changes.close, drain_s=GRACE_S,
        )  # fmt: skip


@contextlib.contextmanager
def _place(config: HubConfig, stop: StopToken) -> Iterator[socket.socket]:
    """The folder's lock and the port. The lock first: the folder's last hub may be ending, and has the port until then.
    A new folder is made only once the port is ours. Hubs of one database may share a folder."""
    with contextlib.ExitStack() as stack:
        is_new, is_alone = not config.folder.exists(), not config.settings.database
        if is_alone and not is_new:
            stack.enter_context(FolderLock(config.folder).acquire(stop, LOCK_WAIT_S))
        listener = stack.enter_context(bind(config.settings.host, config.settings.port, "hub.", stop))
        if is_alone and is_new:
            stack.enter_context(FolderLock(config.folder).acquire(stop, LOCK_WAIT_S))
        yield listener
