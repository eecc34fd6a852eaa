"""A broadcast to be attacked: servers, honest and scripted, and an origin that signs whatever it likes.

    Lab ─┬─ publish          a real origin writes a real tree
         ├─ honest, relay    that tree, served as in production
         ├─ source(handler)  a server that answers each request as the attack pleases
         └─ client           a real downloader with the patience of a test

`sign` makes documents that no honest origin would write, with the right key: signatures alone must not be enough.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from kit import cast
from kit.cast import Running
from shoal import shardcast
from shoal.errors import BroadcastError
from shoal.protocol import Chunk, Entry, PolicyManifest, PolicyRef, SigningKey, TensorView, content_digest
from shoal.protocol.policy import BroadcastHead
from shoal.protocol.signing import Document
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Timeouts
from shoal.shardcast.limits import PoolSettings
from shoal.shardcast.manifest import encode, manifest_hash, place_of
from shoal.shardcast.tree import HEAD, chunk_key, manifest_key

KEY = SigningKey.from_seed(b"\x11" * 32)
OTHER_KEY = SigningKey.from_seed(b"\x12" * 32)
RUN = "attacked"
CHUNK = 1000
WITHIN_S = 20.0
DEAD = "http://127.0.0.1:9"  # the discard port: nobody listens there

Handler = cast.Handler
get, reply, tree, eventually = cast.ask, cast.reply, cast.from_folder, cast.eventually


def files_of(seed: int, size: int = 7450) -> dict[str, bytes]:
    """Two files that fill several chunks and share one of them."""
    dice = random.Random(seed)
    return {"data.bin": dice.randbytes(size), "readme.txt": b"version %d" % seed}


def tensors_of(seed: int, size: int = 4000) -> list[TensorView]:
    """One tensor; from one seed to the next, one value in a hundred changes."""
    values = bytearray(random.Random(0).randbytes(2 * size))
    for step in range(1, seed + 1):
        dice = random.Random(step)
        for _ in range(size // 100):
            values[2 * dice.randrange(size)] ^= 1
    return [TensorView("weight", "BF16", (size,), memoryview(bytes(values)))]


# ── documents that no honest origin would write ──────────────────────────────────────────────────────────────────


def sign(document: Document, key: SigningKey = KEY) -> bytes:
    return encode(document, key)


def manifest_of(version: int, entries: Sequence[tuple[str, bytes]], **changes: Any) -> tuple[PolicyManifest, bytes]:
    """A manifest of files with these names, checked by nobody, and the payload."""
    payload = b"".join(data for _, data in entries)
    listed, offset = [], 0
    for name, data in entries:
        fields = {"name": name, "type": "file", "offset": offset, "size_bytes": len(data), "dtype": None, "shape": None}
        listed.append(Entry.model_construct(**fields))
        offset += len(data)
    pieces = [payload[at : at + CHUNK] for at in range(0, len(payload), CHUNK)]
    chunks = tuple(Chunk(hash=blake3(piece).hexdigest(), size_bytes=len(piece)) for piece in pieces)
    digest = content_digest(tuple(listed), CHUNK, chunks)
    manifest = PolicyManifest.model_construct(
        run=RUN, policy=PolicyRef(incarnation=0, version=version, digest=digest), entries=tuple(listed),
        chunk_size_bytes=CHUNK, chunks=chunks, size_bytes=len(payload), created_at_ms=0,
    )  # fmt: skip
    return manifest.model_copy(update=changes), payload


def write_tree(folder: Path, manifest: PolicyManifest, chunks: Mapping[str, bytes], key: SigningKey = KEY) -> None:
    """Put a version into a tree without asking `Origin`, head included."""
    data = sign(manifest, key)
    write(folder / manifest_key(place_of(manifest)), data)
    for name, body in chunks.items():
        write(folder / chunk_key(name), body)
    write(folder / HEAD, sign(head_of(manifest, data), key))


def head_of(manifest: PolicyManifest, data: bytes, **changes: Any) -> BroadcastHead:
    head = BroadcastHead(
        run=RUN,
        policy=manifest.policy,
        manifest_hash=manifest_hash(data),
        kept_versions=(manifest.policy.label,),
        created_at_ms=0,
    )
    return head.model_copy(update=changes)


def pieces_of(payload: bytes) -> dict[str, bytes]:
    pieces = [payload[at : at + CHUNK] for at in range(0, len(payload), CHUNK)]
    return {blake3(piece).hexdigest(): piece for piece in pieces}


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Source(cast.ScriptedSource):
    """A scripted server that tells what it was asked for."""

    def asked(self, word: str) -> list[str]:
        return [target for target in self.seen if word in target]


def says(body: bytes, status: int = 200) -> Handler:
    return lambda _target, to: reply(to, status, body)


def endless_headers(_target: str, to: socket.socket) -> None:
    to.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        to.sendall(b"X-More: and more\r\n" * 100)


def endless_body(_target: str, to: socket.socket) -> None:
    """No length, no end."""
    to.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        to.sendall(bytes(1 << 16))


def huge_body(_target: str, to: socket.socket) -> None:
    """A length beyond all bounds, and a start on it."""
    reply(to, 200, b"", size=1 << 50)
    while True:
        to.sendall(bytes(1 << 16))


def silent(_target: str, to: socket.socket) -> None:
    """Takes the request, never answers, never hangs up; ends when the client does."""
    to.recv(1)


class Lab:
    """One tree with one origin, and whoever serves or lies about it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.www = folder / "www"
        self._running: list[Running] = []
        self._sources: list[Source] = []

    def origin(self, **settings: Any) -> shardcast.Origin:
        chosen = shardcast.OriginSettings.model_validate({"chunk_size_bytes": CHUNK, **settings})
        return shardcast.Origin(self.www, RUN, KEY, settings=chosen)

    def publish(self, version: int, seed: int | None = None, incarnation: int = 0) -> PolicyManifest:
        content = shardcast.Content.of(files_of(version if seed is None else seed))
        return self.origin().publish(version, content, incarnation=incarnation)

    def publish_tensors(self, version: int, size: int = 4000, **settings: Any) -> PolicyManifest:
        """Weights of which little changes from version to version, so that a delta pays."""
        return self.origin(delta_from_bytes=0, **settings).publish(version, tensors_of(version, size))

    def honest(self) -> Running:
        return self.run(partial(shardcast.run_origin, self.www, "127.0.0.1", 0))

    def relay(self, name: str, *upstreams: str, peers: Sequence[str] = (), **settings: Any) -> Running:
        chosen = shardcast.RelaySettings.model_validate(settings)
        config = shardcast.RelayConfig(
            self.folder / name, upstreams, RUN, KEY.public_key, "127.0.0.1", 0, chosen, peers=tuple(peers), poll_s=0.05
        )
        return self.run(partial(shardcast.run_relay, config))

    def run(self, run: Callable[[StopToken, Callable[[str], None]], None]) -> Running:
        self._running.append(Running(run))
        return self._running[-1]

    def stop(self, running: Running) -> None:
        self._running.remove(running)
        running.end(WITHIN_S)

    def source(self, handler: Handler) -> Source:
        self._sources.append(Source(handler))
        return self._sources[-1]

    def liar(self, lies: Mapping[str, Handler]) -> Source:
        """Honest about the tree, but for targets that contain one of these words."""
        return self.source(cast.instead(tree(self.www), lies))

    def client(self, *sources: str, name: str = "cache", **pool: float) -> shardcast.Downloader:
        timeouts = Timeouts(connect_s=2, stall_s=pool.pop("stall_s", 5))
        settings = shardcast.DownloadSettings(pool=PoolSettings(timeouts=timeouts, **pool))  # type: ignore[arg-type]
        return shardcast.Downloader(sources, RUN, KEY.public_key, self.folder / name, StopToken(), settings)

    def close(self) -> None:
        for running in reversed(self._running):
            running.end(WITHIN_S)
        for source in self._sources:
            source.close()


@contextmanager
def lab_in(folder: Path) -> Iterator[Lab]:
    lab = Lab(folder)
    try:
        yield lab
    finally:
        lab.close()


def endings(folder: Path, names: Iterable[str], ask: Callable[[Lab, str], object]) -> dict[str, BroadcastError]:
    """How asking ends for each of these, in a lab of its own, all at the same time: most of it is waiting."""

    def ending(name: str) -> BroadcastError:
        place = folder / name.replace("/", "-")
        place.mkdir()
        with lab_in(place) as lab:
            try:
                ask(lab, name)
            except BroadcastError as error:
                return error
        raise AssertionError(f"{name}: it ended well")

    listed = list(names)
    with ThreadPoolExecutor(max_workers=len(listed)) as threads:
        return dict(zip(listed, threads.map(ending, listed), strict=True))


# ── what is looked at ────────────────────────────────────────────────────────────────────────────────────────────


def head_version(url: str) -> str:
    """The label of the version that a server's head names; empty if it has none."""
    status, body = get(url, f"/{HEAD}")
    if status != 200:
        return ""
    policy = json.loads(body)["document"]["policy"]
    return f"{policy['incarnation']}.{policy['version']}"


def health(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(url, "/health")[1])
    return found


def assert_files(payload: shardcast.Payload, files: Mapping[str, bytes]) -> None:
    assert dict(payload.files) == dict(files)
