"""A learner's state copied to the CPU, so that it can be saved and published while training goes on.

    weights, moments (CPU or GPU) ─ one pass, in front of the next step ─► memory that every later copy uses again

The memory is as large as the state itself: 4 bytes per weight, 12 with the moments. On a GPU it is page-locked, so that
the copy runs at the speed of the bus. Weights that are not trained are copied once. Where no checkpoint is due, weights
are rounded to the type that is published before they leave the device: fewer bytes, and no rounding on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models.load import DTYPES
from shoal.trainer.checkpoint import Captured, training_state
from shoal.trainer.learner import Learner


@dataclass(frozen=True)
class Copied:
    """The state of one version; good until the next copy is taken. `training` is None where no checkpoint is due, and
    `weights` are then of the type that is published."""

    weights: Mapping[str, Tensor]
    training: Mapping[str, Tensor] | None

    def captured(self) -> Captured | None:
        """As the large files of a checkpoint."""
        return None if self.training is None else Captured.of(self.weights, self.training)


class Copies:
    """Takes copies, each into the memory of the one before: whoever uses that must have finished."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, learner: Learner, with_training: bool) -> Copied:
        """The state as it is now; training may go on at once."""
        copied = self._begin(learner, with_training)
        if learner.device.type == "cuda":
            torch.cuda.synchronize(learner.device)  # the copies were only begun
        return copied

    def _begin(self, learner: Learner, with_training: bool) -> Copied:
        """Nobody reads what it returns before the device has been waited for."""
        frozen = {name for name, weight in learner.model.named_parameters() if not weight.requires_grad}
        kept = {} if learner.masters is None else learner.masters.frozen  # on the CPU already, and nobody changes them
        dtype = None if with_training else published_type(learner)
        weights = {
            name: value if name in kept else self._copy_one(name, value, name in frozen, dtype)
            for name, value in learner.state().items()
        }
        if not with_training:
            return Copied(weights, None)
        training = {name: self._copy_one(name, value, False) for name, value in training_state(learner).items()}
        return Copied(weights, training)

    def _copy_one(self, name: str, tensor: Tensor, unchanging: bool, floating: torch.dtype | None = None) -> Tensor:
        """`floating` is what floating-point numbers are rounded to, on the device where they are."""
        dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
        held = self._memory.get((name, dtype))
        if held is not None and unchanging:
            return held
        if held is None or held.shape != tensor.shape:
            held = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[name, dtype] = held
        return held.copy_(tensor, non_blocking=True)


def published_type(learner: Learner) -> torch.dtype | None:
    """The type that is published; None for adapters, which are small, and are merged exactly when they are exported."""
    return DTYPES[learner.settings.publish_dtype] if learner.settings.lora is None else None
