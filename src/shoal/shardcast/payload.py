"""A downloaded version: its files and tensors, and its changes from the version it was made from."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import BroadcastError
from shoal.protocol import PolicyManifest, PolicyRef, TensorView
from shoal.runtime.files import ensure_folder, resource_error

if TYPE_CHECKING:
    from shoal.shardcast.delta import AppliedDeltas, Bits, Integers

COPY_BYTES = 8 * 1024 * 1024


class LazyFiles(UserDict[str, Any]):
    def __getitem__(self, name: str) -> bytes:
        return bytes(self.data[name])


@dataclass(frozen=True, eq=False)
class ChangedValues:
    name: str
    dtype: str
    width: int
    where: Integers
    values: Bits


@dataclass(frozen=True, repr=False)
class Payload:
    """A downloaded and verified version. `tensors` are views of one read-only mapping, perhaps unaligned."""

    manifest: PolicyManifest
    files: Mapping[str, bytes]
    tensors: list[TensorView]
    path: Path | None = None
    applied: AppliedDeltas | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        what = f"{len(self.files)} files, {len(self.tensors)} tensors, {self.manifest.size_bytes} bytes"
        return f"Payload(policy {self.manifest.policy.label}: {what})"

    def changes_from(self, ref: PolicyRef | None) -> Iterator[ChangedValues] | None:
        """The changes from the tensors of `ref`; None if this payload was not made from `ref` by deltas. A position may
        occur twice. Files are not included: compare their bytes."""
        if ref is None or self.applied is None or self.applied.forgotten or self.applied.begin.digest != ref.digest:
            return None
        return self.applied.changes()

    def export(self, target: Path) -> list[Path]:
        """Write the files into the folder `target`; no name can leave it, also not through a link."""
        ensure_folder(target)
        written = []
        for entry in (entry for entry in self.manifest.entries if entry.type == "file"):
            path = target
            for part in entry.name.split("/")[:-1]:
                path = path / part
                if path.is_symlink():
                    raise BroadcastError(f"{entry.name} is not written: {path} is a link, and might lead elsewhere")
                ensure_folder(path)
            written.append(path / entry.name.split("/")[-1])
            with atomic_file(written[-1]) as temporary, temporary.open("xb") as output:
                if self.path is None:
                    output.write(self.files[entry.name])
                    continue
                with self.path.open("rb") as source:  # mapped pages would count as this process's memory
                    source.seek(entry.offset)
                    for left in range(entry.size_bytes, 0, -COPY_BYTES):
                        output.write(source.read(min(COPY_BYTES, left)))
        return written


@contextlib.contextmanager
def os_errors(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise resource_error(action, path, error) from error


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    temporary = target.with_name(f".shoal-{os.urandom(4).hex()}")
    try:
        with os_errors("write", target):
            yield temporary
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def open_payload(
    manifest: PolicyManifest, whole: memoryview, path: Path | None = None, applied: AppliedDeltas | None = None
) -> Payload:
    files: dict[str, memoryview] = {}
    tensors: list[TensorView] = []
    for entry in manifest.entries:
        span = whole[entry.offset : entry.offset + entry.size_bytes]
        if entry.type == "file":
            files[entry.name] = span
        elif entry.dtype is not None and entry.shape is not None:
            tensors.append(TensorView(entry.name, entry.dtype, entry.shape, span))
    return Payload(manifest, LazyFiles(files), tensors, path, applied)


def copy_or_link(source: Path, target: Path) -> None:
    with atomic_file(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def read_fully(descriptor: int, offset: int, buffer: memoryview) -> bool:
    filled = 0
    while filled < buffer.nbytes:
        if (count := os.preadv(descriptor, [buffer[filled:]], offset + filled)) == 0:
            return False
        filled += count
    return True
