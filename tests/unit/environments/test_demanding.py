"""Who is about to score is refused at the start where the machine lacks what scoring needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.environments import EnvironmentSettings, build, require_scoring
from shoal.errors import EnvironmentSetupError


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    tests = json.dumps({"test_cases": [{"type": "stdin_stdout", "input": "", "output": "1"}]})
    rows = [
        {"problem_id": f"p{i}", "task_type": "prime_rl_code", "prompt": f"print {i}", "verification_info": tests}
        for i in range(20)
    ]
    file = tmp_path / "programs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def settings(programs: Path) -> list[EnvironmentSettings]:
    mixed = {"mix": [{"name": "dataset", "data": programs}, {"name": "sort"}], "scoring": {}}
    return [EnvironmentSettings(name="dataset", data=programs), EnvironmentSettings.model_validate(mixed)]


def test_programs_without_a_sandbox(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs.parent))
    for each in settings(programs):
        environment = build(each)
        with pytest.raises(EnvironmentSetupError, match=r"bwrap is not on the PATH; install bubblewrap"):
            require_scoring(environment)


def test_what_runs_no_programs_needs_no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_scoring(build(EnvironmentSettings(name="sort")))
    require_scoring(build(EnvironmentSettings.model_validate({"name": "sort", "scoring": {}})))
