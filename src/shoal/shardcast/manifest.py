"""What a version consists of: how files and tensors become one payload, its chunks, and a signed manifest.

    tensors (in order given) ┐                    ┌ entry  entry  entry …   names, types, back to back
    files   (by name)        ┴─► one payload ─────┤
                                                  └ chunk │ chunk │ last    equal sizes, BLAKE3 each

Tensors lie first, so that a longer `config.json` moves no weights into other chunks and tensors of one type stay
aligned. Nothing in a manifest is used before its signature, its caps and its layout have been checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from blake3 import blake3
from pydantic import ValidationError

from shoal.errors import BroadcastError, ManifestRefused, ProtocolError
from shoal.protocol import (
    BroadcastHead,
    Chunk,
    Document,
    Entry,
    PolicyManifest,
    SignedDocument,
    SigningKey,
    TensorView,
    content_digest,
    first_problem,
    open_document,
    sign_document,
)
from shoal.protocol.tensor import ITEM_BYTES

MIB = 1024 * 1024
CHUNK_SIZE_BYTES = 4 * MIB
MAX_CHUNK_BYTES = 64 * MIB  # a receiver holds one chunk per connection in memory
MAX_CHUNKS = 1 << 18  # 1 TiB at the usual chunk size
MAX_ENTRIES = 100_000
MAX_DIMENSIONS = 16
MAX_PAYLOAD_BYTES = 1 << 42
MAX_MANIFEST_BYTES = 32 * MIB
MAX_HEAD_BYTES = 64 * 1024

Place = tuple[int, int]  # (incarnation, version): compared in this order


def lay_out(files: Mapping[str, bytes], tensors: Sequence[TensorView]) -> tuple[tuple[Entry, ...], list[memoryview]]:
    """The entries of a payload and, for each, its bytes (borrowed)."""
    entries: list[Entry] = []
    spans: list[memoryview] = []
    offset = 0
    try:
        for tensor in tensors:
            spans.append(_flat(tensor.name, tensor.data))
            entries.append(_tensor_entry(tensor, offset))
            offset += spans[-1].nbytes
        for name in sorted(files):
            spans.append(memoryview(files[name]))
            entries.append(Entry(name=name, type="file", offset=offset, size_bytes=len(files[name])))
            offset += len(files[name])
    except ValidationError as error:
        raise BroadcastError(f"a file or tensor cannot be published: {first_problem(error)}") from error
    problem = _entries_problem(tuple(entries), offset)
    if problem:
        raise BroadcastError(f"these files and tensors cannot be published: {problem}")
    return tuple(entries), spans


def _tensor_entry(tensor: TensorView, offset: int) -> Entry:
    return Entry(
        name=tensor.name,
        type="tensor",
        offset=offset,
        size_bytes=tensor.data.nbytes,
        dtype=tensor.dtype,
        shape=tensor.shape,
    )


def _flat(name: str, data: memoryview) -> memoryview:
    if data.nbytes == 0:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    if not data.c_contiguous:
        raise BroadcastError(f"tensor {name} is not contiguous in memory; make it contiguous before publishing")
    return data.cast("B")


def cut(spans: Sequence[memoryview], chunk_size_bytes: int) -> Iterator[memoryview]:
    """The payload chunk by chunk, holding at most one chunk. A view yielded is valid until the next is asked for."""
    buffer = memoryview(bytearray(chunk_size_bytes))
    filled = 0
    for span in spans:
        at = 0
        while at < span.nbytes:
            if filled == 0 and span.nbytes - at >= chunk_size_bytes:
                yield span[at : at + chunk_size_bytes]  # a chunk inside one tensor is hashed where it lies
                at += chunk_size_bytes
                continue
            size = min(chunk_size_bytes - filled, span.nbytes - at)
            buffer[filled : filled + size] = span[at : at + size]
            filled, at = filled + size, at + size
            if filled == chunk_size_bytes:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def chunk_of(data: memoryview) -> Chunk:
    return Chunk(hash=blake3(data).hexdigest(), size_bytes=data.nbytes)


def digest_of(
    files: Mapping[str, bytes], tensors: Sequence[TensorView], chunk_size_bytes: int = CHUNK_SIZE_BYTES
) -> str:
    """The digest that publishing these would sign, without writing anything."""
    entries, spans = lay_out(files, tensors)
    return content_digest(entries, chunk_size_bytes, tuple(chunk_of(data) for data in cut(spans, chunk_size_bytes)))


def encode(document: Document, key: SigningKey) -> bytes:
    """The bytes of a manifest or head as they are served."""
    return sign_document(document, key).model_dump_json().encode()


def manifest_hash(data: bytes) -> str:
    """What a head says of its manifest's bytes."""
    return blake3(data).hexdigest()


def read_manifest(data: bytes, run: str, trusted_key: str) -> PolicyManifest:
    """The manifest in `data`, or `ManifestRefused`: signed by the trusted key, for this run, and sound in itself."""
    signed = _signed(data, MAX_MANIFEST_BYTES, "manifest")
    try:
        manifest = open_document(signed, PolicyManifest, trusted_key)
    except ProtocolError as error:
        raise ManifestRefused(f"a manifest is refused: {error}") from error
    problem = _layout_problem(manifest)
    if manifest.run != run:
        problem = f"it belongs to run {manifest.run[:80]}, not to {run}"
    if problem:
        raise ManifestRefused(f"the manifest of policy {manifest.policy.label} is refused: {problem}")
    return manifest


def read_head(data: bytes, run: str, trusted_key: str) -> BroadcastHead:
    """The head in `data`, or `ManifestRefused`."""
    signed = _signed(data, MAX_HEAD_BYTES, "head")
    try:
        head = open_document(signed, BroadcastHead, trusted_key)
    except ProtocolError as error:
        raise ManifestRefused(f"a head is refused: {error}") from error
    if head.run != run:
        raise ManifestRefused(f"a head is refused: it belongs to run {head.run[:80]}, not to {run}")
    return head


def place_of(document: PolicyManifest | BroadcastHead) -> Place:
    return document.policy.incarnation, document.policy.version


def check_not_rolled_back(head: BroadcastHead, known: BroadcastHead | None) -> None:
    """Raise `ManifestRefused` if `head` is older than `known`, or names other weights for the same version."""
    if known is None:
        return
    if place_of(head) < place_of(known):
        raise ManifestRefused(
            f"a head is refused: it goes back to policy {head.policy.label} although {known.policy.label} is known"
        )
    if place_of(head) == place_of(known) and head.policy.digest != known.policy.digest:
        raise ManifestRefused(f"a head is refused: it names other weights for policy {head.policy.label}")


def _signed(data: bytes, max_bytes: int, what: str) -> SignedDocument:
    if len(data) > max_bytes:
        raise ManifestRefused(f"a {what} is refused: it has {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        return SignedDocument.model_validate_json(data)
    except ValidationError as error:
        raise ManifestRefused(f"a {what} is refused: it is not a signed document: {first_problem(error)}") from error


def _layout_problem(manifest: PolicyManifest) -> str:
    problem = _chunks_problem(manifest) or _entries_problem(manifest.entries, manifest.size_bytes)
    if problem:
        return problem
    digest = content_digest(manifest.entries, manifest.chunk_size_bytes, manifest.chunks)
    if digest != manifest.policy.digest:
        return f"its content has digest {digest[:16]}…, not {manifest.policy.digest[:16]}…"
    return ""


def _chunks_problem(manifest: PolicyManifest) -> str:
    chunk_size, size = manifest.chunk_size_bytes, manifest.size_bytes
    if chunk_size > MAX_CHUNK_BYTES:
        return f"chunks of {chunk_size} bytes; at most {MAX_CHUNK_BYTES} are allowed"
    if size > MAX_PAYLOAD_BYTES or len(manifest.chunks) > MAX_CHUNKS:
        return f"{size} bytes in {len(manifest.chunks)} chunks are more than is allowed"
    if len(manifest.chunks) != -(-size // chunk_size):
        return f"{len(manifest.chunks)} chunks of {chunk_size} bytes do not make {size} bytes"
    for index, chunk in enumerate(manifest.chunks):
        if chunk.size_bytes != min(chunk_size, size - index * chunk_size):
            return f"chunk {index} has the wrong size, {chunk.size_bytes} bytes"
    return ""


def _entries_problem(entries: tuple[Entry, ...], size_bytes: int) -> str:
    if len(entries) > MAX_ENTRIES:
        return f"{len(entries)} entries; at most {MAX_ENTRIES} are allowed"
    offset = 0
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        if entry.offset != offset:
            return f"entry {entry.name} does not start where the one before it ends"
        problem = _tensor_problem(entry) if entry.type == "tensor" else _file_problem(entry)
        if problem:
            return f"entry {entry.name}: {problem}"
        if (entry.type, entry.name) in seen:
            return f"two {entry.type} entries are called {entry.name}"
        seen.add((entry.type, entry.name))
        offset += entry.size_bytes
    return "" if offset == size_bytes else f"entries of {offset} bytes do not fill {size_bytes} bytes"


def _tensor_problem(entry: Entry) -> str:
    if entry.dtype not in ITEM_BYTES or entry.shape is None or len(entry.shape) > MAX_DIMENSIONS:
        return "a tensor needs a known type and a shape"
    if min(entry.shape, default=0) < 0 or ITEM_BYTES[entry.dtype] * prod(entry.shape) != entry.size_bytes:
        return f"{entry.size_bytes} bytes do not fill {entry.dtype}{list(entry.shape)}"
    return ""


def _file_problem(entry: Entry) -> str:
    return "" if entry.dtype is None and entry.shape is None else "a file has neither type nor shape"
