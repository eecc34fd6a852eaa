"""What `shoal eval` and `shoal filter` are given: found, or said what is wrong with it, before anything is loaded."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from kit import Capture, Patch
from shoal.cli.main import main
from shoal.cli.printing import counted
from shoal.environments import EnvironmentSettings, build
from shoal.errors import ConfigError, EnvironmentSetupError, ModelError
from shoal.models import model_folder
from shoal.run.sources import model_source, task_source
from shoal.trainer.demonstrations import reading
from shoal.trainer.folder import MARK

RECIPE = '[environment]\nname = "addition"\n[run]\nmax_new_tokens = 9\ntemperature = 0.7\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(10)))
    return path


class TestSpecs:
    def test_a_name(self) -> None:
        source = task_source("sort", ["environment.options.max_digits=9"])
        assert (source.settings.name, source.settings.options, source.whole) == ("sort", {"max_digits": 9}, False)

    def test_a_recipe_brings_its_sampling(self, tmp_path: Path) -> None:
        (tmp_path / "my.toml").write_text(RECIPE)
        source = task_source(str(tmp_path / "my.toml"))
        assert (source.settings.name, source.recipe.run.max_new_tokens) == ("addition", 9)

    def test_a_reward_file(self, tmp_path: Path) -> None:
        (tmp_path / "my.py").write_text("")
        assert task_source(str(tmp_path / "my.py")).settings.file == tmp_path / "my.py"

    def test_the_environment_of_a_run_is_not_changed(self, tmp_path: Path) -> None:
        (tmp_path / "recipe.toml").write_text(RECIPE)
        source = task_source(str(tmp_path))
        assert (source.settings.name, source.label, source.run is not None) == ("addition", "addition", True)
        with pytest.raises(ConfigError, match="give its recipe instead"):
            task_source(str(tmp_path), ["environment.name=sort"])

    @pytest.mark.parametrize("prefix", ["", "dataset:", "aime:", "columns:"])
    def test_a_data_file_is_meant_whole(self, data: Path, prefix: str) -> None:
        source = task_source(f"{prefix}{data}")
        assert (source.settings.name, source.settings.data, source.whole) == ("dataset", data, True)
        assert source.settings.options == ({"format": prefix[:-1]} if prefix in ("aime:", "columns:") else {})

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ("srot", "did you mean 'sort'"),
            ("gpqa:/none.jsonl", "no data at /none.jsonl"),
            ("gqpa:x", "'gpqa'"),
            ("dataset:/none.toml", "no data at /none.toml"),
        ],
    )
    def test_what_is_not_there(self, spec: str, said: str) -> None:
        with pytest.raises(EnvironmentSetupError, match=said):
            task_source(spec)

    def test_a_runs_model_is_called_as_its_folder_is(self, tmp_path: Path) -> None:
        export = tmp_path / "three" / "trainer" / "export"
        export.mkdir(parents=True)
        (tmp_path / "three" / "recipe.toml").write_text('[run]\nname = "tiny"\n')
        (export / MARK).write_text('{"progress": {"version": 1, "incarnation": 0}}')
        with model_source(str(tmp_path / "three")) as source:
            assert (source.name, source.where) == ("three", export), "not tiny: that is a built-in model"

    def test_a_model_that_is_not_there(self) -> None:
        with model_source("/none/such") as source, pytest.raises(ModelError, match="no model folder"):
            model_folder(source.where)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["eval", "tiny"], 2, "give a MODEL and --env SPEC, or --rescore DIR"),
        (["eval", "tiny", "--rescore", "."], 2, "needs no model: leave tiny out"),
        (["eval", "--rescore", ".", "--out", "x", "--tasks", "4"], 2, "leave --tasks, --out out"),
        (["eval", "--rescore", "none"], 2, "there is no such folder"),
        (["eval", "--rescore", "."], 2, "say with --env what the tasks are"),
        (["eval", "--rescore", ".", "--set", "environment.name=sort"], 2, "say with --env what it changes"),
        (["eval", "tiny", "--env", "srot"], 2, "there is no environment 'srot' (did you mean 'sort'?)"),
        (["eval", "tiny", "--env", "sort", "--samples", "0"], 2, "--samples 0: give 1 to 4096"),
        (["eval", "tiny", "--env", "sort", "--samples", "2", "--temperature", "0"], 2, "draws the same completion 2"),
        (["eval", "tiny", "--env", "sort", "--split", "test"], 2, "--split test: there are held_out, train, all"),
        (["eval", "tiny", "--env", "sort", "--set", "run.steps=1"], 2, "only settings of [environment] matter"),
        (["eval", "/none/such", "--env", "sort"], 2, "there is no model folder /none/such"),
        (["eval", "tiny", "--env", "sort", "--engine", "abacus"], 2, "there is no engine 'abacus'"),
        (["filter", "tiny", "sort", "--out", "x.jsonl"], 2, "let its name end in .parquet"),
        (["filter", "tiny", "sort", "--out", "x.parquet", "--keep", "half"], 2, "--keep half: give two rates"),
        (["filter", "tiny", "sort", "--out", "x.parquet", "--keep", "0.9:0.1"], 2, "the lower first"),
        (["filter", "tiny", "sort", "--out", "x.parquet", "--samples", "0"], 2, "--samples 0"),
        (["filter", "tiny", "/none.jsonl", "--out", "x.parquet"], 2, "there is no data at /none.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str], code: int, said: str, tmp_path: Path, monkeypatch: Patch,
    capsys: Capture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_is_somebody_elses_is_not_replaced(tmp_path: Path, data: Path, capsys: Capture) -> None:
    out = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"a": [1]}), out)
    before = out.read_bytes()
    assert main(["filter", "tiny", str(data), "--out", str(out)]) == 2
    assert "is there and was not written by shoal filter: choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "out", "said"),
    [
        ("eval tiny --env", "taken", "holds thesis.tex"), ("filter tiny", "free.parquet", "holds thesis.tex"),
        ("eval tiny --env", "taken/thesis.tex", "is a file"), ("filter tiny", "taken/thesis.tex/x.parquet", "a file"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_take_results_is_refused_before_tasks_or_models_are_loaded(
    command: str, out: str, said: str, tmp_path: Path, capsys: Capture
) -> None:
    for name in ("taken", "free.parquet.work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("mine")
    assert main([*command.split(), "no-such-tasks.jsonl", "--out", str(tmp_path / out)]) in (2, 3)
    assert said in capsys.readouterr().err
    assert len(list(tmp_path.rglob("*"))) == 4


@pytest.mark.parametrize("command", [["eval", "tiny", "--env"], ["filter", "tiny", "--out", "kept.parquet"]])
def test_programs_refused_without_a_sandbox(
    command: list[str], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    tests = json.dumps({"test_cases": [{"type": "stdin_stdout", "input": "", "output": "1"}]})
    row = {"problem_id": "p", "task_type": "prime_rl_code", "prompt": "print 1", "verification_info": tests}
    (tmp_path / "programs.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("shoal.evaluation.subject.open_subject", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    assert main([*command, "programs.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "bwrap is not on the PATH; install bubblewrap" in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "programs.jsonl"]


MINE = """
tasks = [{"prompt": f"{n}+1=", "answer": str(n + 1), "split": "train" if n < 8 else "held_out"} for n in range(10)]
tasks[9]["prompt"] = " 3+1 ="

def score(prompt, completion, answer):
    return float(completion == answer)
"""


def test_a_leak_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    assert main(["eval", "tiny", "--env", "mine.py", "--trained-on", "mine.py"]) == 5
    error = capsys.readouterr().err
    assert "1 of the evaluated tasks are in the training set: mine/9; --allow-leaks leaves them out" in error
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


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


def said(capsys: Capture, *arguments: object) -> str:
    assert main(["sft", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify"], "--verify: there is no environment here; give one with --env"),
        (["--best", "0.5"], "belong together"),
        (["--rank", "there"], "belong together"),
        (["--set", "trainer.loss=plain"], "trainer.loss means nothing to a warm start"),
        (["--set", "trainer.processes=2"], "trainer.processes means nothing to a warm start"),
        (["--set", "trainer.learning_rat=1"], "[trainer] has no key 'learning_rat'; did you mean 'learning_rate'?"),
        (["--set", "run.steps=3"], "run.steps means nothing to a warm start"),
        (["--set", "environment.options.max_digits=9"], "there is no environment here; give one with --env"),
        (["--require", "("], "--require (: no regular expression"),
        (["--max-tokens", "2"], "no demonstration is left: read 4; - readable 0; - length 4 e.g. row 0 (demos.jsonl"),
        (["--env", "srt"], "there is no environment 'srt' (did you mean 'sort'?)"),
    ],
)
def test_mistakes(demos: Path, tmp_path: Path, capsys: Capture, options: list[str], message: str) -> None:
    assert message in said(capsys, "tiny", "--data", demos, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_data_that_is_no_data(tmp_path: Path, capsys: Capture) -> None:
    out = ["--out", tmp_path / "out"]
    assert "there is no data at" in said(capsys, "tiny", "--data", tmp_path / "no.jsonl", *out)
    (tmp_path / "empty.jsonl").touch()
    assert "is empty: there is nothing to train on; check --data" in said(
        capsys, "tiny", "--data", tmp_path / "empty.jsonl", *out
    )
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    )
    chat = said(capsys, "tiny", "--data", tmp_path / "chat.jsonl", *out)
    assert "the demonstrations are messages, but the model has no chat template" in chat


def test_a_folder_that_is_somebodys_is_left_alone(demos: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert "is not an export of shoal" in said(capsys, "tiny", "--data", demos, "--out", tmp_path / "mine")


def test_a_work_folder_that_is_somebodys_is_left_alone(demos: Path, tmp_path: Path, capsys: Capture) -> None:
    work = tmp_path / "mine.work"
    (work / "corpus").mkdir(parents=True)
    (work / "corpus" / "precious").touch()
    (work / "corpus.txt").touch()
    told = said(capsys, "tiny", "--data", demos, "--out", tmp_path / "mine", "--steps", "1")
    assert f"{work} is there and is not of a warm start: move it away, or choose another --out" in told
    assert sorted(path.name for path in work.rglob("*")) == ["corpus", "corpus.txt", "precious"]


def test_request_that_failed_before_training_blocks_nobody(demos: Path, tmp_path: Path, capsys: Capture) -> None:
    request = ("tiny", "--data", demos, "--out", tmp_path / "out", "--steps", 1, "--batch", 2, "--validation")
    assert "lower --validation" in said(capsys, *request, 2000)
    assert main(["sft", *map(str, request), "1"]) == 0
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


def test_right_answers_as_demonstrations(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "demos.jsonl"
    assert main(["data", "demos", "sort", "--out", str(out), "--count", "5"]) == 0
    sort = build(EnvironmentSettings(name="sort"))
    tasks = [sort.tasks("train")[index] for index in range(5)]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"task": task.id, "prompt": task.prompt, "completion": task.answer} for task in tasks
    ]
    capsys.readouterr()
    assert main(["data", "demos", "sort", "--out", str(out)]) == 2
    assert "give a file that is not there yet" in capsys.readouterr().err
    other = str(tmp_path / "other.jsonl")
    assert main(["data", "demos", "sort", "--out", other, "--form", "It is 7"]) == 2
    assert "say with {answer} where the answer goes" in capsys.readouterr().err
    small = ["--set", "environment.train_size=20"]
    assert main(["data", "demos", "sort", "--out", other, "--form", "It is {answer}", *small]) == 2
    assert "none of the 20 tasks has an answer that, written as 'It is {answer}', is right" in capsys.readouterr().err


def test_demonstrations_are_verified_by_the_task_they_name(tmp_path: Path, capsys: Capture) -> None:
    demos = tmp_path / "demos.jsonl"
    assert main(["data", "demos", "sort", "--out", str(demos), "--count", "3"]) == 0
    rows = [json.loads(line) for line in demos.read_text().splitlines()]
    rows[1]["completion"] = "7"
    demos.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = ["--out", str(tmp_path / "out"), "--steps", "1", "--validation", "0"]
    assert main(["sft", "tiny", "--data", str(demos), "--env", "sort", "--verify", *out]) == 0
    told = capsys.readouterr().out
    assert "- verified            1   e.g. row 1 (demos.jsonl line 2): its reward is below 1" in told
    assert "kept                  2" in told
