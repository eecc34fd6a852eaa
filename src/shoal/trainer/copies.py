"""A learner's state copied to the CPU, so that it can be saved and published while training goes on.

    weights, moments (CPU or GPU) ─ one pass, in front of the next step ─► memory that every later copy uses again

The memory is as large as the state itself: 4 bytes per weight, 12 with the moments. On a GPU it is page-locked, so that
the copy runs at the speed of the bus. Weights that are not trained are copied once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.trainer.checkpoint import Captured, training_state
from shoal.trainer.learner import Learner


@dataclass(frozen=True)
class Copied:
    """The state of one version; good until the next copy is taken. `training` is None where no checkpoint is due."""

    weights: Mapping[str, Tensor]
    training: Mapping[str, Tensor] | None

    def captured(self) -> Captured | None:
        """As the large files of a checkpoint."""
        return None if self.training is None else Captured.of(self.weights, self.training)


class Copies:
    """Takes copies, each into the memory of the one before: whoever uses that must have finished."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def take(self, learner: Learner, with_training: bool) -> Copied:
        """The state as it is now; training may go on at once."""
        frozen = {name for name, weight in learner.model.named_parameters() if not weight.requires_grad}
        weights = self._copy(learner.state(), frozen)
        training = self._copy(training_state(learner)) if with_training else None
        if learner.device.type == "cuda":
            torch.cuda.synchronize(learner.device)  # the copies were only begun
        return Copied(weights, training)

    def _copy(self, tensors: Mapping[str, Tensor], unchanging: Collection[str] = ()) -> dict[str, Tensor]:
        return {name: self._copy_one(name, tensor, name in unchanging) for name, tensor in tensors.items()}

    def _copy_one(self, name: str, tensor: Tensor, unchanging: bool) -> Tensor:
        held = self._memory.get(name)
        if held is not None and unchanging:
            return held
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[name] = held
        return held.copy_(tensor, non_blocking=True)
