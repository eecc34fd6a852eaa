"""The [trainer] section: its defaults are usable, its mistakes are refused, and reading it costs no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from pydantic import ValidationError

from shoal.algorithms.registry import ADVANTAGES, LOSSES
from shoal.trainer.settings import AdvantageName, LossName, TrainerSettings


def test_the_words_are_those_of_the_registry() -> None:
    assert set(get_args(AdvantageName)) == set(ADVANTAGES)
    assert set(get_args(LossName)) == set(LOSSES)


def test_every_setting_is_described() -> None:
    assert [name for name, field in TrainerSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1e-3}, "Extra inputs"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"clip_delta": 1.1}, "must be above 1"),
        ({"clip_delta": 1.3, "objective": {"clip_high": 0.4}}, r"must be above 1 \+ objective.clip_high \(1.4\)"),
        ({"betas": (0.9, 1.0)}, r"must both be in \[0, 1\)"),
        ({"minibatches": 0}, "greater than or equal to 1"),
        ({"publish_dtype": "int4"}, "float32"),
    ],
)
def test_mistakes_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerSettings.model_validate(values)


def test_settings_and_config_are_read_without_torch() -> None:
    code = "import sys, shoal.trainer.settings, shoal.trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
