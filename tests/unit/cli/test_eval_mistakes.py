"""What `shoal eval` and `shoal filter` are given: found, or said what is wrong with it, before anything is loaded."""

import io
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from kit import Capture, Patch
from kit.cli import told
from shoal.cli.main import main
from shoal.cli.printing import counted
from shoal.environments import EnvironmentSettings, build
from shoal.errors import ConfigError
from shoal.run.sources import model_source, task_source
from shoal.trainer.demonstrations import reading
from shoal.trainer.folder import MARK

RECIPE = '[environment]\nname = "addition"\n[run]\nmax_new_tokens = 9\ntemperature = 0.7\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(10)))
    return path


SORT, ADDITION, MINE = {"options": {"max_digits": 9}}, {"name": "addition"}, {"file": "{tmp}/my.py"}
DATA = {"name": "dataset", "data": "{tmp}/data.jsonl"}


@pytest.mark.parametrize(("spec", "overrides", "settings", "whole"), [
    ("sort", ["environment.options.max_digits=9"], SORT, False),
    ("{tmp}/run/recipe.toml", [], ADDITION, False),
    ("{tmp}/my.py", [], MINE, False),
    ("{tmp}/run", [], ADDITION, False),
    ("{tmp}/data.jsonl", [], DATA, True),
    ("dataset:{tmp}/data.jsonl", [], DATA, True),
    *((f"{name}:{{tmp}}/data.jsonl", [], {**DATA, "options": {"format": name}}, True) for name in ("aime",
        "columns")),
])  # fmt: skip
def test_tasks_are_named_in_many_ways(tmp_path, data, spec, overrides, settings, whole):
    (tmp_path / "my.py").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(RECIPE)
    source = task_source(spec.format(tmp=tmp_path), overrides)
    found = source.settings.model_dump(mode="json", exclude_defaults=True)
    assert found == json.loads(json.dumps(settings).replace("{tmp}", str(tmp_path)))
    assert source.whole is whole
    assert (None if source.recipe is None else source.recipe.run.max_new_tokens) == (9 if "run" in spec else None)


def test_environment_of_a_run_is_not_changed_and_its_model_has_the_name_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with pytest.raises(ConfigError, match="give its recipe instead"):
        task_source(str(tmp_path), ["environment.name=sort"])
    export = tmp_path / "three" / "trainer" / "export"
    export.mkdir(parents=True)
    (tmp_path / "three" / "recipe.toml").write_text('[run]\nname = "tiny"\n')
    (export / MARK).write_text('{"progress": {"version": 1, "incarnation": 0}}')
    with model_source(str(tmp_path / "three")) as source:
        assert (source.name, source.where) == ("three", export), "not tiny: that is a built-in model"


@pytest.mark.parametrize("command", [["eval", "tiny", "--env"], ["filter", "tiny", "--out", "kept.parquet"]])
def test_programs_refused_without_a_sandbox(command, tmp_path, monkeypatch, capsys):
    tests = json.dumps({"test_cases": [{"type": "stdin_stdout", "input": "", "output": "1"}]})
    row = {"problem_id": "p", "task_type": "prime_rl_code", "prompt": "print 1", "verification_info": tests}
    (tmp_path / "programs.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("shoal.run.models.measuring.open_subject", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    error = told(capsys, 2, *command, "programs.jsonl").err
    assert "bwrap is not on the PATH; install bubblewrap" in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "programs.jsonl"]


def test_progress_in_a_log_is_a_line_now_and_then() -> None:
    now, file = [0.0], io.StringIO()
    with counted("evaluating", Console(file=file), lambda: now[0]) as report:
        report(20, 100)
        for now[0], done in ((5.0, 30), (10.0, 40), (15.0, 50), (20.0, 60)):
            report(done, 100, "loss 0.5" if done == 60 else "")
    assert file.getvalue().splitlines() == [
        "evaluating: continues: 20 of 100 tasks are done",
        "evaluating: 40 of 100 tasks, 30 s left",
        "evaluating: 60 of 100 tasks, 20 s left, loss 0.5",
    ]


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    path = tmp_path / "demos.jsonl"
    rows = [{"prompt": f"{digits}=", "completion": "".join(sorted(digits))} for digits in ("312", "54", "54", "987")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_request_that_failed_before_training_blocks_nobody(demos: Path, tmp_path: Path, capsys: Capture) -> None:
    request = ("sft", "tiny", "--data", demos, "--out", tmp_path / "out", "--steps", 1, "--batch", 2, "--validation")
    assert "lower --validation" in told(capsys, 2, *request, 2000).err
    told(capsys, 0, *request, 1)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_told_to_stop_while_it_starts(demos: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    opened = reading.Demonstrations.__init__

    def slow(self: reading.Demonstrations, paths: Sequence[Path]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        opened(self, paths)

    monkeypatch.setattr(reading.Demonstrations, "__init__", slow)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listens to the signal yet"))
    try:
        assert main(["sft", "tiny", "--data", str(demos), "--out", str(tmp_path / "out")]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.glob("out*"))


def test_right_answers_as_demonstrations_are_verified_by_the_task_they_name(tmp_path: Path, capsys: Capture) -> None:
    demos, sort = tmp_path / "demos.jsonl", build(EnvironmentSettings(name="sort"))
    assert main(["data", "demos", "sort", "--out", str(demos), "--count", "3"]) == 0
    rows = [json.loads(line) for line in demos.read_text().splitlines()]
    tasks = [sort.tasks("train")[index] for index in range(3)]
    assert rows == [{"task": task.id, "prompt": task.prompt, "completion": task.answer} for task in tasks]
    rows[1]["completion"] = "7"
    demos.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = ["--out", str(tmp_path / "out"), "--steps", "1", "--validation", "0"]
    shown = told(capsys, 0, "sft", "tiny", "--data", demos, "--env", "sort", "--verify", *out).out
    assert "- verified            1   e.g. row 1 (demos.jsonl line 2): its reward is below 1" in shown
    assert "kept                  2" in shown
