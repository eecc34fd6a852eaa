"""A forged broadcast: documents that no honest origin would write, and servers that never do what they should.

`sign` makes such documents with the right key: signatures alone must not be enough.
"""

import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from kit.cast import CHUNK, KEY, RUN, Handler, Lab, lab_in, reply
from shoal.errors import BroadcastError
from shoal.protocol import Chunk, Document, Entry, PolicyManifest, PolicyRef, SigningKey, TensorView, content_digest
from shoal.protocol.policy import BroadcastHead
from shoal.shardcast.manifest import encode, manifest_hash
from shoal.shardcast.tree import HEAD, chunk_key, manifest_key


def tensors_of(seed: int, size: int = 4000) -> list[TensorView]:
    """One tensor; from one seed to the next, one value in a hundred changes."""
    values = bytearray(random.Random(0).randbytes(2 * size))
    for step in range(1, seed + 1):
        rng = random.Random(step)
        for _ in range(size // 100):
            values[2 * rng.randrange(size)] ^= 1
    return [TensorView("weight", "BF16", (size,), memoryview(bytes(values)))]


def sign(document: Document, key: SigningKey = KEY) -> bytes:
    return encode(document, key)


def pieces_of(payload: bytes, size: int = CHUNK) -> list[tuple[str, bytes]]:
    pieces = (payload[at : at + size] for at in range(0, len(payload), size))
    return [(blake3(piece).hexdigest(), piece) for piece in pieces]


def chunks_of(payload: bytes, size: int = CHUNK) -> tuple[Chunk, ...]:
    return tuple(Chunk(hash=name, size_bytes=len(piece)) for name, piece in pieces_of(payload, size))


def manifest_of(
    version: int, entries: Sequence[tuple[str, bytes] | Entry], payload: bytes | None = None,
    chunks: tuple[Chunk, ...] | None = None, chunk_size: int = CHUNK,
) -> tuple[PolicyManifest, bytes]:  # fmt: skip
    """A manifest, checked by nobody, and its payload: files with these names and contents, or entries of a payload."""
    given = [entry for entry in entries if not isinstance(entry, Entry)]
    payload = b"".join(data for _, data in given) if payload is None else payload
    listed, offset = [entry for entry in entries if isinstance(entry, Entry)], 0
    for name, data in given:
        fields = {"name": name, "type": "file", "offset": offset, "size_bytes": len(data), "dtype": None, "shape": None}
        listed.append(Entry.model_construct(**fields))
        offset += len(data)
    chunks = chunks_of(payload, chunk_size) if chunks is None else chunks
    digest = content_digest(tuple(listed), chunk_size, chunks)
    manifest = PolicyManifest.model_construct(
        run=RUN, policy=PolicyRef(incarnation=0, version=version, digest=digest), entries=tuple(listed),
        chunk_size_bytes=chunk_size, chunks=chunks, size_bytes=sum(chunk.size_bytes for chunk in chunks),
        created_at_ms=0,
    )  # fmt: skip
    return manifest, payload


def write_tree(folder: Path, manifest: PolicyManifest, payload: bytes, chunk_size: int = CHUNK) -> None:
    """Put a version into a tree without asking `Origin`, head included."""
    data = sign(manifest)
    write(folder / manifest_key(manifest.policy.place), data)
    for name, piece in pieces_of(payload, chunk_size):
        write(folder / chunk_key(name), piece)
    write(folder / HEAD, sign(head_of(manifest, data)))


def head_of(manifest: PolicyManifest, data: bytes, **changes: Any) -> BroadcastHead:
    head = BroadcastHead(
        run=RUN, policy=manifest.policy, manifest_hash=manifest_hash(data), versions=(manifest.policy.label,),
        created_at_ms=0,
    )  # fmt: skip
    return head.model_copy(update=changes)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def repeating(head: bytes, again: bytes) -> Handler:
    def handle(_target: str, to: socket.socket) -> None:
        to.sendall(head)
        while True:
            to.sendall(again)

    return handle


def silent(_target: str, to: socket.socket) -> None:
    """Takes the request, never answers, never hangs up; ends when the client does."""
    to.recv(1)


ENDLESS: Mapping[str, Handler] = {
    "endless headers": repeating(b"HTTP/1.1 200 OK\r\n", b"X-More: and more\r\n" * 100),
    "endless body": repeating(b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 16)),  # no length, no end
    "huge body": repeating(b"HTTP/1.1 200 OK\r\nContent-Length: 1125899906842624\r\n\r\n", bytes(1 << 16)),
    "silent": silent,
}


def hanging_up(body: bytes, size: int) -> Handler:
    """Promises so many bytes, sends these, and hangs up."""

    def handle(_target: str, to: socket.socket) -> None:
        reply(to, 200, body, size)
        to.shutdown(socket.SHUT_RDWR)

    return handle


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
