"""What changes the digest of an environment: only what may change a prompt or a score."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.environments import EnvironmentSettings, build, scoring_of


def made(**tables: Any) -> Any:
    return build(EnvironmentSettings.model_validate(tables))


@pytest.mark.parametrize(
    "tables",
    [{"scoring": {}}, {"prompt": {}}, {"scoring": {"processes": 4}}, {"scoring": {"seconds": 10.0}, "prompt": {}}],
)
def test_a_table_that_changes_no_score_changes_no_digest(tables: dict[str, Any]) -> None:
    assert made(**tables).digest == made().digest
    changed = {**tables, "length": {"targets": [5]}}
    assert made(**changed).digest == made(length={"targets": [5]}).digest != made().digest


def test_the_number_of_processes_is_heard_all_the_same() -> None:
    assert scoring_of(made(scoring={"processes": 4})).processes == 4
    limited = [made(scoring={"seconds": 3.0, "processes": number}) for number in (0, 2)]
    assert limited[0].digest == limited[1].digest != made().digest


def test_what_changes_a_prompt_or_a_score_changes_the_digest() -> None:
    tables = [{}, {"scoring": {"seconds": 3.0}}, {"scoring": {"memory_mb": 99}}, {"prompt": {"thinking": "<think>"}}]
    assert len({made(**each).digest for each in tables}) == 4
