"""Checkpoints: everything that a resume needs, whole or not at all, and never trusted unread.

    checkpoints/12.0/                     version 12 of incarnation 0; a Hugging Face folder by itself
      checkpoint.json                     run, version, incarnation, hash of every file, hash of this
      model.safetensors                   weights in float32
      training.safetensors                the optimizer's moments, the state of torch's generators; if large, in parts
      config.json tokenizer.json …        what describes the model

    hidden folder ─► files, several at a time, each synced and hashed ─► checkpoint.json ─► rename ─► parent synced
                                                                                     `retention` removes others ◄─┘

What is written is a copy (`Captured`), so that it may be written while training goes on (`copies`).

The learning rate and the order of minibatches follow from the version, metrics rows and batches are found by it, so
that the version is the only cursor. No pickle: nothing in a checkpoint can run code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.protocol import canonical_json
from shoal.runtime.crash import point
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically
from shoal.shardcast.content import in_order
from shoal.trainer.learner import Learner
from shoal.trainer.retention import Place, Retention
from shoal.trainer.sharded import part_name, read_full

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
NAME = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)
HIDDEN = ".saving-"
MOMENTS = "optimizer/"
PART_BYTES = 2**30


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `version` steps are done."""

    run: str
    version: int
    incarnation: int = 0

    @property
    def name(self) -> str:
        return f"{self.version}.{self.incarnation}"


@dataclass(frozen=True)
class Captured:
    """The large files of a checkpoint by name, each as that which writes it to a path; nobody changes their contents
    before they are written. Several processes may each bring files of their own."""

    parts: Mapping[str, Callable[[Path], None]]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], training: Mapping[str, Tensor]) -> Captured:
        """The state of a learner in this process: its weights, and what `training_state` says of it."""
        files = {MODEL: weights, **_in_parts(training)}
        return cls({name: partial(save_tensors, tensors=tensors) for name, tensors in files.items()})


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose every byte has been checked."""

    folder: Path
    progress: Progress
    files: Mapping[str, bytes]

    def tensors(self, name: str = MODEL) -> dict[str, Tensor]:
        """The tensors of a file, whole, also if several processes have each written a part of it."""
        return read_full(self.folder, name)


class CheckpointStore:
    """The checkpoints of one run in one folder; the caller sees to it that nobody else writes there."""

    def __init__(self, folder: Path, keep: int | Retention) -> None:
        self.folder = folder
        self._retention = Retention(keep) if isinstance(keep, int) else keep
        self._damaged: set[Place] = set()

    def save(self, learner: Learner, progress: Progress, files: Mapping[str, bytes]) -> Path:
        """Make the learner's state durable, while nobody trains it. When the call returns, no crash loses it."""
        return self.write(Captured.of(learner.state(), training_state(learner)), progress, files)

    def write(
        self,
        captured: Captured,
        progress: Progress,
        files: Mapping[str, bytes],
        scores: Mapping[int, float] | None = None,
    ) -> Path:
        """Make what was captured durable, then remove what need not be kept; `scores` are those known by version."""
        ensure_folder(self.folder)
        hidden = self.folder / f"{HIDDEN}{progress.name}"
        try:
            self._sweep()
            hidden.mkdir()
            for name, data in files.items():
                write_atomically(hidden / name, data)
            hashes = dict(in_order(lambda part: _put(hidden, *part), captured.parts.items()))
            write_atomically(hidden / MANIFEST, _manifest(hidden, progress, hashes))
            point("trainer.checkpoint.before_rename")
            target = self._put_in_place(hidden, progress)
            self._damaged.discard((progress.version, progress.incarnation))
            self.prune(scores or {}, (progress.version, progress.incarnation))
            return target
        except (SafetensorError, OSError) as error:
            shutil.rmtree(hidden, ignore_errors=True)  # where the disk is full, what is half-written fills it
            raise resource_error("write the checkpoint", hidden, error) from error

    def prune(self, scores: Mapping[int, float], *written: Place) -> None:
        """Remove the checkpoints that are kept for no reason any more, but none of those just `written`.

        One that is known to be damaged keeps no other from being kept. It is left there: somebody may mend it.
        """
        sound = self.sound()
        kept = self._retention.kept(sound, scores) | set(written)
        for place in sound:
            if place not in kept:
                shutil.rmtree(self.folder / _name(place))

    def prune_finished(self, scores: Mapping[int, float]) -> None:
        """The run is finished: only the newest and the best stay; no guard looks back, no score is waited for."""
        self._retention = Retention(self._retention.keep, self._retention.keep_best)
        self.prune(scores)

    def newest(self) -> StoredCheckpoint | None:
        """The newest checkpoint that is undamaged; None if there is none at all."""
        found = self.places()
        damage = []
        for place in found:
            try:
                return self.at(place)
            except CheckpointError as error:
                damage.append(str(error))
                self._damaged.add(place)
                log.warning("%s; falling back to the checkpoint before it", error)
        if not found:
            return None
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {self.folder} can be read ({damage[0]}); restore one from a "
            "backup, or move the folder away: the trainer then starts from the model and replays the hub's batches"
        )

    def at(self, place: Place) -> StoredCheckpoint:
        """The checkpoint of one version and incarnation; `CheckpointError` if it is not there or damaged."""
        return _read(self.folder / _name(place))

    def places(self) -> list[Place]:
        """Version and incarnation of the checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        folders = [entry.name for entry in self.folder.iterdir() if entry.is_dir()]
        found = [match for name in folders if (match := NAME.fullmatch(name))]
        return sorted(((int(match[1]), int(match[2])) for match in found), reverse=True)

    def sound(self) -> list[Place]:
        """The same without those that were found damaged."""
        return [place for place in self.places() if place not in self._damaged]

    def _put_in_place(self, hidden: Path, progress: Progress) -> Path:
        target = self.folder / progress.name
        if target.exists():  # the same state again (it was damaged, or replayed); the one before it still stands
            target.rename(self.folder / f"{HIDDEN}replaced-{progress.name}")
        hidden.rename(target)
        sync_folder(self.folder)
        point("trainer.checkpoint.after_rename")
        self._sweep()
        return target

    def _sweep(self) -> None:
        """Remove what a crash left half-written."""
        for entry in self.folder.glob(f"{HIDDEN}*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def restore(learner: Learner, stored: StoredCheckpoint) -> None:
    """Put weights, moments and generators in place; on the same machine, training goes on bit for bit."""
    learner.load_state(stored.tensors(MODEL))
    training = stored.tensors(TRAINING)
    learner.load_moments(
        {name.removeprefix(MOMENTS): value for name, value in training.items() if name.startswith(MOMENTS)}
    )
    restore_generators(training)


def training_state(learner: Learner) -> dict[str, Tensor]:
    """What a resume needs beside the weights: moments, and the state of torch's generators. Moments are not copied."""
    state = {f"{MOMENTS}{name}": value for name, value in learner.moments().items()}
    state["generator/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state |= {f"generator/cuda-{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_generators(training: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(training["generator/cpu"])
    for index in range(torch.cuda.device_count()):
        if (state := training.get(f"generator/cuda-{index}")) is not None:
            torch.cuda.set_rng_state(state, index)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file that is on the disk when the call returns."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _name(place: Place) -> str:
    return f"{place[0]}.{place[1]}"


def _put(folder: Path, name: str, put: Callable[[Path], None]) -> tuple[str, str]:
    """Write one large file; its name and its hash, as it can be read."""
    put(folder / name)
    return name, _file_hash(folder / name)


def _in_parts(training: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The file of `training`, or parts of about `PART_BYTES`, which are written and hashed at the same time."""
    sizes = list(accumulate((tensor.nbytes for tensor in training.values()), initial=0))
    count = max(1, -(-sizes[-1] // PART_BYTES))
    if count == 1:
        return {TRAINING: dict(training)}
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for begins, (name, tensor) in zip(sizes, training.items(), strict=False):
        parts[begins * count // sizes[-1]][name] = tensor
    parts = [part for part in parts if part]
    return {part_name(TRAINING, number, len(parts)): part for number, part in enumerate(parts)}


def _manifest(folder: Path, progress: Progress, hashes: Mapping[str, str]) -> bytes:
    files = {path.name: hashes.get(path.name) or _file_hash(path) for path in sorted(folder.iterdir())}
    content = {"format": FORMAT, **asdict(progress), "files": files}
    return json.dumps({**content, "hash": _content_hash(content)}, indent=2).encode() + b"\n"


def _content_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _file_hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _read(folder: Path) -> StoredCheckpoint:
    """A checkpoint, if all its bytes are as they were written; else `CheckpointError` with the file that is not."""
    content = _read_manifest(folder)
    for name, expected in content["files"].items():
        try:
            found = _file_hash(folder / name)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name}: {error.strerror}") from error
        if found != expected:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} does not match its hash")
    progress = Progress(content["run"], content["version"], content["incarnation"])
    if progress.name != folder.name:
        raise CheckpointError(f"the checkpoint {folder} is damaged: it says that it is {progress.name}")
    described = {name for name in content["files"] if not name.endswith(".safetensors")}
    return StoredCheckpoint(folder, progress, {name: (folder / name).read_bytes() for name in described})


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        recorded = content.pop("hash")
        intact = bool(_content_hash(content) == recorded)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read") from error
    if not intact:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {MANIFEST} does not match its own hash")
    if content["format"] != FORMAT:
        raise CheckpointError(f"the checkpoint {folder} has format {content['format']}; this shoal reads {FORMAT}")
    return content
