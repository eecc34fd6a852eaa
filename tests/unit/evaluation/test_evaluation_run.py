"""An evaluation: which tasks, which seeds, what is kept, how it resumes, what its results say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kit.evaluation import (
    FILES,
    SAMPLING,
    TOKENIZER,
    FailingScorer,
    SortingEngine,
    evaluation,
    sort,
    subject,
    with_lines,
)
from shoal.environments import Environment, EnvironmentSettings, Score, Task, build
from shoal.environments.settings import LengthSettings
from shoal.errors import ConfigError, DeadlineExceeded, EnvironmentSetupError, ResourceError, UnusableTask
from shoal.evaluation.compare import compare
from shoal.evaluation.job import SUMMARY, TASKS, EvaluationJob, choose, evaluate, finished, without
from shoal.evaluation.plan import SamplingPlan, sample_seed, tasks_of
from shoal.evaluation.records import IDENTITY, PROGRESS, SampleRecord, TaskRecord, read_records, read_results
from shoal.evaluation.subject import EngineChoice, memory_errors, open_subject, plain_name
from shoal.evaluation.summary import table_lines
from shoal.rewards import DirectScorer, Job, NotBegun
from shoal.runtime.stop import StopToken

GREEDY = SamplingPlan(max_new_tokens=16)


def run(out: Path, given: EvaluationJob | None = None, scorer: Any = None, stop: StopToken | None = None) -> Any:
    given = given or evaluation()
    chosen = scorer or DirectScorer(given.chosen.environment)
    return evaluate(given, lambda: chosen, out, stop or StopToken())


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / TASKS).to_pylist()
    return found


class TestPlan:
    def test_all_tasks_or_a_choice_that_follows_from_the_seed(self) -> None:
        assert list(SamplingPlan().chosen(5)) == [0, 1, 2, 3, 4]
        assert list(SamplingPlan(tasks=9).chosen(5)) == [0, 1, 2, 3, 4]
        chosen = list(SamplingPlan(tasks=50, seed=3).chosen(100_000))
        assert chosen == sorted(set(chosen)) == list(SamplingPlan(tasks=50, seed=3).chosen(100_000))
        assert len(chosen) == 50
        assert chosen[-1] > 50_000  # not the first ones
        assert chosen != list(SamplingPlan(tasks=50, seed=4).chosen(100_000))

    def test_nearly_all_can_be_chosen(self) -> None:
        assert len(SamplingPlan(tasks=999).chosen(1000)) == 999

    def test_seeds_are_public_and_of_their_own_for_every_sample(self) -> None:
        seeds = {sample_seed(s, task, k) for s in (0, 1) for task in ("a", "b", "a\n1") for k in range(4)}
        assert len(seeds) == 24
        assert sample_seed(0, "a", 0) == sample_seed(0, "a", 0) < 2**64

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"samples": 0}, "--samples 0"), ({"samples": 2}, "--temperature 0 draws the same completion 2 times"),
            ({"tasks": -1}, "--tasks -1"), ({"temperature": 11.0}, "--temperature 11"),
            ({"max_new_tokens": 0}, "at least 1"), ({"batch_rows": 0}, "at least 1"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_is_said(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            SamplingPlan(**changes)

    def test_long_completions_leave_memory_for_fewer_rows(self) -> None:
        assert SamplingPlan(samples=4, temperature=1, batch_rows=256).tasks_per_batch == 64
        assert SamplingPlan(samples=4, temperature=1, batch_rows=256, max_new_tokens=32_768).tasks_per_batch == 16
        assert SamplingPlan(samples=300, temperature=1, batch_rows=256).tasks_per_batch == 1

    def test_both_splits_as_one(self) -> None:
        environment = sort(train_size=3, held_out_size=2)
        ids = [task.id for task in tasks_of(environment, "all")]
        assert ids == ["sort/held_out/0", "sort/held_out/1", "sort/train/0", "sort/train/1", "sort/train/2"]
        assert [task.id for task in tasks_of(environment, "all")[1:3]] == ids[1:3]

    def test_an_empty_split_is_said(self) -> None:
        class Empty:
            name = "mine"

            def tasks(self, _split: str) -> Sequence[Task]:
                return ()

        with pytest.raises(EnvironmentSetupError, match=r"mine has no held_out tasks.*--split train"):
            choose(Empty(), SamplingPlan())  # type: ignore[arg-type]


class TestDrawing:
    def test_the_results_do_not_depend_on_how_many_samples_or_tasks_there_are(self, tmp_path: Path) -> None:
        run(tmp_path / "few")
        more = evaluation(replace(SAMPLING, samples=8, tasks=20))
        run(tmp_path / "more", more)
        longer = {row["task"]: row["scores"] for row in rows(tmp_path / "more")}
        shared = [row for row in rows(tmp_path / "few") if row["task"] in longer]
        assert shared
        assert all(longer[row["task"]][:4] == row["scores"] for row in shared)

    def test_a_request_is_never_larger_than_the_rows(self, tmp_path: Path) -> None:
        engine = SortingEngine()
        summary = run(tmp_path, evaluation(replace(SAMPLING, samples=20, tasks=2), engine))
        assert [len(request.seeds) for request in engine.asked] == [8, 8, 4, 8, 8, 4]
        assert summary["samples"] == 40
        asked = {seed for request in engine.asked for seed in request.seeds}
        assert asked == {sample_seed(0, row["task"], k) for row in rows(tmp_path) for k in range(20)}

    def test_greedy(self, tmp_path: Path) -> None:
        engine = SortingEngine()
        summary = run(tmp_path, evaluation(replace(GREEDY, tasks=6), engine))
        assert (summary["avg_at_k"]["value"], summary["avg_at_k"]["k"], engine.asked) == (1.0, 1, [])

    def test_completions_that_did_not_end_are_counted(self, tmp_path: Path) -> None:
        summary = run(tmp_path, evaluation(engine=SortingEngine(ending=False)))
        assert summary["truncated"]["value"] == 1.0
        assert all(row["truncated"] == 4 for row in rows(tmp_path))

    def test_a_prompt_that_does_not_fit_is_that_tasks_problem(self, tmp_path: Path) -> None:
        environment = Listed(
            [Task("ok", "21=", "12"), Task("long", "1" * 300 + "=", ""), Task("odd", "2~1=", ""), Task("none", "", "")]
        )
        summary = run(tmp_path, evaluation(GREEDY, environment=environment))
        problems = {row["task"]: row["problem"].partition(" (")[0] for row in rows(tmp_path)}
        assert problems == {
            "ok": "",
            "long": "the prompt and its completion are longer than the model's context",
            "odd": "the prompt has characters that the model's tokenizer does not know",
            "none": "the prompt has no tokens",
        }
        assert summary["unscored"] == {"samples": 0, "share": 0.75, "tasks": []}
        assert summary["avg_at_k"]["value"] == 1.0
        assert any("left out: the prompt has no tokens" in line for line in table_lines(summary))

    @pytest.mark.parametrize("count_eos", [False, True])
    def test_a_length_budget_is_asked_for_and_held_against_the_answer(self, tmp_path: Path, count_eos: bool) -> None:
        length = LengthSettings(targets=(7,), alpha=0.01, text="in {target}", count_eos=count_eos)
        environment = build(EnvironmentSettings(name="sort", length=length))
        engine = SortingEngine()
        run(tmp_path, evaluation(replace(SAMPLING, tasks=1), engine, environment))
        assert TOKENIZER.decode(engine.asked[0].prompt_ids).endswith("= in 7")
        row = rows(tmp_path)[0]
        assert set(row["finish"]) == {"eos"}
        for score, tokens, parts in zip(row["scores"], row["tokens"], row["parts"], strict=True):
            assert dict(parts)["reward"] == pytest.approx(score - 0.01 * abs(7 - tokens - count_eos))
            assert dict(parts)["target"] == 7

    def test_only_tasks_that_were_asked_for_the_same_length_are_compared(self, tmp_path: Path) -> None:
        length = LengthSettings(targets=(7, 9), text="in {target}")
        environment, targets = build(EnvironmentSettings(name="sort", held_out_size=16, length=length)), []
        for seed in (0, 1):
            run(tmp_path / str(seed), evaluation(replace(SAMPLING, tasks=0, seed=seed), environment=environment))
            targets.append([dict(row["parts"][0])["target"] for row in rows(tmp_path / str(seed))])
        same = sum(first == second for first, second in zip(*targets, strict=True))
        assert 0 < same < 16
        found = compare(read_results(tmp_path / "0", TASKS), read_results(tmp_path / "1", TASKS))
        assert (len(found.pairs), found.other_prompt) == (same, 16 - same)


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
        exact = float(completion == task.answer)
        return Score(exact, {"exact": exact, "odd": float("inf")}, notes=f"the answer is {task.answer}")


class TestScoring:
    def test_a_completion_that_could_not_be_scored_is_unscored(self, tmp_path: Path) -> None:
        given = evaluation()
        scorer = FailingScorer(given.chosen.environment, frozenset({0, 1, 2, 3, 5}))
        summary = run(tmp_path, given, scorer)
        found = rows(tmp_path)
        assert (found[0]["scores"], found[0]["mean"], found[0]["samples"]) == ([None] * 4, None, 0)
        assert (found[1]["scores"][1], found[1]["samples"]) == (None, 3)
        assert summary["unscored"] == {
            "samples": 5, "share": pytest.approx(5 / 40), "tasks": [row["task"] for row in found[:2]],
        }  # fmt: skip
        assert summary["scored_tasks"] == 9
        means = [row["mean"] for row in found[1:]]
        assert summary["avg_at_k"]["value"] == pytest.approx(sum(means) / 9)
        assert scorer.closed

    def test_unusable_row_is_counted_without_its_answer(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        environment = Listed([Task("a", "21=", "12"), Task("b", "unusable", "secret")])
        summary = run(tmp_path, evaluation(GREEDY, environment=environment))
        assert summary["problems"] == {"reasons": {"its row cannot be used": 1}, "tasks": ["#1"]}
        assert (summary["scored_tasks"], summary["unscored"]["share"]) == (1, 0.0)
        assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert "a task of listed is left out: row 1: " in caplog.text  # by its row alone: nobody can look a position up

    def test_notes_of_graders_and_parts_that_are_no_numbers_are_not_written(self, tmp_path: Path) -> None:
        environment = Listed([Task("a", "21=", "12")])
        run(tmp_path, evaluation(GREEDY, environment=environment))
        assert b"the answer is" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert rows(tmp_path)[0]["parts"] == [[("exact", 1.0)]]

    def test_completions_are_kept_and_read_back(self, tmp_path: Path) -> None:
        environment = Listed([Task("a", "21=", "12"), Task("b", "unusable", "")])
        run(tmp_path, evaluation(GREEDY, environment=environment))
        row = rows(tmp_path)[0]
        assert (row["prompt"], row["completions"]) == ("21=", ["12"])
        assert list(read_records(tmp_path / TASKS)) == [
            TaskRecord("a", 0, row["prompt_digest"], samples=(SampleRecord(1.0, 2, "eos", {"exact": 1.0}, "12"),),
                       prompt="21=", kind=row["kind"]),
            TaskRecord("#1", 1, "", problem="its row cannot be used"),
        ]  # fmt: skip

    def test_what_there_was_no_time_for_is_asked_again(self, tmp_path: Path) -> None:
        given = evaluation()
        assert run(tmp_path, given, Hesitating(given.chosen.environment))["unscored"]["samples"] == 0

    def test_a_score_that_is_no_number_is_unscored(self, tmp_path: Path) -> None:
        environment = Listed([Task("a", "21=", "12")])
        environment.score = lambda task, completion: Score(float("nan"))  # type: ignore[method-assign]
        assert run(tmp_path, evaluation(GREEDY, environment=environment))["unscored"]["samples"] == 1


class Hesitating(DirectScorer):
    """Begins one job at a time."""

    def scores(self, jobs: Sequence[Job]) -> Any:
        return [*super().scores(jobs[:1]), *(NotBegun("no time") for _ in jobs[1:])]


class Interrupting:
    """A scorer during whose second call the process is told to stop."""

    def __init__(self, environment: Environment, stop: StopToken, raises: bool) -> None:
        self._inner, self._stop, self._raises, self._calls = DirectScorer(environment), stop, raises, 0

    def scores(self, jobs: Sequence[Job]) -> Any:
        self._calls += 1
        if self._calls == 2:
            self._stop.set("test")
            if self._raises:
                raise DeadlineExceeded("told to stop")
        return self._inner.scores(jobs)

    def close(self) -> None:
        """Nothing is open."""


class TestGoingOn:
    @pytest.mark.parametrize("raises", [True, False])
    def test_stopped_and_resumed_gives_the_same_bytes(self, tmp_path: Path, raises: bool) -> None:
        run(tmp_path / "whole")
        given, stop = evaluation(), StopToken()
        assert run(tmp_path / "halves", given, Interrupting(given.chosen.environment, stop, raises), stop) is None
        kept = (tmp_path / "halves" / PROGRESS).read_bytes().count(b'"drawn"')
        assert 2 <= kept < given.chosen.batches
        assert not (tmp_path / "halves" / TASKS).exists()
        engine = SortingEngine()
        run(tmp_path / "halves", evaluation(engine=engine))
        assert len(engine.asked) == 10 - 2 * kept  # what was done is not drawn again
        for name in (TASKS, SUMMARY, IDENTITY):
            assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert not (tmp_path / "halves" / PROGRESS).exists()

    def test_told_to_stop_while_the_scorers_start_it_is_stopped_and_nothing_is_lost(self, tmp_path: Path) -> None:
        stop = StopToken()

        def starting() -> Any:
            stop.set("test")
            raise DeadlineExceeded("scoring was given up")

        assert evaluate(evaluation(), starting, tmp_path / "out", stop) is None
        assert run(tmp_path / "out") is not None

    @pytest.mark.parametrize(
        "damage",
        [
            b'{"batch":2,"drawn":[{"ta', b"\x00" * 80, b'{"batch":7,"drawn":[]}\n', b'{"batch":1,"scored":[[]]}\n',
            b"[]\n",
        ],
    )  # fmt: skip
    def test_what_a_crash_left_half_written_is_drawn_again(self, tmp_path: Path, damage: bytes) -> None:
        run(tmp_path / "whole")
        given, stop = evaluation(), StopToken()
        run(tmp_path / "cut", given, Interrupting(given.chosen.environment, stop, False), stop)
        progress = tmp_path / "cut" / PROGRESS
        with_lines(progress, 1)
        with progress.open("ab") as file:
            file.write(damage)
        run(tmp_path / "cut")
        assert (tmp_path / "cut" / TASKS).read_bytes() == (tmp_path / "whole" / TASKS).read_bytes()

    def test_killed_between_results_and_the_end_it_ends_the_same(self, tmp_path: Path) -> None:
        run(tmp_path)
        before = (tmp_path / TASKS).read_bytes()
        (tmp_path / SUMMARY).unlink()
        assert run(tmp_path)["scored_tasks"] == 10
        assert (tmp_path / TASKS).read_bytes() == before

    def test_a_finished_one_is_known(self, tmp_path: Path) -> None:
        given = evaluation()
        assert finished(tmp_path / "none", given.about) is None
        summary = run(tmp_path, given)
        assert finished(tmp_path, given.about) == json.loads(json.dumps(summary))

    @pytest.mark.parametrize(
        ("other", "said"),
        [
            (EvaluationJob(subject(digest="00" * 32), evaluation().chosen), "model.digest is abab"),
            (evaluation(replace(SAMPLING, seed=1)), "plan.seed is 0, here it would be 1"),
            (evaluation(environment=sort(options={"max_digits": 9})), "environment.digest"),
            (replace(evaluation(), left_out=("a",)), "left_out"),
        ],
    )
    def test_another_evaluation_is_refused(self, tmp_path: Path, other: EvaluationJob, said: str) -> None:
        run(tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        for attempt in (lambda: run(tmp_path, other), lambda: finished(tmp_path, other.about)):
            with pytest.raises(ConfigError, match=f"holds another evaluation: its {said}"):
                attempt()
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_somebodys_folder_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(ConfigError, match=r"holds thesis.tex and no evaluation: choose another --out"):
            run(tmp_path)

    def test_a_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ResourceError, match="a part of the path is a file"):
            run(tmp_path / "file" / "out")


class TestSubject:
    def test_leaked_tasks_are_left_out(self) -> None:
        chosen = evaluation(replace(SAMPLING, tasks=3)).chosen
        ids = [task.id for _, task in chosen.batch(0) if task is not None]
        assert [task.id for _, task in without(chosen, ids[:1]).batch(0) if task is not None] == ids[1:] + [
            task.id for _, task in chosen.batch(1) if task is not None
        ]
        with pytest.raises(EnvironmentSetupError, match="nothing of environment sort is left"):
            without(chosen, [f"sort/held_out/{number}" for number in range(256)])

    def test_names_for_files(self) -> None:
        assert [plain_name(text) for text in ("a/b c/", "..", "x" * 99)] == ["b-c", "model", "x" * 48]

    def test_the_scripted_engine_is_one_too(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="there is no engine 'none'"):
            open_subject("tiny", "tiny", EngineChoice(engine="none"), 8)

    def test_memory_that_runs_out_is_said_with_what_to_lower(self) -> None:
        for error in (
            RuntimeError("CUDA out of memory. Tried to"),
            MemoryError(),
            RuntimeError("can't allocate memory"),
        ):
            with pytest.raises(ResourceError, match="lower --batch-rows"), memory_errors("draw"):
                raise error
        with pytest.raises(RuntimeError, match="another"), memory_errors("draw"):
            raise RuntimeError("another")

    def test_the_files_of_the_model_are_there(self) -> None:
        assert subject().positions == 256
        assert "tokenizer.json" in FILES


class Talking(SortingEngine):
    """Says the expression of the prompt, and then what the tool said to it."""

    def _answer(self, prompt: tuple[int, ...], right: bool) -> list[int]:
        expression, _, said = TOKENIZER.decode(prompt).partition("=")
        text = said.strip().splitlines()[-1] if "\n" in said else expression
        return [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]


class TestDialogues:
    def test_a_tool_answers_between_the_turns_and_the_last_turn_is_scored(self, tmp_path: Path) -> None:
        environment = build(EnvironmentSettings(name="calculator"))
        plan = replace(GREEDY, tasks=5, max_new_tokens=64)
        summary = run(tmp_path, evaluation(plan, Talking(), environment))
        assert summary["avg_at_k"]["value"] == 1.0
        for row in rows(tmp_path):
            expression, value = row["prompt"].rstrip("="), row["completions"][0]
            assert row["tokens"] == [len(expression) + 1 + len(value)]  # both turns of the model, not the tool's words
            assert row["finish"] == ["eos"]

    def test_what_leaves_no_room_is_cut_off(self, tmp_path: Path) -> None:
        environment = build(EnvironmentSettings(name="calculator"))
        summary = run(tmp_path, evaluation(replace(GREEDY, tasks=5, max_new_tokens=12), Talking(), environment))
        assert (summary["avg_at_k"]["value"], summary["truncated"]["value"]) == (0.0, 1.0)

    def test_requests_that_are_sampled_carry_the_tool(self, tmp_path: Path) -> None:
        environment = build(EnvironmentSettings(name="calculator"))
        engine = Talking()
        run(tmp_path, evaluation(replace(SAMPLING, tasks=1), engine, environment))
        respond = engine.asked[0].respond
        assert respond is not None
        assert TOKENIZER.decode(respond([*TOKENIZER.encode("2+3"), TOKENIZER.eos_token_id]) or ()) == "\n5\n"
