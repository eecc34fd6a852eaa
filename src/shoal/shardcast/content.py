"""The content of a publication: tensors and files as one payload, read in place and never copied as a whole.

    tensors (in order given) ┐                    ┌ entry  entry  entry …   names, types, back to back
    files   (by name)        ┴─► one payload ─────┤
                                                  └ chunk │ chunk │ last    equal sizes

Tensors come first: a longer `config.json` then moves no weights into other chunks, and tensors of one type stay
aligned.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blake3 import blake3
from pydantic import ValidationError

from shoal.errors import BroadcastError, ConfigError
from shoal.protocol import Chunk, Entry, TensorView, content_digest, first_problem
from shoal.shardcast.manifest import chunk_size_for, entries_problem
from shoal.shardcast.payload import os_errors, read_fully

SMALL_BYTES = 64 * 1024
CHANGED = "{} was changed while it was being published; publish it again"


T = TypeVar("T")
R = TypeVar("R")

THREADS = min(16, os.cpu_count() or 1)  # hashing, comparing, compressing and writing release the interpreter's lock


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> Iterator[R]:
    """`work` of every item, in order, by several threads. The first exception is raised here and ends the work."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="in-order") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def chunk_of(data: memoryview) -> Chunk:
    return Chunk(hash=blake3(data).hexdigest(), size_bytes=data.nbytes)


@dataclass(frozen=True)
class FileSpan:
    path: Path
    size_bytes: int
    changed_ns: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with os_errors("read", self.path), self.path.open("rb", buffering=0) as file:
            whole = read_fully(file.fileno(), offset, buffer)
        if not whole:
            raise BroadcastError(CHANGED.format(self.path))


Span = memoryview | FileSpan


class Content:
    """A payload to be published: `Content.of(files, tensors)`, or `Content.at(path)` for a file or a folder."""

    def __init__(self, entries: tuple[Entry, ...], spans: Sequence[Span]) -> None:
        self.entries, self._spans = entries, list(spans)
        self._offsets = [entry.offset for entry in entries]

    @classmethod
    def of(cls, files: Mapping[str, bytes], tensors: Sequence[TensorView] = ()) -> Content:
        parts: list[tuple[str, TensorView | None, Span]] = []
        for tensor in tensors:
            if not tensor.data.c_contiguous:
                raise BroadcastError(f"tensor {tensor.name} is not contiguous in memory; make it so before publishing")
            # a view with a zero in its shape cannot be cast
            parts.append((tensor.name, tensor, tensor.data.cast("B") if tensor.data.nbytes else memoryview(b"")))
        return cls._laid_out([*parts, *((name, None, memoryview(files[name])) for name in sorted(files))])

    @classmethod
    def at(cls, path: Path) -> Content:
        """A file, under its own name, or all files in a folder, under their paths in it."""
        spans: dict[str, FileSpan] = {}
        for name, file in ({path.name: path} if path.is_file() else _files_in(path)).items():
            try:
                with file.open("rb") as opened:
                    status = os.fstat(opened.fileno())
            except OSError as error:
                raise ConfigError(f"cannot read {file}: {error.strerror}") from error
            spans[name] = FileSpan(file, status.st_size, status.st_mtime_ns)
        # Small files last: adding or removing one then moves no large file into other chunks.
        order = sorted(spans, key=lambda name: (spans[name].size_bytes < SMALL_BYTES, name))
        return cls._laid_out([(name, None, spans[name]) for name in order])

    @classmethod
    def _laid_out(cls, parts: Sequence[tuple[str, TensorView | None, Span]]) -> Content:
        entries: list[Entry] = []
        offset = 0
        for name, tensor, span in parts:
            size = span.size_bytes if isinstance(span, FileSpan) else span.nbytes
            own = {} if tensor is None else {"dtype": tensor.dtype, "shape": tensor.shape}
            try:
                kind = "file" if tensor is None else "tensor"
                entries.append(Entry(type=kind, name=name, offset=offset, size_bytes=size, **own))
            except ValidationError as error:
                raise BroadcastError(f"{name!r} cannot be published: {first_problem(error)}") from error
            offset += size
        if problem := entries_problem(tuple(entries), offset):
            raise BroadcastError(f"these files and tensors cannot be published: {problem}")
        return cls(tuple(entries), [span for _, _, span in parts])

    @property
    def size_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].size_bytes if self.entries else 0

    def part(self, offset: int, size: int, scratch: memoryview) -> memoryview:
        index = bisect_right(self._offsets, offset) - 1
        inside, span = offset - self._offsets[index], self._spans[index]
        if isinstance(span, memoryview) and inside + size <= span.nbytes:
            return span[inside : inside + size]
        filled = 0
        while filled < size:
            span, count = self._spans[index], min(size - filled, self.entries[index].size_bytes - inside)
            if isinstance(span, memoryview):
                scratch[filled : filled + count] = span[inside : inside + count]
            elif count:
                span.read_into(inside, scratch[filled : filled + count])
            filled, inside, index = filled + count, 0, index + 1
        return scratch[:size]

    def check_unchanged(self) -> None:
        for span in (span for span in self._spans if isinstance(span, FileSpan)):
            with os_errors("read", span.path):
                status = span.path.stat()
            if (status.st_size, status.st_mtime_ns) != (span.size_bytes, span.changed_ns):
                raise BroadcastError(CHANGED.format(span.path))

    def chunks(self, chunk_size_bytes: int, work: Callable[[memoryview], R], threads: int = THREADS) -> Iterator[R]:
        """`work` of each chunk, in order, by several threads. A view is valid during the call only."""
        scratch = threading.local()

        def run(offset: int) -> R:
            if not hasattr(scratch, "buffer"):
                scratch.buffer = memoryview(bytearray(min(chunk_size_bytes, self.size_bytes)))
            return work(self.part(offset, min(chunk_size_bytes, self.size_bytes - offset), scratch.buffer))

        return in_order(run, range(0, self.size_bytes, chunk_size_bytes), threads)


def digest_of(files: Mapping[str, bytes], tensors: Sequence[TensorView], chunk_size_bytes: int | None = None) -> str:
    content = Content.of(files, tensors)
    size = chunk_size_bytes or chunk_size_for(content.size_bytes)
    return content_digest(content.entries, size, tuple(content.chunks(size, chunk_of)))


def _files_in(folder: Path) -> dict[str, Path]:
    """All files below `folder`; `ConfigError` for a dead link, or anything but files and folders."""
    if not folder.is_dir():
        raise ConfigError(f"there is no file or folder {folder} to publish")

    def fail(error: OSError) -> None:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error

    found: dict[str, Path] = {}
    for where, folders, names in os.walk(folder, onerror=fail):
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        for path in (Path(where) / name for name in [*names, *links]):
            if not path.is_file():
                what = "a link to no file that can be read" if path.is_symlink() else "no plain file"
                raise ConfigError(f"{path} is {what}: only files and folders can be published; remove it first")
            found[path.relative_to(folder).as_posix()] = path
    if not found:
        raise ConfigError(f"the folder {folder} holds no files to publish")
    return found
