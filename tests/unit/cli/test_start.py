"""What `shoal run` says before anything is started: few held-out tasks, tasks that are not those the run began with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hubrun import Tasks, hub_config, make_folder

from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.hub.service import Hub
from shoal.protocol import ModelSize
from shoal.run.preflight import held_out_lines, refuse_changed, validator_lines
from shoal.run.recipe import Recipe
from shoal.runtime.clock import SystemClock

TINY = Path(__file__).parents[3] / "recipes" / "tiny.toml"
ONE_TASK = "tasks = [('1=', '1')]\ndef score(prompt, completion, answer):\n    return 1.0\n"


def test_few_held_out_tasks_are_said() -> None:
    assert [len(list(held_out_lines(Recipe(), tasks))) for tasks in (0, 1, 127, 128)] == [1, 1, 1, 0]
    assert "no task is held out" in next(held_out_lines(Recipe(), 0))
    never = Recipe.model_validate({"trainer": {"evaluate_every": 0}})
    assert list(held_out_lines(never, 0)) == [], "who asks for no score misses none"


def test_validators_that_cannot_keep_up_are_said_with_the_number_that_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """33.6 M tokens of 32 B weights: 8 GPUs of 266 TFLOP/s train for 3,027 s, one of 160 checks for 13,422 s."""
    large = ModelSize(parameters=32 * 10**9, payload_bytes=64 * 10**9)
    monkeypatch.setattr("shoal.run.preflight.announced_size", lambda _recipe: large)
    run, words = {"groups_per_step": 256, "group_size": 16, "max_new_tokens": 32768}, "and about 5 validators keep up"
    recipes = [
        Recipe.model_validate({"run": run, "trainer": {"processes": 8}, "validator": {"count": count}})
        for count in (1, 4, 5)
    ]
    assert [[words in line for line in validator_lines(recipe)] for recipe in recipes] == [[True], [True], []]
    large = ModelSize()
    assert list(validator_lines(recipes[0])) == [], "nothing is known of a model that is not here"
    large = ModelSize(parameters=32 * 10**9)
    assert main(["run", str(TINY), "--dry-run", "--set", "trainer.processes=8"]) == 0
    assert words in capsys.readouterr().err


def test_the_dry_run_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.py").write_text(ONE_TASK)
    (tmp_path / "one.toml").write_text('[environment]\nfile = "one.py"\n')
    assert main(["run", str(tmp_path / "one.toml"), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "no task is held out" in said.err
    assert "held out" not in said.out, "what it prints is a recipe"


def test_a_dry_run_without_the_model_says_what_it_could_not_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "large"\n')
    assert main(["run", str(recipe), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"there is no model folder {tmp_path / 'large'}: what needs it was not checked" in said.err
    assert "was not checked" not in said.out, "what it prints is a recipe"
    recipe.write_text('[model]\npath = "large"\n[environment]\nname = "sorting"\n')
    assert main(["run", str(recipe), "--dry-run"]) == 2, "all else is checked"
    recipe.write_text('[model]\npath = "large"\n')
    assert main(["run", str(recipe), "--prepare"]) == 2, "a run needs it"
    (tmp_path / "large").mkdir()
    assert main(["run", str(recipe), "--dry-run"]) == 2, "a folder that is there must be a model's"


def test_the_dry_run_refuses_what_the_run_in_that_folder_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ["run", str(TINY), "--dir", str(tmp_path / "run")]
    assert main([*request, "--prepare"]) == 0
    (tmp_path / "run" / "hub").mkdir()  # it has begun
    assert main([*request, "--dry-run"]) == 0
    capsys.readouterr()
    assert main([*request, "--dry-run", "--set", "trainer.lora.rank=8"]) == 2
    said = capsys.readouterr()
    assert "was made with another recipe" in said.err
    assert said.out == ""


def test_told_to_stop_before_a_command_listens_it_was_stopped() -> None:
    """As early as can be: the first thing that is done is the signal."""
    told = "m.app = lambda **_: os.kill(os.getpid(), signal.SIGTERM)"
    code = f"import os, signal, sys; import shoal.cli.main as m; {told}; sys.exit(m.main())"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 130


def test_a_changed_environment_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    folder, tasks = make_folder(tmp_path / "run"), Tasks()
    refuse_changed(folder, tasks)  # nothing has begun
    Hub(hub_config(folder), SystemClock()).close()
    refuse_changed(folder, tasks)
    tasks.digest = "f" * 64
    with pytest.raises(ConfigError, match=r"has changed since the run in .*run began: put it back, or start a new run"):
        refuse_changed(folder, tasks)


def test_a_change_that_has_consequences_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(TINY), "--dir", str(tmp_path / "run"), "--prepare", "--set", "hub.port=0"]
    assert main(command) == 0
    (tmp_path / "run" / "hub").mkdir()
    capsys.readouterr()
    assert main([*command, "--set", "trainer.guards.clip_fraction.react=skip", "--set", "trainer.keep_best=3"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("shoal: trainer.guards.clip_fraction.react was 'warn', is 'skip': a guard that skips")
    assert "keep_best" not in said
