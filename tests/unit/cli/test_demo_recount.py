"""The exported model scored again with plain transformers: it must come to what the trainer's own evaluation says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.engines.dialogue import greedy_answers
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings, build
from shoal.errors import DeadlineExceeded, ModelError, ShoalError
from shoal.models.load import load_model
from shoal.protocol import SamplingParameters
from shoal.run.demo import recount as module
from shoal.run.demo.recount import Question, recount, score
from shoal.run.recipe import Recipe
from shoal.runtime.stop import StopToken
from shoal.trainer.export import ModelCard, export_policy
from shoal.trainer.folder import Progress

TASKS, NEW_TOKENS = 96, 10
# Three to eight digits: prompts of six lengths, so that padding matters; the built-in policy sorts some of them.
SORT = EnvironmentSettings(name="sort", options={"min_digits": 3, "max_digits": 8})


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in policy, exported as the trainer does it."""
    loaded = load_model("tiny")
    folder = tmp_path_factory.mktemp("run") / "export"
    return export_policy(folder, loaded.model.state_dict(), loaded.files, ModelCard(Progress("run", 0)))


def question(export: Path, environment: EnvironmentSettings = SORT, **changes: Any) -> Question:
    values = {"export": export, "environment": environment, "tasks": TASKS, "max_new_tokens": NEW_TOKENS, "threads": 1}
    return Question(**{**values, **changes})


def recipe(environment: EnvironmentSettings = SORT, tasks: int = TASKS) -> Recipe:
    return Recipe.model_validate(
        {"run": {"max_new_tokens": NEW_TOKENS}, "environment": environment, "trainer": {"evaluate_tasks": tasks}}
    )


def trainers_score(environment: EnvironmentSettings, tasks: int = TASKS) -> float:
    loaded = load_model("tiny")
    sampling = SamplingParameters(temperature=1, max_new_tokens=NEW_TOKENS, eos_token_id=loaded.eos_token_id)
    made = build(environment)
    held_out = list(made.tasks("held_out"))[:tasks]
    prompts = [loaded.tokenizer.encode(task.prompt) for task in held_out]
    answers = greedy_answers(TorchEngine.wrap(loaded.model), prompts, [None] * len(held_out), sampling)
    scores = [made.score(t, loaded.tokenizer.decode(ids)).value for t, ids in zip(held_out, answers, strict=True)]
    return sum(scores) / len(scores)


@pytest.mark.parametrize("tasks", [1, 63, 65, 1000])
def test_it_comes_to_what_the_trainer_says(export: Path, tasks: int) -> None:
    counted = score(question(export, tasks=tasks), StopToken())
    assert counted.tasks == min(tasks, 256), "there are no more held-out tasks than the environment has"
    assert counted.score == trainers_score(SORT, tasks)
    assert tasks < 60 or 0.2 < counted.score < 0.95, "a score at either end would prove little"


def test_the_folders_own_sampling_settings_do_not_count(export: Path, tmp_path: Path) -> None:
    copy = tmp_path / "export"
    shutil.copytree(export, copy)
    (copy / "generation_config.json").write_text(
        '{"eos_token_id": [1, 5], "do_sample": true, "temperature": 5.0, "max_new_tokens": 1, "min_new_tokens": 9}'
    )
    assert score(question(copy), StopToken()) == score(question(export), StopToken())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", ""])
def test_a_damaged_or_absent_export_does_not_load(export: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "export"
    if name:
        shutil.copytree(export, copy)
        (copy / name).write_bytes(b"{damaged")
    with pytest.raises(ModelError, match=r"the export .*export does not load with transformers: \w+: "):
        score(question(copy), StopToken())


@pytest.mark.slow
def test_in_a_process_of_its_own(export: Path, tmp_path: Path) -> None:
    assert recount(export, recipe(), 120, StopToken()) == score(question(export), StopToken())
    with pytest.raises(ShoalError, match=r"could not be scored: the export .* does not load"):
        recount(tmp_path, recipe(), 120, StopToken())


class TestItsEnd:
    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
        """Every process that was started, to see that none is left."""
        processes: list[subprocess.Popen[bytes]] = []
        original = subprocess.Popen

        def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            processes.append(original(*arguments, **options))
            return processes[-1]

        monkeypatch.setattr(module.subprocess, "Popen", popen)
        return processes

    def test_a_deadline(self, tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
        with pytest.raises(DeadlineExceeded, match=r"was not scored within 0 s"):
            recount(tmp_path, recipe(), 0.01, StopToken())
        assert [process.returncode for process in started] == [-9]

    def test_a_stop(self, tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
        stop = StopToken()
        stop.set("SIGINT")
        with pytest.raises(DeadlineExceeded, match=r"stopped \(SIGINT\) before .* was scored"):
            recount(tmp_path, recipe(), 600, stop)
        assert [process.returncode for process in started] == [-9]


def test_the_model_side_is_plain_transformers() -> None:
    """Nothing of shoal's own models, engines or sampling may help here: the point is that nobody needs it."""
    source = Path(module.__file__).read_text()
    for package in ("models", "engines", "sampling", "trainer"):
        assert f"shoal.{package}" not in source
