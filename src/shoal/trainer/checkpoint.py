"""Checkpoints: everything that a resume needs, whole or not at all, and never trusted unread.

    checkpoints/12.0/                     version 12 of incarnation 0; a Hugging Face folder by itself
      checkpoint.json                     run, version, incarnation, hash of every file, hash of this
      model.safetensors                   weights in float32
      training.safetensors                the optimizer's moments, the state of torch's generators
      config.json tokenizer.json …        what describes the model

    hidden folder ─► files, each synced ─► checkpoint.json ─► rename ─► parent synced ─► older ones removed

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.models.state import apply_state, policy_state
from shoal.protocol import canonical_json
from shoal.runtime.crash import point
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically
from shoal.trainer.learner import Learner

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
NAME = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)
HIDDEN = ".saving-"


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
class StoredCheckpoint:
    """A checkpoint whose every byte has been checked."""

    folder: Path
    progress: Progress
    files: Mapping[str, bytes]

    def tensors(self, name: str = MODEL) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load_file(self.folder / name)
        return tensors


class CheckpointStore:
    """The checkpoints of one run in one folder; the caller sees to it that nobody else writes there."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, learner: Learner, progress: Progress, files: Mapping[str, bytes]) -> Path:
        """Make this state durable. When the call returns, no crash loses it."""
        ensure_folder(self.folder)
        self._sweep()
        hidden = self.folder / f"{HIDDEN}{progress.name}"
        try:
            hidden.mkdir()
            for name, data in files.items():
                write_atomically(hidden / name, data)
            _save_tensors(hidden / MODEL, policy_state(learner.model))
            _save_tensors(hidden / TRAINING, _training_state(learner))
            write_atomically(hidden / MANIFEST, _manifest(hidden, progress))
            point("trainer.checkpoint.before_rename")
            return self._put_in_place(hidden, progress)
        except (SafetensorError, OSError) as error:
            raise resource_error("write the checkpoint", hidden, error) from error

    def newest(self) -> StoredCheckpoint | None:
        """The newest checkpoint that is undamaged; None if there is none at all."""
        found = self._places()
        damage = []
        for name in found:
            try:
                return _read(self.folder / name)
            except CheckpointError as error:
                damage.append(str(error))
                log.warning("%s; falling back to the checkpoint before it", error)
        if not found:
            return None
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {self.folder} can be read ({damage[0]}); restore one from a "
            "backup, or move the folder away: the trainer then starts from the model and replays the hub's batches"
        )

    def _places(self) -> list[str]:
        """Names of the checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        names = [entry.name for entry in self.folder.iterdir() if NAME.fullmatch(entry.name)]
        return sorted(names, key=lambda name: tuple(map(int, name.split("."))), reverse=True)

    def _put_in_place(self, hidden: Path, progress: Progress) -> Path:
        target = self.folder / progress.name
        if target.exists():  # the same state again (it was damaged, or replayed); the one before it still stands
            target.rename(self.folder / f"{HIDDEN}replaced-{progress.name}")
        hidden.rename(target)
        sync_folder(self.folder)
        point("trainer.checkpoint.after_rename")
        self._sweep()
        for name in self._places()[self._keep :]:
            shutil.rmtree(self.folder / name)
        return target

    def _sweep(self) -> None:
        """Remove what a crash left half-written."""
        for entry in self.folder.glob(f"{HIDDEN}*"):
            shutil.rmtree(entry)


def restore(learner: Learner, stored: StoredCheckpoint) -> None:
    """Put weights, moments and generators in place; on the same machine, training goes on bit for bit."""
    apply_state(learner.model, stored.tensors(MODEL))
    training = stored.tensors(TRAINING)
    parameters = dict(learner.model.named_parameters())
    learner.optimizer.state.clear()
    for name, value in training.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, slot = rest.rpartition("/")
            target = parameters[parameter]
            # The count of updates stays where AdamW keeps it, on the CPU; moments live beside their weights.
            moved = value if slot == "step" else value.to(target.device)
            learner.optimizer.state[target][slot] = moved
    _restore_generators(training)


def _training_state(learner: Learner) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in learner.model.named_parameters()}
    state = {
        f"optimizer/{names[parameter]}/{slot}": value
        for parameter, slots in learner.optimizer.state.items()
        for slot, value in slots.items()
    }
    state["generator/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state |= {f"generator/cuda-{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
    return state


def _restore_generators(training: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(training["generator/cpu"])
    for index in range(torch.cuda.device_count()):
        if (state := training.get(f"generator/cuda-{index}")) is not None:
            torch.cuda.set_rng_state(state, index)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _manifest(folder: Path, progress: Progress) -> bytes:
    files = {path.name: _file_hash(path) for path in sorted(folder.iterdir())}
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
