"""Policies: which weights. A policy is (incarnation, version, digest), signed.

The digest covers the content (entries and chunk hashes), not the version, so equal weights have equal digests. A new
incarnation begins when a resume cannot reproduce a published digest; versions of different incarnations never mix.
"""

from typing import Annotated, ClassVar, Literal

from blake3 import blake3
from pydantic import AfterValidator, Field

from shoal.protocol.signing import Document, Message, Milliseconds, canonical_json

HEX_256 = "^[0-9a-f]{64}$"
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255


class PolicyRef(Message):
    incarnation: int = Field(ge=0, le=2**31)
    version: int = Field(ge=0, le=2**31)
    digest: str = Field(pattern=HEX_256)

    @property
    def place(self) -> tuple[int, int]:
        return self.incarnation, self.version

    @property
    def label(self) -> str:
        return f"{self.incarnation}.{self.version}"


def check_name(name: str) -> str:
    if problem := name_problem(name):
        raise ValueError(problem)
    return name


def name_problem(name: str) -> str:
    """What is wrong with a name, or nothing. No part between slashes may be empty, only dots, or unprintable."""
    if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    if not name.isprintable() or "\\" in name:
        return "it has a character that cannot be printed, or a backslash"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f'it has a part "{part}"'
        if len(part.encode()) > MAX_PART_BYTES:
            return f"it has a part longer than {MAX_PART_BYTES} bytes"
    return ""


class Entry(Message):
    """A file or a tensor in the payload, back to back in this order. A file's name may have folders (`onnx/model.bin`),
    and cannot leave the folder it is unpacked into."""

    name: Annotated[str, Field(min_length=1), AfterValidator(check_name)]
    type: Literal["file", "tensor"]
    offset: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


class Chunk(Message):
    """A span of the payload by hash (BLAKE3). All chunks but the last have `chunk_size_bytes`."""

    hash: str = Field(pattern=HEX_256)
    size_bytes: int = Field(gt=0)


class Delta(Message):
    """A lossless difference to an earlier version (`shoal.shardcast.delta`), offered as chunks of its own."""

    base: PolicyRef
    size_bytes: int = Field(gt=0)
    chunks: tuple[Chunk, ...]


class LedgerHead(Document):
    """The newest entry of the ledger; an old head can prove a rollback."""

    kind: ClassVar[str] = "ledger-head"
    run: str
    index: int = Field(ge=-1)
    hash: str = Field(pattern=HEX_256)


class PolicyManifest(Document):
    """The content of one version, signed by the trainer. `chunks` are those of the whole payload, which only an
    `anchor` offers for download; other versions are made from another one with `deltas`."""

    kind: ClassVar[str] = "policy-manifest"
    run: str
    policy: PolicyRef
    parent_version: int | None = None
    entries: tuple[Entry, ...]
    chunk_size_bytes: int = Field(gt=0)
    chunks: tuple[Chunk, ...]
    size_bytes: int = Field(ge=0)
    anchor: bool = True
    deltas: tuple[Delta, ...] = Field(default=(), max_length=16)
    ledger_head: LedgerHead | None = None
    created_at_ms: Milliseconds


class BroadcastHead(Document):
    """The newest version of an origin, the hash of its manifest's bytes, and the `versions` that can be fetched. Never
    goes back."""

    kind: ClassVar[str] = "broadcast-head"
    run: str
    policy: PolicyRef
    manifest_hash: str = Field(pattern=HEX_256)
    versions: tuple[str, ...] = Field(max_length=1000)
    created_at_ms: Milliseconds


class PolicyAnnouncement(Document):
    """The trainer tells the hub: this version is out. Signed by the trainer's key."""

    kind: ClassVar[str] = "policy-announcement"
    run: str
    policy: PolicyRef
    created_at_ms: Milliseconds


def content_digest(entries: tuple[Entry, ...], chunk_size_bytes: int, chunks: tuple[Chunk, ...]) -> str:
    listed, hashes = [entry.model_dump(mode="json") for entry in entries], [chunk.hash for chunk in chunks]
    content = {"entries": listed, "chunk_size_bytes": chunk_size_bytes, "chunks": hashes}
    return blake3(b"shoal/policy/v1\n" + canonical_json(content)).hexdigest()
