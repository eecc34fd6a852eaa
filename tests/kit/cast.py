"""What the tests of shardcast share: content to publish, and servers on 127.0.0.1 that are honest or not."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kit import eventually as eventually
from shoal.protocol import PolicyManifest, SigningKey, TensorView
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Downloader, DownloadSettings, Origin, OriginSettings, Payload
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.limits import PoolSettings
from shoal.shardcast.tree import chunk_key, manifest_key

KEY = SigningKey.from_seed(b"\x01" * 32)
OTHER_KEY = SigningKey.from_seed(b"\x02" * 32)
RUN = "test-run"
CHUNK = 1000

Handler = Callable[[str, socket.socket], None]


def tensor(name: str, size: int, seed: int = 0) -> TensorView:
    data = np.random.default_rng([seed, size]).bytes(2 * size)
    return TensorView(name, "BF16", (size,), memoryview(data))


def content(seed: int = 0, sizes: Sequence[int] = (700, 1300, 31)) -> tuple[dict[str, bytes], list[TensorView]]:
    files = {"config.json": b'{"seed": %d}' % seed, "tokenizer.json": b"{}" * 40}
    return files, [tensor(f"layer.{index}.weight", size, seed) for index, size in enumerate(sizes)]


def make_origin(folder: Path, kept: int = 5, key: SigningKey = KEY) -> Origin:
    return Origin(folder, RUN, key, settings=OriginSettings(chunk_size_bytes=CHUNK, kept_versions=kept))


def publish(origin: Origin, version: int, seed: int | None = None, incarnation: int = 0) -> PolicyManifest:
    files, tensors = content(version if seed is None else seed)
    return origin.publish(version, Content.of(files, tensors), incarnation=incarnation)


def make_downloader(sources: Sequence[str], folder: Path, stop: StopToken | None = None, **pool: float) -> Downloader:
    """A downloader whose patience fits a test; `pool` overrides `PoolSettings`."""
    timeouts = Timeouts(connect_s=2, stall_s=pool.pop("stall_s", 5))
    settings = DownloadSettings(pool=PoolSettings(timeouts=timeouts, **pool))  # type: ignore[arg-type]
    return Downloader(sources, RUN, KEY.public_key, folder, stop or StopToken(), settings)


def assert_content(payload: Payload, files: Mapping[str, bytes], tensors: Sequence[TensorView]) -> None:
    assert payload.files == dict(files)
    assert [(t.name, t.dtype, t.shape, bytes(t.data)) for t in payload.tensors] == [
        (t.name, t.dtype, t.shape, bytes(t.data)) for t in tensors
    ]


class Running:
    """A `run_*` function in a thread, stopped at the end of the test; its error, if any, is raised there."""

    def __init__(self, run: Callable[[StopToken, Callable[[str], None]], None]) -> None:
        self.stop = StopToken()
        self._url: Future[str] = Future()
        self._done: Future[None] = Future()

        def target() -> None:
            try:
                run(self.stop, self._url.set_result)
                self._done.set_result(None)
            except Exception as error:  # noqa: BLE001  raised in the test by `url` or `end`
                self._done.set_exception(error)
                if not self._url.done():
                    self._url.set_exception(error)

        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self._url.result(20)

    def end(self, within_s: float = 6.0) -> float:
        """Stop it; how long that took."""
        started = time.monotonic()
        self.stop.set("test is over")
        self._done.result(within_s)
        return time.monotonic() - started


class ScriptedSource:
    """A server that answers each GET as `handler(target, socket)` pleases; every target asked for is in `seen`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.seen: list[str] = []
        self.closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        data = b""
        with suppress(OSError), connection:
            while not self.closed.is_set():
                while b"\r\n\r\n" not in data:
                    piece = connection.recv(4096)
                    if not piece:
                        return
                    data += piece
                head, data = data.split(b"\r\n\r\n", 1)
                target = head.split(b" ")[1].decode()
                self.seen.append(target)
                self._handler(target, connection)


def reply(connection: socket.socket, status: int, body: bytes, size: int | None = None) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if size is None else size}\r\n\r\n"
    connection.sendall(head.encode() + body)


def from_folder(folder: Path) -> Handler:
    """An honest static server."""

    def handle(target: str, connection: socket.socket) -> None:
        path = folder / target.partition("?")[0].lstrip("/")
        reply(connection, 200, path.read_bytes()) if path.is_file() else reply(connection, 404, b"")

    return handle


def instead(honest: Handler, replaced: Mapping[str, Handler]) -> Handler:
    """`honest`, except for targets that contain one of these words."""

    def handle(target: str, connection: socket.socket) -> None:
        chosen = next((other for word, other in replaced.items() if word in target), honest)
        chosen(target, connection)

    return handle


def chunk_paths(folder: Path, manifest: PolicyManifest) -> list[Path]:
    return [folder / chunk_key(chunk.hash) for chunk in manifest.chunks]


def manifest_path(folder: Path, manifest: PolicyManifest) -> Path:
    return folder / manifest_key((manifest.policy.incarnation, manifest.policy.version))


def ask(url: str, target: str) -> tuple[int, bytes]:
    """Status and body of one GET."""
    with closing(Connection(url, StopToken())) as connection:
        return connection.get(target, Deadline(25)).status, connection.read(1 << 24, Deadline(25))


def health(relay: Running) -> dict[str, Any]:
    return dict(json.loads(ask(relay.url, "/health")[1]))


def is_complete(relay: Running, label: str) -> bool:
    state = health(relay)
    return state["head"] == label and state["missing_versions"] == 0 and state["missing_chunks"] == 0


def dial(url: str, words: bytes = b"") -> socket.socket:
    """A connection to a server of the test's, with these words said."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
    connection.sendall(words)
    return connection
