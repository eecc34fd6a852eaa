"""`shoal sft` and `shoal data demos` in this process: mistakes are one line with exit code 2, choosing only chooses."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.main import main
from shoal.cli.printing import counted
from shoal.environments import EnvironmentSettings, build
from shoal.trainer.demonstrations import reading

Capture = pytest.CaptureFixture[str]


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
        (["--verify"], "--verify: give the environment that knows what is right"),
        (["--best", "0.5"], "--best and --best-per-prompt are by rank: give the classifier's folder with --rank"),
        (["--rank", "there"], "--rank: say how many to keep, with --best SHARE or --best-per-prompt K"),
        (["--set", "trainer.loss=plain"], "trainer.loss means nothing to a warm start"),
        (["--set", "trainer.processes=2"], "trainer.processes means nothing to a warm start, which is one process"),
        (["--set", "trainer.learning_rat=1"], "[trainer] has no key 'learning_rat'; did you mean 'learning_rate'?"),
        (["--set", "run.steps=3"], "only settings of [trainer] and [environment] matter here"),
        (["--set", "environment.options.max_digits=9"], "there is no environment here; give one with --env"),
        (["--decay", "fast"], "--decay fast: there are none, linear, cosine"),
        (["--select-only"], "rows are written as JSON lines; let its name end in .jsonl"),
        (["--require", "("], "--require (: no regular expression"),
        (
            ["--max-tokens", "2"],
            "no demonstration is left of 4 (left out by: length 4); for example by length: row 0 (demos.jsonl",
        ),
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


def test_a_request_that_failed_before_it_learnt_anything_is_in_nobodys_way(
    demos: Path, tmp_path: Path, capsys: Capture
) -> None:
    request = ("tiny", "--data", demos, "--out", tmp_path / "out", "--steps", 1, "--batch", 2, "--validation")
    assert "lower --validation" in said(capsys, *request, 2000)
    assert main(["sft", *map(str, request), "1"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_told_to_stop_while_it_starts(demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_choosing_only(demos: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "chosen.jsonl"
    command = ["sft", "tiny", "--data", demos, "--out", out, "--select-only", "--max-tokens", "7"]
    assert main([str(each) for each in command]) == 0
    told = capsys.readouterr().out
    assert "- length              2   e.g. row 0 (demos.jsonl line 1): more than 7 tokens" in told
    assert "- duplicates          1   e.g. row 2 (demos.jsonl line 3): the same as row 1" in told
    assert f"wrote {out}: 1 demonstrations" in told
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"prompt": "54=", "completion": "45"}]
    assert not list(tmp_path.glob("*.work"))
    assert "is there already" in said(capsys, *command[1:])


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
    assert "is there already" in capsys.readouterr().err
    other = str(tmp_path / "other.jsonl")
    assert main(["data", "demos", "sort", "--out", other, "--form", "It is 7"]) == 2
    assert "say with {answer} where the answer goes" in capsys.readouterr().err
    small = ["--set", "environment.train_size=20"]
    assert main(["data", "demos", "sort", "--out", other, "--form", "It is {answer}", *small]) == 2
    assert "none of the 20 tasks has an answer that, written as 'It is {answer}', is right" in capsys.readouterr().err


def test_demonstrations_are_verified_by_the_task_they_name(tmp_path: Path, capsys: Capture) -> None:
    demos, chosen = tmp_path / "demos.jsonl", tmp_path / "chosen.jsonl"
    assert main(["data", "demos", "sort", "--out", str(demos), "--count", "3"]) == 0
    rows = [json.loads(line) for line in demos.read_text().splitlines()]
    rows[1]["completion"] = "7"
    demos.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["sft", "tiny", "--data", str(demos), "--env", "sort", "--verify", "--out", str(chosen), "--select-only"]
    assert main(command) == 0
    assert "- verified            1   e.g. row 1 (demos.jsonl line 2): its reward is below 1" in capsys.readouterr().out
    assert [json.loads(line)["task"] for line in chosen.read_text().splitlines()] == ["sort/train/0", "sort/train/2"]


def test_progress_says_what_else_there_is_to_say() -> None:
    told, now = io.StringIO(), iter(range(0, 1000, 20))
    with counted("training", Console(file=told, width=100), lambda: float(next(now)), unit="steps") as report:
        report(0, 10)
        report(5, 10, "loss 0.5")
    assert told.getvalue() == "training: 5 of 10 steps, 20 s left, loss 0.5\n"
