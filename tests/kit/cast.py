"""A broadcast to be tested: content, servers on 127.0.0.1 that are honest or not, and a lab that starts and ends them.

Lab ─┬─ publish          a real origin writes a real tree
     ├─ honest, relay    that tree, served as in production
     ├─ source(handler)  a server that answers each request as the test pleases
     └─ client           a real downloader with the patience of a test
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import shardcast
from shoal.protocol import PolicyManifest, PolicyRef, SigningKey, TensorView
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Connection, Deadline, PoolSettings, Timeouts
from shoal.shardcast.tree import HEAD, chunk_key, manifest_key

KEY = SigningKey.from_seed(b"\x01" * 32)
OTHER_KEY = SigningKey.from_seed(b"\x02" * 32)
RUN = "test-run"
CHUNK = 1000
WITHIN_S = 60.0  # a deadline for what comes at once, on a busy machine too
DEAD = "http://127.0.0.1:9"  # the discard port: nobody listens there

Handler = Callable[[str, socket.socket], None]
Run = Callable[[StopToken, Callable[[str], None]], None]
Files = dict[str, bytes]


def tensor(name: str, size: int, seed: int = 0) -> TensorView:
    data = np.random.default_rng([seed, size]).bytes(2 * size)
    return TensorView(name, "BF16", (size,), memoryview(data))


def content(seed: int = 0, sizes: Sequence[int] = (700, 1300, 31)) -> tuple[Files, list[TensorView]]:
    files = {"config.json": b'{"seed": %d}' % seed, "tokenizer.json": b"{}" * 40}
    return files, [tensor(f"layer.{index}.weight", size, seed) for index, size in enumerate(sizes)]


class Running:
    """A `run_*` function in a thread, stopped at the end of the test; its error, if any, is raised there."""

    def __init__(self, run: Run) -> None:
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

        threading.Thread(target=target, daemon=True).start()

    @property
    def url(self) -> str:
        return self._url.result(WITHIN_S)

    def end(self, within_s: float = WITHIN_S) -> float:
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

    def asked(self, word: str) -> list[str]:
        return [target for target in self.seen if word in target]

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


def reply(to: socket.socket, status: int, body: bytes = b"", size: int | None = None) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if size is None else size}\r\n\r\n"
    to.sendall(head.encode() + body)


def says(body: bytes, status: int = 200, size: int | None = None) -> Handler:
    return lambda _target, to: reply(to, status, body, size)


def from_folder(folder: Path) -> Handler:
    """An honest static server."""

    def handle(target: str, to: socket.socket) -> None:
        path = folder / target.partition("?")[0].lstrip("/")
        reply(to, 200, path.read_bytes()) if path.is_file() else reply(to, 404)

    return handle


def instead(honest: Handler, replaced: Mapping[str, Handler]) -> Handler:
    """`honest`, except for targets that contain one of these words."""

    def handle(target: str, to: socket.socket) -> None:
        chosen = next((other for word, other in replaced.items() if word in target), honest)
        chosen(target, to)

    return handle


class Lab:
    """One tree with one origin, and all that serve it, mirror it or lie about it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.www = folder, folder / "www"
        self._running: list[Running] = []
        self._sources: list[ScriptedSource] = []
        self._published: dict[PolicyRef, tuple[Files, Sequence[TensorView]]] = {}

    def origin(self, key: SigningKey = KEY, **settings: Any) -> shardcast.Origin:
        chosen = shardcast.OriginSettings.model_validate({"chunk_size_bytes": CHUNK, **settings})
        return shardcast.Origin(self.www, RUN, key, settings=chosen)

    def publish(
        self, version: int, seed: int | None = None, incarnation: int = 0, files: Files | None = None,
        tensors: Sequence[TensorView] | None = None, **settings: Any,
    ) -> PolicyManifest:  # fmt: skip
        """Publish `content(seed)`, by default that of the version, or these files and tensors."""
        made = content(version if seed is None else seed)
        made = made if files is None and tensors is None else (files or {}, list(tensors or ()))
        manifest = self.origin(**settings).publish(version, shardcast.Content.of(*made), incarnation=incarnation)
        self._published[manifest.policy] = made
        return manifest

    def honest(self) -> Running:
        return self.run(partial(shardcast.run_origin, self.www, "127.0.0.1", 0))

    def relay(self, name: str, *upstreams: str, peers: Sequence[str] = (), port: int = 0, **settings: Any) -> Running:
        where = (self.folder / name, upstreams, RUN, KEY.public_key, "127.0.0.1", port, tuple(peers))
        return self.run(partial(shardcast.run_relay, shardcast.RelayConfig(*where, poll_s=0.05, **settings)))

    def run(self, run: Run) -> Running:
        self._running.append(Running(run))
        return self._running[-1]

    def stop(self, running: Running) -> None:
        self._running.remove(running)
        running.end()

    def source(self, handler: Handler | None = None) -> ScriptedSource:
        """By default an honest static server of the tree."""
        self._sources.append(ScriptedSource(handler or from_folder(self.www)))
        return self._sources[-1]

    def liar(self, lies: Mapping[str, Handler]) -> ScriptedSource:
        """Honest about the tree, but for targets that contain one of these words."""
        return self.source(instead(from_folder(self.www), lies))

    def client(
        self, *sources: str, name: str = "cache", stop: StopToken | None = None, download: Mapping[str, Any] = {},
        **pool: float,
    ) -> shardcast.Downloader:  # fmt: skip
        """A downloader whose patience fits a test; `pool` overrides `PoolSettings`, `download` the others."""
        timeouts = Timeouts(connect_s=2, stall_s=pool.pop("stall_s", 5))
        settings = {"pool": PoolSettings(timeouts=timeouts, **pool), **download}  # type: ignore[arg-type]
        folder, stop = self.folder / name, stop or StopToken()
        return shardcast.Downloader(sources, RUN, KEY.public_key, folder, stop, shardcast.DownloadSettings(**settings))

    def fetch(self, manifest: PolicyManifest, *by: str | shardcast.Downloader, **options: Any) -> shardcast.Payload:
        """Fetch it, from these URLs or by a client that is there; it must be what was published."""
        client = by[0] if by and isinstance(by[0], shardcast.Downloader) else self.client(*map(str, by), **options)
        payload = client.fetch(manifest.policy, WITHIN_S)
        files, tensors = self._published[manifest.policy]
        assert payload.manifest.policy == manifest.policy
        assert_content(payload, files, tensors)
        return payload

    def close(self) -> None:
        for running in reversed(self._running):
            running.end()
        for source in self._sources:
            source.close()


@contextmanager
def lab_in(folder: Path) -> Iterator[Lab]:
    lab = Lab(folder)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as lab:
        yield lab


def assert_content(payload: shardcast.Payload, files: Mapping[str, bytes], tensors: Sequence[TensorView]) -> None:
    assert payload.files == dict(files)
    assert [(t.name, t.dtype, t.shape, bytes(t.data)) for t in payload.tensors] == [
        (t.name, t.dtype, t.shape, bytes(t.data)) for t in tensors
    ]


def chunk_paths(folder: Path, manifest: PolicyManifest) -> list[Path]:
    return [folder / chunk_key(chunk.hash) for chunk in manifest.chunks]


def chunks_in(folder: Path) -> set[str]:
    """The names of the chunks that lie in a tree."""
    return {path.name for path in (folder / "chunks").glob("??/*")}


def manifest_path(folder: Path, manifest: PolicyManifest) -> Path:
    return folder / manifest_key((manifest.policy.incarnation, manifest.policy.version))


def flip(path: Path, at: int | None = None) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def ask(url: str, target: str) -> tuple[int, bytes]:
    """Status and body of one GET."""
    with closing(Connection(url, StopToken())) as connection:
        return connection.get(target, Deadline(25)).status, connection.read(1 << 24, Deadline(25))


def asking(url: str, target: str) -> Future[tuple[int, bytes]]:
    """The same in a thread, for a request that is held."""
    answer: Future[tuple[int, bytes]] = Future()
    threading.Thread(target=lambda: answer.set_result(ask(url, target)), daemon=True).start()
    return answer


def health(running: Running) -> dict[str, Any]:
    return dict(json.loads(ask(running.url, "/health")[1]))


def head_version(running: Running) -> str:
    """The label of the version that a server's head names; empty if it has none."""
    status, body = ask(running.url, f"/{HEAD}")
    policy = json.loads(body)["document"]["policy"] if status == 200 else None
    return "" if policy is None else f"{policy['incarnation']}.{policy['version']}"


def is_complete(relay: Running, label: str) -> bool:
    state = health(relay)
    return state["head"] == label and state["missing_versions"] == 0 and state["missing_chunks"] == 0


def dial(url: str, words: bytes = b"") -> socket.socket:
    """A connection to a server of the test's, with these words said."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
    connection.sendall(words)
    return connection
