"""Saving, loading and copying a learner whose weights are spread over a crew.

    every rank, in front:   gather ─► rank 0: whole weights, to be published     (one tensor at a time)
                            copy own rows of weights and moments to the host
    every rank, beside:     write them ─► checkpoints/.part-TOKEN-model-00002-of-00002.safetensors
    rank 0, beside:         wait for the parts of the others ─► into the checkpoint, hashed, renamed (`checkpoint`)

All ranks see the same folder of checkpoints: on several machines it lies on a shared file system.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.errors import CheckpointError, DeadlineExceeded
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.files import resource_error, sync_folder
from shoal.trainer.checkpoint import MODEL, MOMENTS, TRAINING, Captured, restore_generators, training_state
from shoal.trainer.copies import Copied, Copies, published_type
from shoal.trainer.learner import Learner
from shoal.trainer.sharded import Parts, Rows, part_files, part_name, write_part
from shoal.trainer.sharding import own_rows
from shoal.trainer.together import COLLECTIVE_S, Together

STAGED = ".part-"
POLL_S = 0.02

Share = Mapping[str, Tensor | Rows]


@dataclass(frozen=True)
class SharedCopied(Copied):
    """Rank 0's copy: whole weights, and the files of a checkpoint that each rank writes a part of."""

    parts: Mapping[str, Callable[[Path], None]] | None = None

    def captured(self) -> Captured | None:
        return None if self.parts is None else Captured(self.parts)


class SharedCopies(Copies):
    """Rank 0's `Copies` of a learner that is spread over a crew. The other ranks run `copy_share` at the same time."""

    def __init__(self, crew: Together, staging: Path, tell: Callable[[str, bool], None]) -> None:
        """`staging` is the folder of checkpoints; `tell(token, with_training)` lets the others begin."""
        super().__init__()
        self._crew = crew
        self._staging = staging
        self._tell = tell

    def _begin(self, learner: Learner, with_training: bool) -> Copied:
        token = f"{STAGED}{os.urandom(8).hex()}"
        if with_training:
            self._sweep()
        self._tell(token, with_training)
        # One at a time: the whole model may be more than a device can hold.
        dtype = None if with_training else published_type(learner)
        whole = {
            name: self._copy_one(name, self._crew.whole(value), False, dtype) for name, value in learner.state().items()
        }
        if not with_training:
            return SharedCopied(whole, None)
        own = {name: partial(_write, share) for name, share in own_share(learner, self._crew).items()}
        others = {
            part_name(name, rank, self._crew.world): partial(_fetch, self._staging, token)
            for name in (MODEL, TRAINING)
            for rank in range(1, self._crew.world)
        }
        return SharedCopied(whole, {}, {**own, **others})

    def _sweep(self) -> None:
        """What is staged now was left by a crash: the checkpoint before this one is complete."""
        for path in self._staging.glob(f"{STAGED}*"):
            path.unlink()


class ShareWriter:
    """In the other ranks: writes parts beside training, one checkpoint at a time."""

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="share-writer")
        self._current: Future[None] | None = None

    def copy(self, learner: Learner, crew: Together, token: str, with_training: bool) -> None:
        """The other side of `SharedCopies.take`."""
        for value in learner.state().values():
            crew.whole(value)
        if with_training:
            self.check()
            self._current = self._pool.submit(self._write, own_share(learner, crew), token)

    def check(self) -> None:
        """Wait for the part before, and raise what went wrong with it."""
        if self._current is not None:
            self._current.result(COLLECTIVE_S)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _write(self, share: Mapping[str, Share], token: str) -> None:
        for name, tensors in share.items():
            hidden = self._staging / f".{token}-{name}"
            _write(tensors, hidden)
            hidden.rename(self._staging / f"{token}-{name}")  # its name says that it is complete


def own_share(learner: Learner, crew: Together) -> dict[str, Share]:
    """The files of this rank, copied to the host: its rows of everything, and of rank 0 also what has no rows."""
    contents = {MODEL: learner.state(), TRAINING: training_state(learner)}
    return {
        part_name(name, crew.rank, crew.world): {
            key: _own(value, crew) for key, value in tensors.items() if isinstance(value, DTensor) or crew.rank == 0
        }
        for name, tensors in contents.items()
    }


def restore_share(learner: Learner, folder: Path, crew: Together) -> None:
    """Read this rank's rows of a checkpoint, whoever wrote it: one process, or another number of them. Collective."""
    with Parts(part_files(folder, MODEL)) as parts:
        state = learner.state()
        if set(parts.names) != state.keys():
            raise CheckpointError(f"the weights in {folder} are for another model than the one that is trained here")
        for name, target in state.items():
            _read_into(target, parts, name, crew)
    with Parts(part_files(folder, TRAINING)) as parts:
        trained = learner.trained()
        moments = {
            name.removeprefix(MOMENTS): _moment(parts, name, trained, crew)
            for name in parts.names
            if name.startswith(MOMENTS)
        }
        learner.load_moments(moments)
        restore_generators({name: parts.read(name) for name in parts.names if not name.startswith(MOMENTS)})


@torch.no_grad()
def _read_into(target: Tensor, parts: Parts, name: str, crew: Together) -> None:
    if parts.shape(name) != tuple(target.shape):
        raise CheckpointError(
            f"weight {name} is {list(parts.shape(name))} in the checkpoint, the model's is {list(target.shape)}"
        )
    if isinstance(target, DTensor):
        local, rows = own_rows(target, crew)
        local.copy_(parts.read(name, rows))
    else:
        target.copy_(parts.read(name))


def _moment(parts: Parts, name: str, trained: Mapping[str, Tensor], crew: Together) -> Tensor:
    """One slot of the optimizer: rows like those of its weight, or a count that every rank has."""
    weight = trained.get(name.removeprefix(MOMENTS).rpartition("/")[0])
    if not isinstance(weight, DTensor) or parts.shape(name) != tuple(weight.shape):
        return parts.read(name)
    local, rows = own_rows(weight, crew)
    values = parts.read(name, rows).to(local.device)
    return DTensor.from_local(
        values, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
    )


def _own(value: Tensor, crew: Together) -> Tensor | Rows:
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    local, rows = own_rows(value, crew)
    return Rows(local.detach().to("cpu", copy=True), tuple(value.shape), rows.start)


def _write(tensors: Share, path: Path) -> None:
    """The part, on the disk when the call returns."""
    try:
        write_part(path, tensors)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        raise resource_error("write the checkpoint", path, error) from error


def _fetch(staging: Path, token: str, path: Path, clock: Clock = SystemClock()) -> None:
    """Put another rank's part at `path`, once it is complete."""
    staged, end_s = staging / f"{token}-{path.name}", clock.monotonic_s() + COLLECTIVE_S
    pause: Any = threading.Event()
    while not staged.exists():
        if clock.monotonic_s() >= end_s:
            raise DeadlineExceeded(
                f"{staged} was not there after {COLLECTIVE_S:.0f} s; do all trainer processes see the folder {staging}?"
            )
        pause.wait(POLL_S)
    staged.rename(path)
