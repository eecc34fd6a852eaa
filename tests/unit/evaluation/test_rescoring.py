"""Kept completions, scored again, without a model or torch; and kill -9 in the middle of an evaluation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kit.evaluation import SAMPLING, FailingScorer, SortingEngine, evaluation, subject
from shoal.cli.main import main
from shoal.environments import EnvironmentSettings, build
from shoal.environments.settings import LengthSettings
from shoal.errors import ConfigError, DeadlineExceeded
from shoal.evaluation import job
from shoal.evaluation.job import SUMMARY, TASKS, EvaluationJob, choose, evaluate, finished, measure, rescore
from shoal.evaluation.records import IDENTITY, PROGRESS, EvaluationJournal
from shoal.rewards import DirectScorer, Job
from shoal.runtime.stop import StopToken

SORT = EnvironmentSettings(name="sort", length=LengthSettings(targets=(7, 9), text="in {target}"))
REWARD = """
tasks = [{"id": f"n{n}", "prompt": f"{n}1=", "answer": f"1{n}", "split": "held_out"} for n in range(2, 8)]
tasks.append({"prompt": "0=", "split": "train"})

def score(prompt, completion, answer):
    WHAT
"""


def of(settings: EnvironmentSettings, engine: Any = None) -> EvaluationJob:
    return EvaluationJob(subject(engine), choose(build(settings), SAMPLING), settings=settings)


def run(out: Path, given: EvaluationJob, scorer: Any = None) -> Any:
    return evaluate(given, lambda: scorer or DirectScorer(given.chosen.environment), out, StopToken())


def again(out: Path, settings: EnvironmentSettings, scorer: Any = None, stop: StopToken | None = None) -> Any:
    environment = build(settings)
    return rescore(out, settings, environment, lambda: scorer or DirectScorer(environment), stop or StopToken())


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def unscored_at(settings: EnvironmentSettings, *numbers: int) -> FailingScorer:
    return FailingScorer(build(settings), frozenset(numbers))


def reward_file(folder: Path, what: str) -> EnvironmentSettings:
    file = folder / "reward.py"
    file.write_text(REWARD.replace("WHAT", what))
    return EnvironmentSettings(file=file)


def test_what_could_not_be_scored_is_scored_again_and_all_is_as_if_nothing_had_failed(tmp_path: Path) -> None:
    run(tmp_path / "whole", of(SORT))
    before = run(tmp_path / "lost", of(SORT), unscored_at(SORT, 0, 1, 5, 17))
    assert before["unscored"]["samples"] == 4
    assert again(tmp_path / "lost", SORT)["unscored"] == {"samples": 0, "share": 0.0, "tasks": []}
    assert content(tmp_path / "lost") == content(tmp_path / "whole")


def test_a_mended_grader_gives_its_own_scores_and_the_same_command_knows_them(tmp_path: Path) -> None:
    broken = reward_file(tmp_path, "return 0.0")
    out = tmp_path / "out"
    assert run(out, of(broken))["avg_at_k"]["value"] == 0.0
    mended = reward_file(tmp_path, "return float(completion == answer)")
    found = again(out, mended)
    right = [text == "".join(sorted(row["prompt"][:2])) for row in rows(out) for text in row["completions"]]
    assert 0 < sum(right) < len(right)
    assert found["avg_at_k"]["value"] == pytest.approx(sum(right) / len(right))
    assert finished(out, of(mended).about) == json.loads((out / SUMMARY).read_bytes())


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / TASKS).to_pylist()
    return found


class Stopping:
    """Told to stop at the second batch."""

    def __init__(self, settings: EnvironmentSettings, stop: StopToken) -> None:
        self._inner, self._stop, self._calls = DirectScorer(build(settings)), stop, 0

    def scores(self, jobs: Sequence[Job]) -> Any:
        self._calls += 1
        if self._calls == 2:
            self._stop.set("test")
            raise DeadlineExceeded("told to stop")
        return self._inner.scores(jobs)

    def close(self) -> None:
        """Nothing is open."""


def test_told_to_stop_it_leaves_everything_as_it_was(tmp_path: Path) -> None:
    run(tmp_path, of(SORT), unscored_at(SORT, 3))
    before, stop = content(tmp_path), StopToken()
    assert again(tmp_path, SORT, Stopping(SORT, stop), stop) is None
    assert content(tmp_path) == before


def test_completions_of_another_prompt_are_not_rescored(tmp_path: Path) -> None:
    settings = reward_file(tmp_path, "return 0.0")
    out = tmp_path / "out"
    run(out, of(settings))
    text = (tmp_path / "reward.py").read_text()
    before = content(out)
    for old, new, said in (("{n}1=", "{n}2=", "n2 has another prompt now"), ("(2, 8)", "(2, 3)", "has no task")):
        (tmp_path / "reward.py").write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            again(out, settings)
        assert content(out) == before


def test_interrupted_evaluation_continues_with_new_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = reward_file(tmp_path, "return 0.0")
    stop, out, first = StopToken(), tmp_path / "out", SortingEngine()
    assert measure(of(broken, first), lambda: Stopping(broken, stop), out, stop, lambda _done, _total: None) is None
    assert (out / PROGRESS).exists()
    mended = reward_file(tmp_path, "return float(completion == answer)")
    partial = again(out, mended)
    assert partial["samples"] == 4 * len(first.asked)  # what was drawn and not scored, too
    assert not (out / SUMMARY).exists()
    assert main(["eval", "--rescore", str(out)]) == 0
    whole = len(of(mended).chosen.numbers)
    assert f"{out} has new scores of {len(first.asked)} of {whole} tasks; the command" in capsys.readouterr().out
    engine = SortingEngine()
    run(out, of(mended, engine))
    run(tmp_path / "whole", of(mended))
    assert len(first.asked) + len(engine.asked) == len(rows(out))
    for name in (TASKS, SUMMARY, IDENTITY):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_killed_while_replacing_results_continues_from_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    run(out, of(SORT), unscored_at(SORT, 0))

    def killed(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job, "write_results", killed)
        with pytest.raises(KeyboardInterrupt):
            again(out, SORT)
    engine = SortingEngine()
    assert finished(out, of(SORT).about) is None
    assert run(out, of(SORT, engine))["unscored"]["samples"] == 0
    assert engine.asked == []


def test_a_measurement_of_a_filter_has_its_scores_replaced(tmp_path: Path) -> None:
    given, failing = of(SORT), unscored_at(SORT, 0, 2)
    measure(given, lambda: failing, tmp_path, StopToken(), lambda _done, _total: None)
    assert again(tmp_path, SORT)["unscored"]["samples"] == 0
    journal = measure(given, lambda: failing, tmp_path, StopToken(), lambda _done, _total: None)
    assert journal is not None
    assert all(len(record.scores) == 4 for record in journal.records())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["environment.json", IDENTITY, PROGRESS]


def test_what_has_nothing_to_score_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no evaluation"):
        again(tmp_path, SORT)
    EvaluationJournal(tmp_path).open(of(SORT).about)
    with pytest.raises(ConfigError, match="keeps no completions"):
        again(tmp_path, SORT)
    about = replace(of(SORT), settings=None).about
    (tmp_path / IDENTITY).write_text(json.dumps({**about, "plan": {**about["plan"], "keep_text": True}}))
    with pytest.raises(ConfigError, match="another version of shoal"):
        again(tmp_path, SORT)


COMMAND = """
import sys
from shoal.cli.main import main
code = main(["eval", "--rescore", sys.argv[1]])
print("torch" in sys.modules)
sys.exit(code)
"""


def test_the_command_needs_no_model_and_no_torch(tmp_path: Path) -> None:
    settings = reward_file(tmp_path, "raise OSError('away')")
    out = tmp_path / "out"
    given = of(settings)
    assert run(out, given)["unscored"]["samples"] == 24
    reward_file(tmp_path, "return float(completion == answer)")
    done = subprocess.run([sys.executable, "-c", COMMAND, str(out)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"wrote {out}", "False"]
    assert "unscored" not in done.stdout
    assert json.loads((out / SUMMARY).read_bytes())["unscored"]["samples"] == 0


def test_what_the_command_cannot_mean_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--env", "sort"], "give a MODEL and --env SPEC, or --rescore DIR"),
        (["tiny", "--rescore", str(tmp_path)], "needs no model: leave tiny out"),
        (["--rescore", str(tmp_path / "none")], "there is no such folder"),
        (["--rescore", str(tmp_path)], "say with --env what the tasks are"),
        (["--rescore", str(tmp_path), "--set", "environment.name=sort"], "say with --env what it changes"),
    ):
        assert main(["eval", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


# kill -9 in the middle of an evaluation, in a process of its own: what was written down counts, the rest is redone

CHILD = """
import sys
from pathlib import Path
from kit.evaluation import SortingEngine, evaluation
from shoal.evaluation.job import evaluate
from shoal.rewards import DirectScorer
from shoal.runtime.stop import StopToken

class Stuck(SortingEngine):
    def generate(self, requests, proof=None):
        if len(self.asked) >= int(sys.argv[2]):
            print("stuck", flush=True)
            sys.stdin.read()  # until it is killed
        return super().generate(requests, proof)

given = evaluation(engine=Stuck())
evaluate(given, lambda: DirectScorer(given.chosen.environment), Path(sys.argv[1]), StopToken())
"""


@pytest.mark.parametrize("drawn", [4, 8])
def test_killed_and_resumed_gives_the_same_file(tmp_path: Path, drawn: int) -> None:
    whole = evaluation()
    evaluate(whole, lambda: DirectScorer(whole.chosen.environment), tmp_path / "whole", StopToken())
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "killed"), str(drawn)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    kept = (tmp_path / "killed" / PROGRESS).read_bytes().count(b'"drawn"')
    assert kept == drawn // SAMPLING.tasks_per_batch  # whatever was drawn, scored or not
    engine = SortingEngine()
    again = evaluation(engine=engine)
    evaluate(again, lambda: DirectScorer(again.chosen.environment), tmp_path / "killed", StopToken())
    assert len(engine.asked) == SAMPLING.tasks - kept * SAMPLING.tasks_per_batch
    assert (tmp_path / "killed" / TASKS).read_bytes() == (tmp_path / "whole" / TASKS).read_bytes()
