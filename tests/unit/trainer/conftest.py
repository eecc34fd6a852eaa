"""For tests of the trainer: what it polls for is noticed soon."""

import pytest
from trainer_stubs import make_group, tiny_model

from shoal.protocol import TrainingGroup


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.trainer.loop.POLL_S", 0.05)
    monkeypatch.setattr("shoal.trainer.loop.LOOK_S", 0.0)


@pytest.fixture(scope="session")
def groups() -> list[TrainingGroup]:
    """Drawn by another model than the one that tests train: ratios differ from 1."""
    behaviour = tiny_model(seed=5)
    return [make_group(unit, 0, behaviour) for unit in range(4)]
