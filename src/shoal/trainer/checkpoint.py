"""Checkpoints: everything that a resume needs, written completely or not at all, and verified when read.

    checkpoints/12.0/                     version 12 of incarnation 0; a Hugging Face folder by itself
      checkpoint.json                     run, version, incarnation, hash of every file, hash of this
      model.safetensors                   weights in float32
      training.safetensors                optimizer moments, state of torch's generators; in parts if large
      config.json tokenizer.json …        the description of the model

A copy of the state is written (`Copies`), so training continues meanwhile. On a CPU it is taken before the next step;
on a GPU during that step, and only the optimizer waits for it.

Of several ranks the first gathers all rows and writes; any number of ranks can read them, each its own rows. The
version is the only cursor: learning rates, minibatch order and batches follow from it.
"""

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
from shoal.models.folder import PEFT_WEIGHTS, adapter_of, model_folder
from shoal.models.load import DTYPES
from shoal.protocol import canonical_json
from shoal.runtime import ensure_folder, point, resource_error, sync_folder, write_atomically
from shoal.shardcast.content import in_order
from shoal.trainer.folder import Place, Retention, TrainerProgress
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

CheckpointFiles = Mapping[str, Mapping[str, Tensor]]
"""The tensors of each large file of a checkpoint. They must not change before they are written."""


def part_name(name: str, number: int, count: int) -> str:
    """`training.safetensors`, the first of two parts: `training-00001-of-00002.safetensors`."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number + 1:05d}-of-{count:05d}.{suffix}"


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The file is on the disk when the call returns."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `stored[rows]` reads these rows, `stored[...]` all of it."""

    shape: list[int]
    dtype: str
    part: Callable[[Any], Tensor]
    whole: Callable[[], Tensor]

    def __getitem__(self, rows: Any) -> Tensor:
        return self.whole() if rows is ... else self.part(rows)


def stored_tensors(folder: Path, name: str) -> dict[str, StoredTensor]:
    paths = [folder / name]
    if not paths[0].is_file():
        paths = sorted(folder.glob(part_name(name, 0, 1).replace("00001", "[0-9]" * 5)))
        found = [path.name for path in paths]
        if not found or found != [part_name(name, number, len(paths)) for number in range(len(paths))]:
            raise CheckpointError(f"the checkpoint {folder} is damaged: of {name} there are the parts {found}")
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a part of a checkpoint: {error}") from error
        for key in file.keys():  # noqa: SIM118 - no dictionary
            part, whole = file.get_slice(key), partial(file.get_tensor, key)
            stored[key] = StoredTensor(part.get_shape(), part.get_dtype(), part.__getitem__, whole)
    return stored


def checkpoint_files(weights: Mapping[str, Tensor], training: Mapping[str, Tensor]) -> CheckpointFiles:
    """`training_state` is split into parts of about `PART_BYTES`, which are written and hashed in parallel."""
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
    """A checkpoint of which every byte was verified."""

    folder: Path
    progress: TrainerProgress
    files: Mapping[str, bytes]

    def tensors(self, name: str = MODEL) -> dict[str, Tensor]:
        return {key: stored[...] for key, stored in stored_tensors(self.folder, name).items()}


class CheckpointStore:
    """The checkpoints of one run in one folder, which has no other writer."""

    def __init__(self, folder: Path, keep: int | Retention) -> None:
        self.folder = folder
        self._retention = Retention(keep) if isinstance(keep, int) else keep
        self._damaged: set[Place] = set()

    def save(self, learner: Learner, progress: TrainerProgress, files: Mapping[str, bytes]) -> Path:
        """Write the state of a learner that is not being trained; no crash loses it after the call returns."""
        return self.write(checkpoint_files(learner.state(), training_state(learner)), progress, files)

    def write(
        self,
        captured: CheckpointFiles,
        progress: TrainerProgress,
        files: Mapping[str, bytes],
        scores: Mapping[int, float] = {},
    ) -> Path:
        """Write a captured state durably, then remove checkpoints that are no longer needed."""
        ensure_folder(self.folder)
        hidden, target = self.folder / f"{HIDDEN}{progress.name}", self.folder / progress.name

        def put(file: tuple[str, Mapping[str, Tensor]]) -> tuple[str, str]:
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
            if target.exists():  # the same version again: it was damaged, or the step was replayed
                target.rename(self.folder / f"{HIDDEN}replaced-{progress.name}")
            hidden.rename(target)
            sync_folder(self.folder)
            point("trainer.checkpoint.after_rename")
            self._sweep()
            self._damaged.discard((progress.version, progress.incarnation))
            self.prune(scores, (progress.version, progress.incarnation))
            return target
        except (SafetensorError, OSError) as error:
            shutil.rmtree(hidden, ignore_errors=True)  # frees space on a full disk
            raise resource_error("write the checkpoint", hidden, error) from error

    def prune(self, scores: Mapping[int, float], *written: Place) -> None:
        """A damaged checkpoint does not count towards retention and is not removed: somebody may repair it."""
        sound = self.sound()
        for place in set(sound) - self._retention.kept(sound, scores) - set(written):
            shutil.rmtree(self.folder / "{}.{}".format(*place))

    def prune_finished(self, scores: Mapping[int, float]) -> None:
        self._retention = Retention(self._retention.keep, self._retention.keep_best)
        self.prune(scores)

    def newest(self) -> StoredCheckpoint | None:
        """The newest undamaged checkpoint; None if there is no checkpoint."""
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
        """The checkpoint of that version, if every byte is as it was written; else an error names the file."""
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
        progress = TrainerProgress(content["run"], content["version"], content["incarnation"])
        if progress.name != folder.name:
            raise CheckpointError(f"the checkpoint {folder} is damaged: it says that it is {progress.name}")
        described = {name for name in content["files"] if not name.endswith(".safetensors")}
        return StoredCheckpoint(folder, progress, {name: (folder / name).read_bytes() for name in described})

    def places(self) -> list[Place]:
        """(version, incarnation) of the checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        found = [NAME.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir()]
        return sorted(((int(match[1]), int(match[2])) for match in found if match), reverse=True)

    def sound(self) -> list[Place]:
        return [place for place in self.places() if place not in self._damaged]

    def _sweep(self) -> None:
        for entry in self.folder.glob(f"{HIDDEN}*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def restore(learner: Learner, folder: Path) -> None:
    """Each rank reads its own rows, whatever number of ranks wrote them. On the same machine training continues bit for
    bit."""
    learner.load_state(stored_tensors(folder, MODEL))
    training = stored_tensors(folder, TRAINING)
    learner.load_moments({name[len(MOMENTS) :]: each for name, each in training.items() if name.startswith(MOMENTS)})
    torch.set_rng_state(training["generator/cpu"][...])
    for index in range(torch.cuda.device_count()):
        if (state := training.get(f"generator/cuda-{index}")) is not None:
            torch.cuda.set_rng_state(state[...], index)


def training_state(learner: Learner) -> dict[str, Tensor]:
    """Moments are not copied."""
    state = {f"{MOMENTS}{name}": value for name, value in learner.moments().items()}
    state["generator/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state |= {f"generator/cuda-{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
    return state


def _content_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _file_hash(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


@dataclass(frozen=True)
class StateCopy:
    """A copy of one version. It may be read from when `arrived` has returned until the next copy is taken. `weights`
    have the published type; `captured` is None if no checkpoint is due."""

    weights: Mapping[str, Tensor]
    captured: CheckpointFiles | None
    arrived: Callable[[], None] = lambda: None


class CopyStream:
    """How copies reach the host. On a CPU they are there at once."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield  # copies are begun inside

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def before_update(self) -> None:
        """Called before the optimizer changes what is being copied."""

    def wait(self) -> None:
        """Wait until the host may read the copies."""


class GpuCopyStream(CopyStream):
    """A stream of its own: copies run during the next forward and backward passes, which only read weights. The
    optimizer (on the device) and the publisher (on the host) wait for them."""

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
    """Copies of one learner; each reuses the memory of the one before, so nobody may use that any more. Host memory for
    a GPU is page-locked for speed; locking takes seconds and runs during the first step. Frozen weights are copied
    once."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._stream: CopyStream | None = None
        self._reserving: threading.Thread | None = None

    def take(self, learner: Learner, with_training: bool) -> StateCopy:
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

    def _begin(self, learner: Learner, with_training: bool) -> StateCopy:
        """The result may be read only when it has arrived."""
        # Adapters are published in float32: they are small, and are merged at export.
        published = DTYPES[learner.settings.publish_dtype] if learner.settings.lora is None else None
        frozen = {name for name, weight in learner.model.named_parameters() if not weight.requires_grad}
        kept = {} if learner.masters is None else learner.masters.frozen  # on the CPU already, never changed
        weights, exact = dict[str, Tensor](), dict[str, Tensor]()
        for name, value in learner.state().items():
            if name in kept:
                weights[name] = exact[name] = value
                continue
            whole = learner.ranks.whole(value)  # one at a time, to limit memory
            weights[name] = self._copy_one(name, whole, name in frozen, published)
            if with_training:
                exact[name] = self._copy_one(name, whole, name in frozen)
        if not with_training:
            return StateCopy(weights, None)
        state = training_state(learner)
        training = {name: self._copy_one(name, learner.ranks.whole(value), False) for name, value in state.items()}
        return StateCopy(weights, checkpoint_files(exact, training))

    def _copy_one(self, name: str, tensor: Tensor, unchanging: bool, floating: torch.dtype | None = None) -> Tensor:
        """`floating`: the type to which floating-point numbers are rounded, on their device."""
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
        """Lock the memory for the first checkpoint with moments. An error will appear again when it is used."""
        with contextlib.suppress(RuntimeError):
            for name, weight in learner.trained().items():
                for kept in (name, *(f"{MOMENTS}{name}/{slot}" for slot in ("exp_avg", "exp_avg_sq"))):
                    self._room(kept, weight, weight.dtype)


def weights_digest(model: str | Path) -> str:
    """A digest of all weight files of a model folder with their names; copies of the folder have the same digest."""
    paths, adapter = sorted(model_folder(model).glob("*.safetensors")), adapter_of(model)
    paths += [] if adapter is None else [adapter.folder / PEFT_WEIGHTS]
    return blake3("".join(f"{path.name} {_file_hash(path)}\n" for path in paths).encode()).hexdigest()


def check_start_weights(folder: Path, digest: Callable[[], str], *, begins: bool, needed: bool) -> None:
    """When a run begins, write down the digest of its starting weights; when it resumes and needs them as the reference
    of a KL term, compare: `model.path` may have changed."""
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
            message = f"measured from the weights that this run began with ({path}: {recorded})"
            todo = "put them back into the model folder, or begin a new run"
            raise CheckpointError(f"trainer.objective.kl is {message}: {todo}")
