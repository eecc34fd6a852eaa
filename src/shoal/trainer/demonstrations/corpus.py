"""The tokens that were chosen, in files: written once while rows are read, then mapped, never held as a whole.

ids.i32         the ids of all sequences, one behind the other
learnt.u8       1 where a token is learnt
sequences.npy   begin, end, row, and a number for what it asks (`ties`), for each sequence
corpus.json     the hash of each of them; written last, so that what has it is whole
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence as Items
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shoal.errors import CheckpointError
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.trainer.demonstrations.encoding import Sequence
from shoal.trainer.demonstrations.ties import Ties
from shoal.trainer.samples import Sample

IDS, LEARNT, SEQUENCES, MARK = "ids.i32", "learnt.u8", "sequences.npy", "corpus.json"


class Corpus:
    """Sequences by number, as samples for the step. Its files are mapped: memory goes with what a step takes."""

    def __init__(self, folder: Path) -> None:
        self.hash = _checked(folder)
        self._sequences: npt.NDArray[np.int64] = np.load(folder / SEQUENCES, allow_pickle=False)
        self._ids = np.memmap(folder / IDS, np.int32, "r")
        self._learnt = np.memmap(folder / LEARNT, np.uint8, "r")

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self._sequences[:, 1] - self._sequences[:, 0]
        return found

    @property
    def questions(self) -> npt.NDArray[np.uint64]:
        """A number for what each sequence asks: those that share a question have equal ones."""
        return np.ascontiguousarray(self._sequences[:, 3]).view(np.uint64)

    def sample(self, number: int) -> Sample:
        """A sequence as the step takes it: what comes before the first token that is learnt is its prompt."""
        begin, end = (int(value) for value in self._sequences[number, :2])
        learnt = self._learnt[begin:end].astype(np.bool_)
        first = int(np.argmax(learnt))
        ids = self._ids[begin:end].astype(np.int64)
        rest = len(ids) - first
        return Sample(ids[:first], ids[first:], np.zeros(rest, np.float32), 1.0, learnt[first:])


class CorpusWriter:
    """Takes sequences one by one; `finish` makes of those that stay a corpus, on the disk when it returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: list[tuple[int, int, int, int]] = []
        self._ties = Ties()
        self._end = 0
        self._files: list[BinaryIO] = []

    def __enter__(self) -> Self:
        shutil.rmtree(self._folder, ignore_errors=True)  # what a kill left of an earlier one
        ensure_folder(self._folder)
        self._files = [(self._folder / name).open("wb") for name in (IDS, LEARNT)]
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def add(self, row: int, turns: Items[bytes], sequences: Items[Sequence]) -> None:
        """`turns`: the digest of each question in it."""
        key = self._ties.add(turns)
        try:
            for sequence in sequences:
                self._files[0].write(sequence.ids.tobytes())
                self._files[1].write(sequence.learnt.astype(np.uint8).tobytes())
                begin, self._end = self._end, self._end + len(sequence.ids)
                self._entries.append((begin, self._end, row, key))
        except OSError as error:
            raise resource_error("write", self._folder, error) from error

    def finish(self, left_out: frozenset[int] = frozenset()) -> Corpus:
        """The corpus without those rows, whose tokens stay in the files unused."""
        groups = self._ties.groups()
        kept = [(*entry[:3], groups[entry[3]]) for entry in self._entries if entry[2] not in left_out]
        try:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            with (self._folder / SEQUENCES).open("wb") as out:
                np.save(out, np.array(kept, np.int64).reshape(-1, 4), allow_pickle=False)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise resource_error("write", self._folder, error) from error
        write_atomically(self._folder / MARK, json.dumps(_hashes(self._folder)).encode())
        return Corpus(self._folder)


def _hashes(folder: Path) -> dict[str, str]:
    return {name: _hash(folder / name) for name in (IDS, LEARNT, SEQUENCES)}


def _hash(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _checked(folder: Path) -> str:
    """One hash for all files, if each is as it was written."""
    try:
        recorded: dict[str, Any] = json.loads((folder / MARK).read_bytes())
        found = _hashes(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the chosen demonstrations in {folder} cannot be read: {error}; {_again(folder)}"
        ) from error
    if found != recorded:
        raise CheckpointError(f"the chosen demonstrations in {folder} are damaged; {_again(folder)}")
    return blake3(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _again(folder: Path) -> str:
    return f"remove {folder.parent} and begin again"
