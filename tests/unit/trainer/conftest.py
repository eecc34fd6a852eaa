"""For tests of the trainer: what it polls for is noticed soon."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.trainer.loop.POLL_S", 0.05)
    monkeypatch.setattr("shoal.trainer.loop.LOOK_S", 0.0)
