"""Checks of manifests and heads before use: signature, limits, layout; and which versions are kept.

The newest versions are kept, and older ones that they are made from. A relay mirrors as many as its disk budget allows;
if the route to the newest version does not fit, it reports a problem:

    wanted    the newest `count`, back to an anchor                     0.4 0.5 0.6 0.7 0.8 0.9
    mirrored  as many of them as fit, without the oldest                        0.6 0.7 0.8 0.9
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from blake3 import blake3
from pydantic import ValidationError

from shoal.errors import ManifestRefused, ProtocolError
from shoal.protocol.codec import ITEM_BYTES
from shoal.protocol.identity import SigningKey
from shoal.protocol.policy import BroadcastHead, Chunk, Entry, PolicyManifest, content_digest
from shoal.protocol.signing import Document, SignedDocument, first_problem, open_document, sign_document

MIB = 1024 * 1024
CHUNK_SIZE_BYTES = 4 * MIB
MIN_CHUNK_BYTES = 256 * 1024
CHUNKS_WANTED = 128
MAX_CHUNK_BYTES = 64 * MIB  # a receiver has one chunk per connection in memory
MAX_CHUNKS = 1 << 18  # 1 TiB at the usual chunk size
MAX_ENTRIES = 100_000
MAX_DIMENSIONS = 16
MAX_PAYLOAD_BYTES = 1 << 42
MAX_MANIFEST_BYTES = 32 * MIB
MAX_WITNESS_BYTES = 4096
MAX_HEAD_BYTES = 64 * 1024

D = TypeVar("D", PolicyManifest, BroadcastHead)
Place = tuple[int, int]  # (incarnation, version): compared in this order


def offered(manifest: PolicyManifest) -> tuple[Chunk, ...]:
    """The chunks that can be downloaded of a version: those of its deltas, and for an anchor those of the payload."""
    deltas = tuple(chunk for delta in manifest.deltas for chunk in delta.chunks)
    return (*deltas, *manifest.chunks) if manifest.anchor else deltas


def chunk_size_for(size_bytes: int) -> int:
    """About a hundred chunks per payload, so that several sources can share the work; of 256 KiB to 4 MiB each."""
    size = MIN_CHUNK_BYTES
    while size < CHUNK_SIZE_BYTES and size * CHUNKS_WANTED < size_bytes:
        size *= 2
    return size


def encode(document: Document, key: SigningKey) -> bytes:
    return sign_document(document, key).model_dump_json().encode()


def manifest_hash(data: bytes) -> str:
    return blake3(data).hexdigest()


def read_manifest(data: bytes, run: str | None, trusted_key: str) -> PolicyManifest:
    manifest = _opened(data, MAX_MANIFEST_BYTES, PolicyManifest, "a manifest", run, trusted_key)
    problem = _chunks_problem(manifest.chunks, manifest.chunk_size_bytes, manifest.size_bytes)
    problem = problem or entries_problem(manifest.entries, manifest.size_bytes) or _deltas_problem(manifest)
    if not problem:
        digest = content_digest(manifest.entries, manifest.chunk_size_bytes, manifest.chunks)
        if digest != manifest.policy.digest:
            problem = f"its content has digest {digest[:16]}…, not {manifest.policy.digest[:16]}…"
    if problem:
        raise ManifestRefused(f"the manifest of policy {manifest.policy.label} is refused: {problem}")
    return manifest


def read_head(data: bytes, run: str | None, trusted_key: str) -> BroadcastHead:
    return _opened(data, MAX_HEAD_BYTES, BroadcastHead, "a head", run, trusted_key)


def _opened(data: bytes, max_bytes: int, kind: type[D], what: str, run: str | None, trusted_key: str) -> D:
    try:
        if len(data) > max_bytes:
            raise ProtocolError(f"it has {len(data)} bytes; at most {max_bytes} are allowed")
        document = open_document(SignedDocument.model_validate_json(data), kind, trusted_key)
        if run is not None and document.run != run:
            raise ProtocolError(f"it belongs to run {document.run[:80]}, not to {run}")
    except ValidationError as error:
        raise ManifestRefused(f"{what} is refused: it is not a signed document: {first_problem(error)}") from error
    except ProtocolError as error:
        raise ManifestRefused(f"{what} is refused: {error}") from error
    return document


def check_not_rolled_back(head: BroadcastHead, known: BroadcastHead | None) -> None:
    if known is None:
        return
    if head.policy.place < known.policy.place:
        back = f"it goes back to policy {head.policy.label} although {known.policy.label} is known"
        raise ManifestRefused(f"a head is refused: {back}")
    if head.policy.place == known.policy.place and head.policy.digest != known.policy.digest:
        raise ManifestRefused(f"a head is refused: it names other weights for policy {head.policy.label}")


def _chunks_problem(chunks: tuple[Chunk, ...], chunk_size: int, size: int) -> str:
    if chunk_size > MAX_CHUNK_BYTES:
        return f"chunks of {chunk_size} bytes; at most {MAX_CHUNK_BYTES} are allowed"
    if size > MAX_PAYLOAD_BYTES or len(chunks) > MAX_CHUNKS:
        return f"{size} bytes in {len(chunks)} chunks are more than is allowed"
    if len(chunks) != -(-size // chunk_size):
        return f"{len(chunks)} chunks of {chunk_size} bytes do not make {size} bytes"
    for index, chunk in enumerate(chunks):
        if chunk.size_bytes != min(chunk_size, size - index * chunk_size):
            return f"chunk {index} has the wrong size, {chunk.size_bytes} bytes"
    return ""


def _deltas_problem(manifest: PolicyManifest) -> str:
    if not manifest.anchor and not manifest.deltas:
        return "it is neither an anchor nor reached by a delta"
    for delta in manifest.deltas:
        if delta.base.place >= manifest.policy.place:
            return f"a delta starts from policy {delta.base.label}, which does not come before it"
        if delta.size_bytes > manifest.size_bytes:
            return f"the delta from policy {delta.base.label} is larger than the whole"
        if problem := _chunks_problem(delta.chunks, manifest.chunk_size_bytes, delta.size_bytes):
            return f"the delta from policy {delta.base.label}: {problem}"
    return ""


def entries_problem(entries: tuple[Entry, ...], size_bytes: int) -> str:
    if len(entries) > MAX_ENTRIES:
        return f"{len(entries)} entries; at most {MAX_ENTRIES} are allowed"
    offset, seen = 0, set[tuple[str, str]]()
    for entry in entries:
        if entry.offset != offset:
            return f"entry {entry.name} does not start where the one before it ends"
        kind, shape = entry.dtype, entry.shape
        if entry.type == "file":
            if kind is not None or shape is not None:
                return f"entry {entry.name}: a file has neither type nor shape"
        elif kind not in ITEM_BYTES or shape is None or len(shape) > MAX_DIMENSIONS:
            return f"entry {entry.name}: a tensor needs a known type and a shape"
        elif min(shape, default=0) < 0 or ITEM_BYTES[kind] * prod(shape) != entry.size_bytes:
            return f"entry {entry.name}: {entry.size_bytes} bytes do not fill {kind}{list(shape)}"
        if (entry.type, entry.name) in seen:
            return f"two {entry.type} entries are called {entry.name}"
        seen.add((entry.type, entry.name))
        offset += entry.size_bytes
    for what, name in seen:
        parents = name.split("/")[:-1]
        if what == "file" and any(("file", "/".join(parents[: n + 1])) in seen for n in range(len(parents))):
            return f"entry {name} lies in a folder that is also a file"
    return "" if offset == size_bytes else f"entries of {offset} bytes do not fill {size_bytes} bytes"


def kept_places(anchors: Mapping[Place, bool], count: int) -> set[Place]:
    """The newest `count` of the known versions (with whether each is an anchor), back to an anchor.

    >>> sorted(kept_places({(0, 1): True, (0, 2): True, (0, 3): False, (0, 4): False}, count=1))
    [(0, 2), (0, 3), (0, 4)]
    """
    places = sorted(anchors, reverse=True)
    kept = set(places[:count])
    for place in places[max(0, min(count, len(places)) - 1) :]:
        kept.add(place)
        if anchors[place]:
            break
    return kept


Manifests = Mapping[Place, PolicyManifest | None]  # None: not known yet


@dataclass(frozen=True)
class Selection:
    """`wanted`: versions whose manifests are kept; `mirrored`: those of them whose chunks are."""

    wanted: frozenset[Place] = frozenset()
    mirrored: frozenset[Place] = frozenset()
    route_bytes: int = 0
    fits: bool = True


def select_versions(manifests: Manifests, count: int, budget_bytes: int | None) -> Selection:
    """A manifest that is not known yet counts as a small anchor; with it, the selection is made again."""
    anchors = {place: manifest is None or manifest.anchor for place, manifest in manifests.items()}

    def needed_bytes(versions: int) -> int:
        return size_of(manifests[place] for place in kept_places(anchors, versions))

    wanted = frozenset(kept_places(anchors, count))
    route_bytes = needed_bytes(1)
    if budget_bytes is None:
        return Selection(wanted, wanted, route_bytes)
    fitting = bisect_right(range(1, min(count, len(anchors)) + 1), budget_bytes, key=needed_bytes)
    if fitting or not anchors:
        return Selection(wanted, frozenset(kept_places(anchors, fitting)), route_bytes)
    chosen: list[Place] = []
    for place in sorted(wanted, reverse=True):  # as many as fit
        if size_of(manifests[other] for other in [*chosen, place]) <= budget_bytes:
            chosen.append(place)
    return Selection(wanted, frozenset(chosen), route_bytes, fits=False)


def size_of(manifests: Iterable[PolicyManifest | None]) -> int:
    known = (manifest for manifest in manifests if manifest is not None)
    return sum({chunk.hash: chunk.size_bytes for manifest in known for chunk in offered(manifest)}.values())
