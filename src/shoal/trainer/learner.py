"""What training changes (weights, moments), and by which rules (advantage, loss, schedule)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from shoal.algorithms.advantages import Advantage
from shoal.algorithms.losses import Loss, LossParameters
from shoal.algorithms.registry import advantage_named, loss_named
from shoal.errors import ConfigError
from shoal.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Learner:
    """A model in float32 with its optimizer. The algorithm is three values that nobody else looks into."""

    model: Any
    optimizer: torch.optim.AdamW
    settings: TrainerSettings
    advantage: Advantage
    loss: Loss
    loss_parameters: LossParameters

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device


def new_learner(model: Any, settings: TrainerSettings) -> Learner:
    """A learner that has not learnt yet. The model is put in evaluation mode: dropout would be noise in the ratio."""
    model.eval()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    return Learner(
        model=model,
        optimizer=optimizer,
        settings=settings,
        advantage=advantage_named(settings.advantage),
        loss=loss_named(settings.loss),
        loss_parameters=LossParameters(settings.clip_epsilon, settings.clip_delta),
    )


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """The rate of a training step: a function of its number alone, so that a resume has no schedule to restore.

    >>> [learning_rate(TrainerSettings(learning_rate=1.0, warmup_steps=4), step) for step in (0, 1, 3, 9)]
    [0.25, 0.5, 1.0, 1.0]
    """
    if settings.warmup_steps == 0:
        return settings.learning_rate
    return settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps)


def choose_device(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('trainer.device is "cuda", but torch finds no GPU here; set it to "cpu" or "auto"')
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def make_deterministic(settings: TrainerSettings) -> None:
    """The same batch must give the same weights after a crash. These switches are the process's, not the learner's."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
