"""Checkpoints: everything that a resume needs, whole or not at all, and never trusted unread.

    checkpoints/12.0/                     version 12 of incarnation 0; a Hugging Face folder by itself
      checkpoint.json                     run, version, incarnation, hash of every file, hash of this
      model.safetensors                   weights in float32
      training.safetensors                the optimizer's moments, the state of torch's generators; if large, in parts
      config.json tokenizer.json …        what describes the model

    hidden folder ─► files, several at a time, each synced and hashed ─► checkpoint.json ─► rename ─► parent synced
                                                                              `folder.Retention` removes others ◄─┘

What is written is a copy (`Copies`), so that training continues meanwhile: taken in front of the next step on a CPU,
beside it on a GPU, where the optimizer waits for it.

Of several ranks the first gathers all rows and writes; any number of ranks reads them again, each its own rows. The
version is the only cursor: rates, the order of minibatches, rows and batches follow from it. No pickle: nothing in a
checkpoint can run code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.models.folder import model_folder
from shoal.models.load import DTYPES
from shoal.protocol import canonical_json
from shoal.runtime.crash import point
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically
from shoal.shardcast.content import in_order
from shoal.trainer.folder import Place, Progress, Retention
from shoal.trainer.learner import Learner

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
NAME = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)
HIDDEN = ".saving-"
MOMENTS = "optimizer/"
PART_BYTES = 2**30
START = "start.json"

Captured = Mapping[str, Mapping[str, Tensor]]
"""The tensors of each large file of a checkpoint; nobody changes them before they are written."""


def part_name(name: str, number: int, count: int) -> str:
    """`training.safetensors`, the first of two parts: `training-00001-of-00002.safetensors`."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number + 1:05d}-of-{count:05d}.{suffix}"


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file that is on the disk when the call returns."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_tensors(folder: Path, name: str) -> Iterator[tuple[str, tuple[int, ...], Callable[..., Tensor]]]:
    """Name, shape and reader of every tensor of a file or its parts; the reader takes the rows that are wanted."""
    paths = [folder / name]
    if not paths[0].is_file():
        paths = sorted(folder.glob(part_name(name, 0, 1).replace("00001", "[0-9]" * 5)))
        found = [path.name for path in paths]
        if not found or found != [part_name(name, number, len(paths)) for number in range(len(paths))]:
            raise CheckpointError(f"the checkpoint {folder} is damaged: of {name} there are the parts {found}")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - no dictionary
                    part, whole = file.get_slice(key), partial(file.get_tensor, key)
                    read = lambda rows=None, part=part, whole=whole: whole() if rows is None else part[rows]  # noqa: E731
                    yield key, tuple(part.get_shape()), read
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a part of a checkpoint: {error}") from error


def captured_files(weights: Mapping[str, Tensor], training: Mapping[str, Tensor]) -> Captured:
    """The state of a learner in this process: weights, and `training_state`, in parts of about `PART_BYTES` where it is
    large, which are written and hashed at the same time."""
    sizes = list(accumulate((tensor.nbytes for tensor in training.values()), initial=0))
    count = max(1, -(-sizes[-1] // PART_BYTES))
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for begins, (name, tensor) in zip(sizes, training.items(), strict=False):
        parts[begins * count // sizes[-1]][name] = tensor
    parts = [part for part in parts if part]
    names = [TRAINING] if count == 1 else [part_name(TRAINING, number, len(parts)) for number in range(len(parts))]
    return {MODEL: weights, **dict(zip(names, parts, strict=True))}


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose every byte has been checked."""

    folder: Path
    progress: Progress
    files: Mapping[str, bytes]

    def tensors(self, name: str = MODEL) -> dict[str, Tensor]:
        return {key: read() for key, _shape, read in read_tensors(self.folder, name)}


class CheckpointStore:
    """The checkpoints of one run in one folder; the caller sees to it that nobody else writes there."""

    def __init__(self, folder: Path, keep: int | Retention) -> None:
        self.folder = folder
        self._retention = Retention(keep) if isinstance(keep, int) else keep
        self._damaged: set[Place] = set()

    def save(self, learner: Learner, progress: Progress, files: Mapping[str, bytes]) -> Path:
        """Make the learner's state durable, while nobody trains it. When the call returns, no crash loses it."""
        return self.write(captured_files(learner.state(), training_state(learner)), progress, files)

    def write(
        self, captured: Captured, progress: Progress, files: Mapping[str, bytes], scores: Mapping[int, float] = {}
    ) -> Path:
        """Make what was captured durable, then remove what need not be kept; `scores` are those known by version."""
        ensure_folder(self.folder)
        hidden, target = self.folder / f"{HIDDEN}{progress.name}", self.folder / progress.name

        def put(file: tuple[str, Mapping[str, Tensor]]) -> tuple[str, str]:
            """Write one large file; its name and its hash, as it can be read."""
            save_tensors(hidden / file[0], file[1])
            return file[0], _file_hash(hidden / file[0])

        try:
            self._sweep()
            hidden.mkdir()
            for name, data in files.items():
                write_atomically(hidden / name, data)
            hashes = dict(in_order(put, captured.items()))
            listed = {path.name: hashes.get(path.name) or _file_hash(path) for path in sorted(hidden.iterdir())}
            content = {"format": FORMAT, **asdict(progress), "files": listed}
            sealed = json.dumps({**content, "hash": _content_hash(content)}, indent=2).encode() + b"\n"
            write_atomically(hidden / MANIFEST, sealed)
            point("trainer.checkpoint.before_rename")
            if target.exists():  # the same state again (it was damaged, or replayed); the one before it still stands
                target.rename(self.folder / f"{HIDDEN}replaced-{progress.name}")
            hidden.rename(target)
            sync_folder(self.folder)
            point("trainer.checkpoint.after_rename")
            self._sweep()
            self._damaged.discard((progress.version, progress.incarnation))
            self.prune(scores, (progress.version, progress.incarnation))
            return target
        except (SafetensorError, OSError) as error:
            shutil.rmtree(hidden, ignore_errors=True)  # where the disk is full, what is half-written fills it
            raise resource_error("write the checkpoint", hidden, error) from error

    def prune(self, scores: Mapping[int, float], *written: Place) -> None:
        """Remove the checkpoints that are kept for no reason any more, but none of those just `written`. One that is
        known to be damaged keeps no other from being kept, and is left there: somebody may mend it."""
        sound = self.sound()
        for place in set(sound) - self._retention.kept(sound, scores) - set(written):
            shutil.rmtree(self.folder / "{}.{}".format(*place))

    def prune_finished(self, scores: Mapping[int, float]) -> None:
        """The run is finished: only the newest and the best stay; no guard looks back, no score is waited for."""
        self._retention = Retention(self._retention.keep, self._retention.keep_best)
        self.prune(scores)

    def newest(self) -> StoredCheckpoint | None:
        """The newest checkpoint that is undamaged; None if there is none at all."""
        found, damage = self.places(), []
        for place in found:
            try:
                return self.at(place)
            except CheckpointError as error:
                damage.append(str(error))
                self._damaged.add(place)
                log.warning("%s; falling back to the checkpoint before it", error)
        if not found:
            return None
        why = f"none of the {len(found)} checkpoints in {self.folder} can be read ({damage[0]})"
        raise CheckpointError(
            f"{why}; restore one from a backup, or move the folder away: the hub's batches are replayed"
        )

    def at(self, place: Place) -> StoredCheckpoint:
        """The checkpoint of that place, if all its bytes are as they were written; else an error names the file."""
        folder, name = self.folder / "{}.{}".format(*place), MANIFEST
        try:
            content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
            intact = content.pop("hash") == _content_hash(content) and content["format"] == FORMAT
            for name, expected in content["files"].items() if intact else ():
                intact = intact and _file_hash(folder / name) == expected
                if not intact:
                    break
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} cannot be read: {error}") from error
        if not intact:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is not as it was written")
        progress = Progress(content["run"], content["version"], content["incarnation"])
        if progress.name != folder.name:
            raise CheckpointError(f"the checkpoint {folder} is damaged: it says that it is {progress.name}")
        described = {name for name in content["files"] if not name.endswith(".safetensors")}
        return StoredCheckpoint(folder, progress, {name: (folder / name).read_bytes() for name in described})

    def places(self) -> list[Place]:
        """Version and incarnation of the checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        found = [NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir()]
        return sorted(((int(match[1]), int(match[2])) for match in found if match), reverse=True)

    def sound(self) -> list[Place]:
        """The same without those that were found damaged."""
        return [place for place in self.places() if place not in self._damaged]

    def _sweep(self) -> None:
        """Remove what a crash left half-written."""
        for entry in self.folder.glob(f"{HIDDEN}*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def restore(learner: Learner, stored: StoredCheckpoint) -> None:
    """Put weights, moments and generators in place; on the same machine, training continues bit for bit."""
    learner.load_state(stored.tensors(MODEL))
    training = stored.tensors(TRAINING)
    learner.load_moments({name[len(MOMENTS) :]: each for name, each in training.items() if name.startswith(MOMENTS)})
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


def _content_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _file_hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


@dataclass(frozen=True)
class Copied:
    """The state of one version: may be read once `arrived` has returned, until the next copy is taken. `weights` are of
    the type that is published; `captured` is None where no checkpoint is due."""

    weights: Mapping[str, Tensor]
    captured: Captured | None
    arrived: Callable[[], None] = lambda: None


class CopyStream:
    """How copies reach the host. Those of a CPU's memory are there at once."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield  # copies are begun inside

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def before_update(self) -> None:
        """The optimizer is about to change what is copied."""

    def wait(self) -> None:
        """Until the host may read the copies."""


class GpuCopyStream(CopyStream):
    """A stream of its own: copies run beside the next step's forward and backward passes, which only read weights. Only
    the optimizer (on the device) and the publisher's thread (on the host) wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._done.record(self._stream)

    def before_update(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()


class Copies:
    """Takes copies of one learner, each into the memory of the one before: whoever uses that must have finished. For a
    GPU it is page-locked, so that copies run at the speed of the bus; locking takes seconds, so it is done beside the
    first step. Weights that are not trained are copied once."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._stream: CopyStream | None = None
        self._reserving: threading.Thread | None = None

    def take(self, learner: Learner, with_training: bool) -> Copied:
        """The state as it is now; training may continue at once."""
        if self._stream is None:
            stream = self._stream = self._new_stream(learner.device)
            learner.optimizer.register_step_pre_hook(lambda *_: stream.before_update())
        if self._reserving is not None:
            self._reserving.join()
        with self._stream.copying():
            copied = self._begin(learner, with_training)
        if self._reserving is None and learner.device.type == "cuda":
            self._reserving = threading.Thread(target=self._reserve, args=(learner,), name="page-locking", daemon=True)
            self._reserving.start()
        return replace(copied, arrived=self._stream.wait)

    def _new_stream(self, device: torch.device) -> CopyStream:
        return GpuCopyStream(device) if device.type == "cuda" else CopyStream()

    def _begin(self, learner: Learner, with_training: bool) -> Copied:
        """Nobody reads what it returns before it has arrived."""
        # Adapters are published as they are: they are small, and are merged exactly when they are exported.
        published = DTYPES[learner.settings.publish_dtype] if learner.settings.lora is None else None
        frozen = {name for name, weight in learner.model.named_parameters() if not weight.requires_grad}
        kept = {} if learner.masters is None else learner.masters.frozen  # on the CPU already, and nobody changes them
        weights, exact = dict[str, Tensor](), dict[str, Tensor]()
        for name, value in learner.state().items():
            if name in kept:
                weights[name] = exact[name] = value
                continue
            whole = learner.ranks.whole(value)  # one at a time: all of them may be more than a device can hold
            weights[name] = self._copy_one(name, whole, name in frozen, published)
            if with_training:
                exact[name] = self._copy_one(name, whole, name in frozen)
        if not with_training:
            return Copied(weights, None)
        state = training_state(learner)
        training = {name: self._copy_one(name, learner.ranks.whole(value), False) for name, value in state.items()}
        return Copied(weights, captured_files(exact, training))

    def _copy_one(self, name: str, tensor: Tensor, unchanging: bool, floating: torch.dtype | None = None) -> Tensor:
        """`floating` is what floating-point numbers are rounded to, on the device where they are."""
        dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
        copied = unchanging and (name, dtype) in self._memory
        held = self._room(name, tensor, dtype)
        if not copied:
            assert self._stream is not None
            self._stream.copy(held, tensor)
        return held

    def _room(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        held = self._memory.get((name, dtype))
        if held is None or held.shape != tensor.shape:
            held = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[name, dtype] = held
        return held

    def _reserve(self, learner: Learner) -> None:
        """Lock the memory that the first checkpoint with moments needs. What fails here fails again when it is used."""
        with contextlib.suppress(RuntimeError):
            for name, weight in learner.trained().items():
                for kept in (name, *(f"{MOMENTS}{name}/{slot}" for slot in ("exp_avg", "exp_avg_sq"))):
                    self._room(kept, weight, weight.dtype)


def weights_digest(model: str | Path) -> str:
    """Of all weight files of a model folder, names included: the same folder, or a copy of it, has the same digest."""
    paths = sorted(model_folder(model).glob("*.safetensors"))
    return blake3("".join(f"{path.name} {_file_hash(path)}\n" for path in paths).encode()).hexdigest()


def hold_start(folder: Path, digest: Callable[[], str], *, begins: bool, needed: bool) -> None:
    """When a run begins, write down from which weights; when it resumes and the reference (a KL term) is needed,
    compare: `model.path` may point at another folder by then."""
    path = folder / START
    if begins:
        ensure_folder(folder)
        write_atomically(path, json.dumps({"weights": digest()}).encode() + b"\n")
    elif needed:
        try:
            recorded = json.loads(path.read_bytes())["weights"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            recorded = f"unknown: {error}"
        if digest() != recorded:
            said = f"measured from the weights that this run began with ({path}: {recorded})"
            todo = "put them back into the model folder, or begin a new run"
            raise CheckpointError(f"trainer.objective.kl is {said}: {todo}")
