"""Kept completions, scored again without a model or torch: of finished, interrupted and filtering measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

from kit import Capture, Patch
from kit.evaluation import SAMPLING, FailingScorer, SortingEngine, subject
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
EXACT = "return float(completion == answer)"


def of(settings: EnvironmentSettings, engine: Any = None) -> EvaluationJob:
    return EvaluationJob(subject(engine), choose(build(settings), SAMPLING), settings)


def run(out: Path, given: EvaluationJob, scorer: Any = None) -> Any:
    return evaluate(given, lambda: scorer or DirectScorer(given.chosen.environment), out, StopToken())


def again(out: Path, settings: EnvironmentSettings, scorer: Any = None, stop: StopToken | None = None) -> Any:
    environment = build(settings)
    return rescore(settings, environment, lambda: scorer or DirectScorer(environment), out, stop or StopToken())


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / TASKS).to_pylist()
    return found


def reward_file(folder: Path, what: str) -> EnvironmentSettings:
    (folder / "reward.py").write_text(REWARD.replace("WHAT", what))
    return EnvironmentSettings(file=folder / "reward.py")


class Stopping(DirectScorer):
    """Told to stop at the second batch."""

    def __init__(self, settings: EnvironmentSettings, stop: StopToken) -> None:
        super().__init__(build(settings))
        self._stop, self._calls = stop, 0

    def scores(self, jobs: Sequence[Job]) -> Any:
        self._calls += 1
        if self._calls == 2:
            self._stop.set("test")
            raise DeadlineExceeded("told to stop")
        return super().scores(jobs)


def test_rescored_results_are_as_if_scoring_had_never_failed(tmp_path: Path) -> None:
    run(tmp_path / "whole", of(SORT))
    before = run(tmp_path / "lost", of(SORT), FailingScorer(build(SORT), frozenset({0, 1, 5, 17})))
    assert before["unscored"]["samples"] == 4
    assert again(tmp_path / "lost", SORT)["unscored"] == {"samples": 0, "share": 0.0, "tasks": []}
    assert content(tmp_path / "lost") == content(tmp_path / "whole")


def test_mended_grader_replaces_all_scores_and_the_same_command_knows_the_results(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, of(reward_file(tmp_path, "return 0.0")))["avg_at_k"]["value"] == 0.0
    mended = reward_file(tmp_path, EXACT)
    found = again(out, mended)
    right = [text == "".join(sorted(row["prompt"][:2])) for row in rows(out) for text in row["completions"]]
    assert 0 < sum(right) < len(right)
    assert found["avg_at_k"]["value"] == pytest.approx(sum(right) / len(right))
    assert finished(out, of(mended).about) == json.loads((out / SUMMARY).read_bytes())


def test_grader_that_breaks_the_command_costs_no_generation(tmp_path: Path, monkeypatch: Patch) -> None:
    first, second = SortingEngine(), SortingEngine()
    with monkeypatch.context() as patched:
        patched.setattr(DirectScorer, "scores", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, of(SORT, first))
    run(tmp_path, of(SORT, second))
    assert (len(first.asked) > 0, len(first.asked) + len(second.asked)) == (True, SAMPLING.tasks)


def test_stopped_rescoring_leaves_everything_as_it_was(tmp_path: Path) -> None:
    run(tmp_path, of(SORT), FailingScorer(build(SORT), frozenset({3})))
    before, stop = content(tmp_path), StopToken()
    assert again(tmp_path, SORT, Stopping(SORT, stop), stop) is None
    assert content(tmp_path) == before


def test_completions_of_another_prompt_are_not_rescored(tmp_path: Path) -> None:
    settings, out = reward_file(tmp_path, "return 0.0"), tmp_path / "out"
    run(out, of(settings))
    text, before = (tmp_path / "reward.py").read_text(), content(out)
    for old, new, said in (("{n}1=", "{n}2=", "n2 has another prompt now"), ("(2, 8)", "(2, 3)", "has no task")):
        (tmp_path / "reward.py").write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            again(out, settings)
        assert content(out) == before


def test_interrupted_evaluation_continues_with_new_scores(tmp_path: Path, capsys: Capture) -> None:
    broken = reward_file(tmp_path, "return 0.0")
    stop, out, first = StopToken(), tmp_path / "out", SortingEngine()
    assert measure(of(broken, first), lambda: Stopping(broken, stop), out, stop, lambda _done, _total: None) is None
    mended = reward_file(tmp_path, EXACT)
    assert again(out, mended)["samples"] == 4 * len(first.asked)  # what was drawn and not scored, too
    assert not (out / SUMMARY).exists()
    assert main(["eval", "--rescore", str(out)]) == 0
    whole, said = len(of(mended).chosen.numbers), capsys.readouterr()
    assert f"{out} has new scores of {len(first.asked)} of {whole} tasks; the command" in said.out
    assert "continues" not in said.err, "nothing was scored before"
    engine = SortingEngine()
    run(out, of(mended, engine))
    run(tmp_path / "whole", of(mended))
    assert len(first.asked) + len(engine.asked) == len(rows(out))
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("where", ["write_atomically", "sync_folder", "write_records"])
def test_killed_while_replacing_results_draws_nothing_again(tmp_path: Path, monkeypatch: Patch, where: str) -> None:
    run(tmp_path, of(SORT), FailingScorer(build(SORT), frozenset({0})))
    with monkeypatch.context() as patched:
        patched.setattr(job, where, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            again(tmp_path, SORT)
    engine = SortingEngine()
    assert finished(tmp_path, of(SORT).about) is None
    assert run(tmp_path, of(SORT, engine))["unscored"]["samples"] == 0
    assert engine.asked == []


def test_measurement_of_a_filter_has_its_scores_replaced(tmp_path: Path) -> None:
    given, failing = of(SORT), FailingScorer(build(SORT), frozenset({0, 2}))
    measure(given, lambda: failing, tmp_path, StopToken(), lambda _done, _total: None)
    assert again(tmp_path, SORT)["unscored"]["samples"] == 0
    journal = measure(given, lambda: failing, tmp_path, StopToken(), lambda _done, _total: None)
    assert journal is not None
    assert all(len(record.scores) == 4 for record in journal.records())
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint({TASKS, SUMMARY})


def test_folder_with_nothing_to_score_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        again(tmp_path, SORT)
    EvaluationJournal(tmp_path).open(of(SORT).about)
    (tmp_path / PROGRESS).unlink()
    with pytest.raises(ConfigError, match="keeps no completions"):
        again(tmp_path, SORT)
    for other in ({**of(SORT).about, "plan": {"keep_text": True}}, {}, []):
        (tmp_path / IDENTITY).write_text(json.dumps(other))
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
    out, given = tmp_path / "out", of(reward_file(tmp_path, "raise OSError('away')"))
    assert run(out, given)["unscored"]["samples"] == 24
    reward_file(tmp_path, EXACT)
    done = subprocess.run([sys.executable, "-c", COMMAND, str(out)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"wrote {out}", "False"]
    assert "unscored" not in done.stdout
    assert json.loads((out / SUMMARY).read_bytes())["unscored"]["samples"] == 0
