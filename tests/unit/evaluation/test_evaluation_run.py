"""An evaluation: which tasks, which seeds, what is kept, how it resumes, what its results say; and kept completions,
scored again without a model or torch.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

from kit import Capture, Patch
from kit.evaluation import SAMPLING, TOKENIZER, FailingScorer, SortingEngine, evaluation, sort, subject
from shoal.cli.main import main
from shoal.environments import Environment, EnvironmentSettings, Score, Task, build
from shoal.environments.settings import LengthSettings
from shoal.errors import ConfigError, DeadlineExceeded, EnvironmentSetupError, ResourceError, UnusableTask
from shoal.evaluation import job
from shoal.evaluation.job import SUMMARY, TASKS, EvaluationJob, choose, evaluate, finished, measure, rescore, without
from shoal.evaluation.plan import SamplingPlan, sample_seed, tasks_of
from shoal.evaluation.records import COMPLETIONS, IDENTITY, PROGRESS, EvaluationJournal
from shoal.evaluation.subject import EngineChoice, memory_errors, open_subject, plain_name
from shoal.evaluation.summary import table_lines
from shoal.rewards import DirectScorer, Job, NotStarted
from shoal.runtime.stop import StopToken

GREEDY = SamplingPlan(max_new_tokens=16)


def run(out: Path, given: EvaluationJob | None = None, scorer: Any = None, stop: StopToken | None = None) -> Any:
    given = given or evaluation()
    chosen = scorer or DirectScorer(given.chosen.environment)
    return evaluate(given, lambda: chosen, out, stop or StopToken())


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / TASKS).to_pylist()
    return found


def test_the_choice_of_tasks_follows_from_the_seed() -> None:
    assert list(SamplingPlan().chosen(5)) == list(SamplingPlan(tasks=9).chosen(5)) == [0, 1, 2, 3, 4]
    chosen = list(SamplingPlan(tasks=50, seed=3).chosen(100_000))
    assert chosen == sorted(set(chosen)) == list(SamplingPlan(tasks=50, seed=3).chosen(100_000))
    assert (len(chosen), chosen[-1] > 50_000) == (50, True)  # not the first ones
    assert chosen != list(SamplingPlan(tasks=50, seed=4).chosen(100_000))
    assert len(SamplingPlan(tasks=999).chosen(1000)) == 999
    seeds = {sample_seed(s, task, k) for s in (0, 1) for task in ("a", "b", "a\n1") for k in range(4)}
    assert (len(seeds), max(seeds) < 2**64) == (24, True)
    shapes = ((4, 1024), (4, 32_768), (300, 1024))  # long completions leave memory for fewer rows
    plans = [SamplingPlan(samples=samples, temperature=1, max_new_tokens=longest) for samples, longest in shapes]
    assert [plan.tasks_per_batch for plan in plans] == [64, 16, 1]


@pytest.mark.parametrize(("changes", "said"), [
    ({"samples": 0}, "--samples 0"), ({"samples": 2}, "--temperature 0 draws the same completion 2 times"),
    ({"tasks": -1}, "--tasks at least 0"), ({"temperature": 11.0}, "--temperature 11"),
    ({"max_new_tokens": 0}, "at least 1"), ({"batch_rows": 0}, "at least 1"),
])  # fmt: skip
def test_impossible_plan_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SamplingPlan(**changes)


def test_which_tasks_are_left_and_nothing_left_is_refused() -> None:
    environment = sort(train_size=3, held_out_size=2)
    ids = [task.id for task in tasks_of(environment, "all")]
    assert ids == ["sort/held_out/0", "sort/held_out/1", "sort/train/0", "sort/train/1", "sort/train/2"]
    with pytest.raises(EnvironmentSetupError, match=r"listed has no train tasks.*--split held_out"):
        choose(Listed([]), SamplingPlan(split="train"))
    chosen = evaluation(replace(SAMPLING, tasks=3)).chosen
    ids = [task.id for _, task in chosen.tasks()]
    assert [task.id for _, task in without(chosen, ids[:1]).tasks()] == ids[1:]
    with pytest.raises(EnvironmentSetupError, match="nothing of environment sort is left"):
        without(chosen, ids)


def test_results_do_not_depend_on_how_many_samples_or_tasks_there_are(tmp_path: Path) -> None:
    run(tmp_path / "few")
    run(tmp_path / "more", evaluation(replace(SAMPLING, samples=8, tasks=20)))
    longer = {row["task"]: row["scores"] for row in rows(tmp_path / "more")}
    shared = [row for row in rows(tmp_path / "few") if row["task"] in longer]
    assert shared
    assert all(longer[row["task"]][:4] == row["scores"] for row in shared)


def test_a_request_is_never_larger_than_the_rows(tmp_path: Path) -> None:
    engine = SortingEngine()
    summary = run(tmp_path, evaluation(replace(SAMPLING, samples=20, tasks=2), engine))
    assert [len(request.seeds) for request in engine.asked] == [8, 8, 4, 8, 8, 4]
    assert summary["samples"] == 40
    asked = {seed for request in engine.asked for seed in request.seeds}
    assert asked == {sample_seed(0, row["task"], k) for row in rows(tmp_path) for k in range(20)}


def test_greedy_decoding_and_completions_that_did_not_end(tmp_path: Path) -> None:
    engine = SortingEngine()
    summary = run(tmp_path / "greedy", evaluation(replace(GREEDY, tasks=6), engine))
    assert (summary["avg_at_k"]["value"], summary["avg_at_k"]["k"], engine.asked) == (1.0, 1, [])
    summary = run(tmp_path / "long", evaluation(engine=SortingEngine(ending=False)))
    assert summary["truncated"]["value"] == 1.0
    assert all(row["truncated"] == 4 for row in rows(tmp_path / "long"))


class Listed:
    """An environment of the given tasks; one whose prompt is "unusable" cannot be read."""

    name = "listed"
    digest = "cd" * 32

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = list(tasks)

    def tasks(self, split: str) -> Sequence[Task]:
        outer = self

        class Lazy(list[Task]):
            def __getitem__(self, index: Any) -> Any:
                task = outer._tasks[index]
                if task.prompt == "unusable":
                    raise UnusableTask("row 1: answer 'secret' is no number")
                return task

        return Lazy(self._tasks) if split == "held_out" else []

    def task(self, task_id: str) -> Task:
        return next(task for task in self._tasks if task.id == task_id)

    def score(self, task: Task, completion: str) -> Score:
        exact = float("nan") if task.answer == "nan" else float(completion == task.answer)
        return Score(exact, {"exact": exact, "odd": float("inf")}, notes=f"the answer is {task.answer}")


def test_prompt_that_the_model_cannot_take_is_a_problem_of_its_task(tmp_path: Path) -> None:
    problems = {
        "21=": "", "1" * 300 + "=": "the prompt and its completion are longer than the model's context",
        "2~1=": "the prompt has characters that the model's tokenizer does not know", "": "the prompt has no tokens",
    }  # fmt: skip
    tasks = [Task(str(number), prompt, "12") for number, prompt in enumerate(problems)]
    summary = run(tmp_path, evaluation(GREEDY, environment=Listed(tasks)))
    assert [row["problem"].partition(" (")[0] for row in rows(tmp_path)] == [*problems.values()]
    assert summary["unscored"] == {"samples": 0, "share": 0.75, "tasks": []}
    assert summary["avg_at_k"]["value"] == 1.0
    assert any("left out: the prompt has no tokens" in line for line in table_lines(summary))


@pytest.mark.parametrize("count_eos", [False, True])
def test_a_length_budget_is_asked_for_and_held_against_the_answer(tmp_path: Path, count_eos: bool) -> None:
    length = LengthSettings(targets=(7,), alpha=0.01, text="in {target}", count_eos=count_eos)
    environment, engine = build(EnvironmentSettings(name="sort", length=length)), SortingEngine()
    run(tmp_path, evaluation(replace(SAMPLING, tasks=1), engine, environment))
    assert TOKENIZER.decode(engine.asked[0].prompt_ids).endswith("= in 7")
    (row,) = rows(tmp_path)
    assert set(row["finish"]) == {"eos"}
    for score, tokens, parts in zip(row["scores"], row["tokens"], row["parts"], strict=True):
        assert dict(parts)["reward"] == pytest.approx(score - 0.01 * abs(7 - tokens - count_eos))
        assert dict(parts)["target"] == 7


class Talking(SortingEngine):
    """Says the expression of the prompt, and then what the tool said to it."""

    def _answer(self, prompt: tuple[int, ...], right: bool) -> list[int]:
        expression, _, said = TOKENIZER.decode(prompt).partition("=")
        text = said.strip().splitlines()[-1] if "\n" in said else expression
        return [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]


def test_a_tool_answers_between_the_turns_and_the_last_turn_is_scored(tmp_path: Path) -> None:
    environment, engine = build(EnvironmentSettings(name="calculator")), Talking()
    plan = replace(GREEDY, tasks=5, max_new_tokens=64)
    assert run(tmp_path / "whole", evaluation(plan, engine, environment))["avg_at_k"]["value"] == 1.0
    for row in rows(tmp_path / "whole"):
        expression, value = row["prompt"].rstrip("="), row["completions"][0]
        assert row["tokens"] == [len(expression) + 1 + len(value)]  # both turns of the model, not the tool's words
        assert row["finish"] == ["eos"]
    summary = run(tmp_path / "short", evaluation(replace(plan, max_new_tokens=12), engine, environment))
    assert (summary["avg_at_k"]["value"], summary["truncated"]["value"]) == (0.0, 1.0)
    run(tmp_path / "sampled", evaluation(replace(SAMPLING, tasks=1), engine, environment))
    respond = engine.asked[0].respond
    assert respond is not None
    assert TOKENIZER.decode(respond([*TOKENIZER.encode("2+3"), TOKENIZER.eos_token_id]) or ()) == "\n5\n"


def test_a_completion_that_could_not_be_scored_is_unscored(tmp_path: Path) -> None:
    given = evaluation()
    scorer = FailingScorer(given.chosen.environment, frozenset({0, 1, 2, 3, 5}))
    summary, found = run(tmp_path, given, scorer), rows(tmp_path)
    assert (found[0]["scores"], found[0]["mean"], found[0]["samples"]) == ([None] * 4, None, 0)
    assert (found[1]["scores"][1], found[1]["samples"]) == (None, 3)
    lost = {"samples": 5, "share": pytest.approx(5 / 40), "tasks": [row["task"] for row in found[:2]]}
    assert (summary["unscored"], summary["scored_tasks"]) == (lost, 9)
    assert summary["avg_at_k"]["value"] == pytest.approx(sum(row["mean"] for row in found[1:]) / 9)
    assert scorer.closed


def test_answers_and_notes_of_graders_are_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment = Listed([Task("a", "21=", "12"), Task("b", "unusable", "secret"), Task("c", "1=", "nan")])
    summary = run(tmp_path, evaluation(GREEDY, environment=environment))
    assert summary["problems"] == {"its row cannot be used": 1}
    assert (summary["scored_tasks"], summary["unscored"]["samples"]) == (1, 1)  # a score that is NaN is none
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"secret" not in content
    assert b"the answer is" not in content
    assert "a task of listed is left out: row 1: " in caplog.text
    first, second, _ = rows(tmp_path)
    assert (first["prompt"], first["completions"], first["parts"]) == ("21=", ["12"], [[("exact", 1.0)]])
    assert (second["task"], second["problem"]) == ("#1", "its row cannot be used")


class Interrupting(DirectScorer):
    """Begins one job at a time. The process is told to stop during its third batch, or another one."""

    def __init__(self, environment: Environment, stop: StopToken, raises: bool, batch: int = 3) -> None:
        super().__init__(environment)
        self._stop, self._raises, self._batch, self._batches = stop, raises, batch, 0

    def scores(self, jobs: Sequence[Job]) -> Any:
        self._batches += len(jobs) == SAMPLING.batch_rows
        if self._batches == self._batch and not self._stop.is_set():
            self._stop.set("test")
            if self._raises:
                raise DeadlineExceeded("told to stop")
        return [*super().scores(jobs[:1]), *(NotStarted("no time") for _ in jobs[1:])]


@pytest.mark.parametrize("raises", [True, False])
def test_stopped_and_resumed_gives_the_same_bytes(tmp_path: Path, raises: bool) -> None:
    run(tmp_path / "whole")
    given, stop, out = evaluation(), StopToken(), tmp_path / "halves"

    def starting() -> Any:
        stop.set("test")
        raise DeadlineExceeded("scoring was given up")

    assert evaluate(given, starting, out, stop) is None
    stop = StopToken()
    assert run(out, given, Interrupting(given.chosen.environment, stop, raises), stop) is None
    kept = (out / PROGRESS).read_bytes().count(b"\n")
    drawn = (out / COMPLETIONS).read_bytes().count(b"\n")
    assert 2 <= kept <= drawn < given.chosen.batches
    assert not (out / TASKS).exists()
    engine = SortingEngine()
    run(out, evaluation(engine=engine))
    assert len(engine.asked) == 10 - 2 * drawn  # what was drawn, scored or not, is not drawn again
    for name in (TASKS, SUMMARY, IDENTITY, COMPLETIONS):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (out / PROGRESS).exists()


@pytest.mark.parametrize("damage", [b'[{"task":"sort/held_out/3","in', b"\x00" * 80, b"[]\n", b"{}\n"])
@pytest.mark.parametrize("file", [COMPLETIONS, PROGRESS])
def test_half_written_batch_is_drawn_again_after_a_crash(tmp_path: Path, file: str, damage: bytes) -> None:
    run(tmp_path / "whole")
    given, stop, out = evaluation(), StopToken(), tmp_path / "cut"
    run(out, given, Interrupting(given.chosen.environment, stop, False), stop)
    (out / file).write_bytes((out / file).read_bytes().partition(b"\n")[0] + b"\n" + damage)
    run(out)
    assert (out / TASKS).read_bytes() == (tmp_path / "whole" / TASKS).read_bytes()


def test_missing_summary_is_written_again_and_finished_results_are_found(tmp_path: Path) -> None:
    given = evaluation()
    assert finished(tmp_path / "none", given.about) is None
    summary = run(tmp_path, given)
    assert finished(tmp_path, given.about) == json.loads(json.dumps(summary))
    before = (tmp_path / TASKS).read_bytes()
    (tmp_path / SUMMARY).unlink()
    assert finished(tmp_path, given.about) is None
    assert run(tmp_path)["scored_tasks"] == 10
    assert (tmp_path / TASKS).read_bytes() == before


@pytest.mark.parametrize(("other", "said"), [
    (replace(evaluation(), subject=subject(digest="00" * 32)), "model.digest is abab"),
    (evaluation(replace(SAMPLING, seed=1)), "plan.seed is 0, here it would be 1"),
    (evaluation(environment=sort(options={"max_digits": 9})), "environment.digest"),
    (replace(evaluation(), left_out=("a",)), "left_out"),
])  # fmt: skip
def test_a_folder_of_another_evaluation_is_refused(tmp_path: Path, other: EvaluationJob, said: str) -> None:
    run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for attempt in (lambda: run(tmp_path, other), lambda: finished(tmp_path, other.about)):
        with pytest.raises(ConfigError, match=f"another evaluation: its {said}"):
            attempt()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_of_other_files_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds thesis.tex and no evaluation: choose another --out"):
        run(tmp_path)
    with pytest.raises(ResourceError, match="a part of the path is a file"):
        run(tmp_path / "thesis.tex" / "out")


def test_an_unknown_engine_and_too_little_memory_are_refused_with_what_to_do() -> None:
    assert [plain_name(text) for text in ("a/b c/", "..", "x" * 99)] == ["b-c", "model", "x" * 48]
    with pytest.raises(ConfigError, match="there is no engine 'none'"):
        open_subject("tiny", "tiny", EngineChoice(engine="none"), 8)
    for error in (RuntimeError("CUDA out of memory. Tried to"), MemoryError(), RuntimeError("can't allocate memory")):
        with pytest.raises(ResourceError, match="lower --batch-rows"), memory_errors("draw"):
            raise error
    with pytest.raises(RuntimeError, match="another"), memory_errors("draw"):
        raise RuntimeError("another")


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


def again(out: Path, settings: EnvironmentSettings, scorer: Any = None, stop: StopToken | None = None) -> Any:
    environment = build(settings)
    return rescore(settings, environment, lambda: scorer or DirectScorer(environment), out, stop or StopToken())


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


def reward_file(folder: Path, what: str) -> EnvironmentSettings:
    (folder / "reward.py").write_text(REWARD.replace("WHAT", what))
    return EnvironmentSettings(file=folder / "reward.py")


def test_rescored_results_are_as_if_scoring_had_never_failed(tmp_path: Path) -> None:
    run(tmp_path / "whole", of(SORT))
    before = run(tmp_path / "lost", of(SORT), FailingScorer(build(SORT), frozenset({0, 1, 5, 17})))
    assert before["unscored"]["samples"] == 4
    assert again(tmp_path / "lost", SORT)["unscored"] == {"samples": 0, "share": 0.0, "tasks": []}
    assert content(tmp_path / "lost") == content(tmp_path / "whole")


def test_rescore_replaces_all_scores_and_a_second_run_finds_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, of(reward_file(tmp_path, "return 0.0")))["avg_at_k"]["value"] == 0.0
    mended = reward_file(tmp_path, EXACT)
    found = again(out, mended)
    right = [text == "".join(sorted(row["prompt"][:2])) for row in rows(out) for text in row["completions"]]
    assert 0 < sum(right) < len(right)
    assert found["avg_at_k"]["value"] == pytest.approx(sum(right) / len(right))
    assert finished(out, of(mended).about) == json.loads((out / SUMMARY).read_bytes())


def test_rewards_by_tokens_are_evaluated_and_rescored_only_with_the_tokens(tmp_path: Path) -> None:
    rewards = "def short(completion_ids, **columns):\n    return [-float(len(completion_ids[0]))]\n"
    text, _, _ = REWARD.partition("def score")
    (tmp_path / "reward.py").write_text(text + rewards)
    by_tokens, out = EnvironmentSettings(file=tmp_path / "reward.py"), tmp_path / "out"
    drawn = run(out, of(by_tokens))
    lengths = [tokens for row in rows(out) for tokens in row["tokens"]]
    assert drawn["avg_at_k"]["value"] == again(out, by_tokens)["avg_at_k"]["value"] == -sum(lengths) / len(lengths)
    run(tmp_path / "texts", of(reward_file(tmp_path, EXACT)))
    (tmp_path / "reward.py").write_text(text + rewards)
    with pytest.raises(ConfigError, match="asks for completion_ids now, and these completions were stored without"):
        again(tmp_path / "texts", by_tokens)


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
    assert again(tmp_path, SORT, Interrupting(build(SORT), stop, True, batch=2), stop) is None
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
    stopped = Interrupting(build(broken), stop, True, batch=2)
    assert measure(of(broken, first), lambda: stopped, out, stop, lambda _done, _total: None) is None
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
