"""What one trainer process needs to start; put together by the CLI, or by a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.environments import Environment, EnvironmentSettings
from shoal.protocol import SignedDocument, SigningKey
from shoal.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class TrainerConfig:
    """`folder` is the trainer's own (checkpoints, metrics, export); `seed` is the run's and orders minibatches.

    `scored_by` is the [environment] section: what the trainer evaluates itself is then scored in processes with limits.
    """

    folder: Path
    settings: TrainerSettings
    model: str
    environment: Environment
    origin_folder: Path
    hub_url: str
    root_fingerprint: str | None
    key: SigningKey
    certificate: SignedDocument
    seed: int = 0
    scored_by: EnvironmentSettings | None = None
