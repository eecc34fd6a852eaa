"""Two evaluations compared; and the numbers behind it: by hand, against brute force, by what intervals must do. The
data set that a filter writes, leaks by what is asked, and what a summary says.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.evaluation import one_task, record, sort
from shoal.cli.main import main
from shoal.environments import Environment, EnvironmentSettings, Task, build
from shoal.environments.data.locating import locate
from shoal.environments.data.readers import Table
from shoal.environments.settings import MixPart
from shoal.errors import ConfigError, LeakFound, ResourceError, UnusableTask
from shoal.evaluation import filter as filtering
from shoal.evaluation import statistics
from shoal.evaluation.compare import compare, comparison_lines
from shoal.evaluation.filter import Rate, RateBand, original_rows, write_rows, written_before
from shoal.evaluation.plan import Leaks, SamplingPlan, archived_ids, find_leaks, tasks_of, train_digests
from shoal.evaluation.records import UNUSABLE, Results, TaskRecord, read_results, write_records
from shoal.evaluation.statistics import bootstrap_mean, mean_estimate, sign_flip_p, t_interval, wilson
from shoal.evaluation.summary import MAX_FAILURES, summary_of, table_lines

ABOUT: dict[str, Any] = {
    "model": {"name": "base", "digest": "ab" * 32},
    "environment": {"name": "sort", "digest": "cd" * 32},
    "plan": {"samples": 4, "temperature": 1.0, "seed": 0, "tasks": 0},
}


def results(tmp_path: Path, name: str, records: list[TaskRecord], about: Mapping[str, Any] = ABOUT) -> Results:
    path = tmp_path / f"{name}.parquet"
    write_records(path, records, about)
    return read_results(path, "tasks.parquet")


def shifted(tmp_path: Path, tasks: int, gain: int) -> tuple[Results, Results]:
    """Tasks of 8 samples, seeded: B solves `gain` more of them on every other task."""
    rng = np.random.default_rng(0)
    first, second = [], []
    for number in range(tasks):
        solved = int(rng.integers(1, 5))
        more = solved + (gain if number % 2 else 0) + int(rng.integers(-1, 2))
        first.append(record(f"t{number}", *([1.0] * solved + [0.0] * (8 - solved))))
        second.append(record(f"t{number}", *([1.0] * more + [0.0] * (8 - more))))
    return results(tmp_path, "a", first), results(tmp_path, "b", second)


def test_difference_is_reported_only_if_there_is_one(tmp_path: Path) -> None:
    a, b = shifted(tmp_path, tasks=60, gain=2)
    found = compare(a, b)
    assert found.difference.low > 0
    assert found.p_value < 0.01
    assert found.sentence.startswith(f"B is better: {found.difference.value:+.3f} [+0.")
    assert (found.verdict, compare(b, a).verdict) == ("better", "worse")
    found = compare(*shifted(tmp_path, tasks=60, gain=0))
    assert found.verdict == "none"
    assert found.sentence.startswith("no difference was found: ")
    assert f"with these 60 tasks a difference of {found.detectable:.3f} is found" in found.sentence
    assert found.detectable > abs(found.difference.value)
    assert compare(a, a).sentence == "no difference was found: A and B scored the same on every one of 60 tasks"
    a = results(tmp_path, "a", [record(f"t{n}", 0.5) for n in range(9)])
    moved = compare(a, results(tmp_path, "b", [record(f"t{n}", n / 8) for n in range(9)])).as_json()
    assert [each["task"] for each in moved["gained"]] == ["t8", "t7", "t6", "t5"]
    assert [each["task"] for each in moved["lost"]] == ["t0", "t1", "t2", "t3"]


def test_the_interval_alone_does_not_make_a_difference(tmp_path: Path) -> None:
    """Five tasks that all gained have an interval above 0, but one in 16 coins would do as well."""
    a = results(tmp_path, "a", [record(f"t{n}", 0.0, 0.0, 0.0, 0.0) for n in range(5)])
    b = results(tmp_path, "b", [record(f"t{n}", 1.0, 1.0, 1.0, 0.0) for n in range(5)])
    found = compare(a, b)
    assert found.difference.low > 0
    assert (found.p_value, found.verdict) == (2 / 32, "none")


def test_incomplete_evaluation_is_compared_only_if_forced(tmp_path: Path) -> None:
    about = ABOUT | {"plan": ABOUT["plan"] | {"samples": 1}, "chosen": {"tasks": 20}}
    whole = results(tmp_path, "a", [record(f"t{n}", 0.0) for n in range(20)], about)
    nearly = results(tmp_path, "c", [record(f"t{n}", None if n == 0 else 1.0) for n in range(20)], about)
    left = results(tmp_path, "b", [record(f"t{n}", 1.0 if n < 15 else None) for n in range(20)], about)
    assert compare(whole, nearly).verdict == "better"
    for pair in ((whole, left), (left, whole)):
        with pytest.raises(ConfigError, match=r"25\.0% of the samples of \S+b\.parquet have no score.* --force"):
            compare(*pair)
        assert sum(compare(*pair, force=True).unpaired.values()) == 5


def test_only_tasks_of_both_with_the_same_prompt_are_paired(tmp_path: Path) -> None:
    a = results(tmp_path, "a", [record("x", 1.0), record("y", 0.0), record("z", 1.0, digest="1"), record("gone", None)])
    b = results(tmp_path, "b", [record("y", 1.0), record("z", 0.0, digest="2"), record("w", 1.0), record("gone", 1.0)])
    found = compare(a, b)
    assert found.means == {"y": (0.0, 1.0)}
    lines = list(comparison_lines(a, b, found))
    assert lines[2] == "1 tasks in both (1 only in a, 2 only in b, 1 other prompt)"
    assert "one task is too few" in lines[-1]
    with pytest.raises(ConfigError, match="have no task in common"):
        compare(a, results(tmp_path, "c", [record("u", 1.0)]))


@pytest.mark.parametrize(("change", "said"), [
    ({"environment": {"name": "sort", "digest": "ee" * 32}}, "their environments are not the same"),
    ({"plan": {**ABOUT["plan"], "temperature": 0.6}}, "temperature is 1.0 in one and 0.6 in the other"),
    ({"plan": {**ABOUT["plan"], "samples": 64, "seed": 9}}, ""),
])  # fmt: skip
def test_other_tasks_or_plans_are_compared_only_by_force(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    a = results(tmp_path, "a", [record("t", 1.0)])
    b = results(tmp_path, "b", [record("t", 0.0)], {**ABOUT, **change})
    if said:
        with pytest.raises(ConfigError, match=said):
            compare(a, b)
    assert len(compare(a, b, force=bool(said)).means) == 1


def test_the_command_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = shifted(tmp_path, tasks=60, gain=2)
    assert main(["compare", str(a.path), str(b.path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("A  base (abababababab, ")
    assert said[-1].startswith("B is better: +0.")
    assert main(["compare", str(a.path), str(b.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sentence"] == said[-1]


@pytest.mark.parametrize("content", [None, b"", b"PAR1nonsense", b"{}"])
def test_files_without_results_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="no results of"):
        read_results(path, "tasks.parquet")
    with pytest.raises(ConfigError, match="is it finished"):
        read_results(tmp_path, "tasks.parquet")


@given(st.data())
def test_pass_at_k_is_the_share_of_choices_that_hold_a_pass(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 9))
    passes, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    outcomes = [True] * passes + [False] * (samples - passes)
    choices = list(itertools.combinations(outcomes, k))
    assert statistics.pass_at_k(samples, passes, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert statistics.pass_at_k(4096, 1, 2048) == pytest.approx(0.5), "without an overflow"


def test_intervals_by_hand() -> None:
    # z = 1.96; of 3 in 10: centre 0.3555, half width 0.2478. Of 1, 2, 3: standard error 1/√3, t = 4.3027
    for found, value, low, high in (
        (wilson(3, 10), 0.3, 0.1078, 0.6032), (wilson(0, 10), 0.0, 0.0, 0.2775), (wilson(10, 10), 1.0, 0.7225, 1.0),
        (t_interval(np.array([1.0, 2.0, 3.0])), 2.0, -0.4841, 4.4841),
    ):  # fmt: skip
        assert (found.value, round(found.low, 4), round(found.high, 4)) == (value, low, high)
    assert str(t_interval(np.array([0.5]))) == "0.500"  # one value has none


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (29, 2.0452), (120, 1.9799), (1001, 1.96235)],
)
def test_quantiles_of_students_distribution(freedom: int, expected: float) -> None:
    assert statistics.t_quantile(0.975, freedom) == pytest.approx(expected, abs=5e-5)


class TestBootstrap:
    def test_it_agrees_with_student_on_few_and_many_values_and_takes_the_normal_interval_for_very_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = np.random.default_rng(1).normal(0.5, 0.1, 200)
        ours, check = bootstrap_mean(values, seed=0), t_interval(values)
        assert (ours.low, ours.high) == pytest.approx((check.low, check.high), abs=0.002)
        assert ours.value == check.value
        assert bootstrap_mean(values, 5) == bootstrap_mean(values, 5) != bootstrap_mean(values, 6)
        values = np.arange(10) / 10
        ours, check = bootstrap_mean(values, 0), t_interval(values)
        assert ours.high - ours.low == pytest.approx(check.high - check.low, rel=0.08)  # plain percentiles: 0.82 of it
        monkeypatch.setattr(statistics, "BOOTSTRAP_TASKS", 10)
        values = np.random.default_rng(3).random(11)
        assert bootstrap_mean(values, 0) == t_interval(values)

    def test_samples_of_a_task_are_no_independent_trials(self) -> None:
        """Twenty tasks, half wholly solved: 64 samples each say no more about the next task than one does."""
        means = np.repeat([0.0, 1.0], 10) * 0.998 + 0.001
        found, naive = mean_estimate(means, 0), wilson(640, 1280)
        assert found.high - found.low > 5 * (naive.high - naive.low)

    def test_it_covers_the_truth_as_often_as_it_says(self) -> None:
        """200 evaluations of 30 tasks with 4 samples each, success rates of tasks from a U-shape: seeded."""
        rng, hits = np.random.default_rng(7), 0
        for trial in range(200):
            rates = rng.beta(0.5, 0.5, 30)
            found = mean_estimate(rng.binomial(4, rates) / 4, trial)
            hits += found.low <= 0.5 <= found.high
        assert 0.92 <= hits / 200 <= 0.98


def test_equal_values_are_not_certain() -> None:
    assert mean_estimate(np.array([1.0, 0.0, 0.0, 1.0]), 0) == wilson(2, 4)
    assert mean_estimate(np.ones(30), 0).low < 0.9
    found = mean_estimate(np.full(10, 0.5), 0)
    assert (found.value, found.low, found.high) == (0.5, wilson(5, 10).low, wilson(5, 10).high)
    assert mean_estimate(np.full(10, 0.1), 0).value == 0.1
    assert str(mean_estimate(np.full(10, 3.0), 0)) == "3.000", "of rewards beyond 1 no interval is known"


def test_sign_flips_by_hand_at_random_and_with_their_nominal_error_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 8 sign patterns of (1, 2, 3) have the sums ±6, ±4, ±2 and 0, 0; zeros change nothing."""
    assert sign_flip_p(np.array([1.0, 0.0, 2.0, 0.0, 3.0]), 0) == 2 / 8
    assert sign_flip_p(np.array([-1.0, 2.0, 3.0]), 0) == 4 / 8
    assert sign_flip_p(np.zeros(5), 0) == 1.0
    assert sign_flip_p(np.ones(200), 0) == 1 / 100_001  # never nothing
    differences = np.random.default_rng(4).normal(0.3, 1, 14)
    exact = sign_flip_p(differences, 0)
    monkeypatch.setattr(statistics, "EXACT_FLIPS", 0)
    assert sign_flip_p(differences, 0) == pytest.approx(exact, abs=0.006)
    assert 0.01 < exact < 0.9
    rng = np.random.default_rng(8)
    rejected = sum(sign_flip_p(rng.choice([-0.25, 0.0, 0.25, 0.5, -0.5], 15), 0) < 0.05 for _ in range(400))
    assert rejected / 400 < 0.08


def test_detectable_difference_is_found_in_four_of_five_comparisons() -> None:
    rng = np.random.default_rng(9)
    spread = rng.normal(0, 0.4, 60)
    wanted = statistics.detectable_difference(spread)
    told = sum(t_interval(rng.normal(wanted, spread.std(ddof=1), 60)).low > 0 for _ in range(300))
    assert 0.74 <= told / 300 <= 0.87
    assert math.isnan(statistics.detectable_difference(np.array([0.1])))


MIDDLE = RateBand(0.25, 0.5)


def rates(**found: float) -> dict[int, Rate]:
    return {int(row.removeprefix("row")): Rate(rate, 4) for row, rate in found.items()}


def table_of(path: Path) -> Table:
    return Table(locate(path, ""))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rates_are_of_scored_samples_and_the_histogram_counts_and_marks_them() -> None:
    records = [record("a", 1.0, None, 0.5), record("b", None), record("c", problem="too long")]
    assert filtering.rates_by_row(sort(), "train", records) == {0: Rate(0.5, 2)}
    shown = list(filtering.histogram_lines(rates(row0=0.0, row1=0.25, row2=0.25, row3=1.0), 4, MIDDLE))
    assert [line.split()[0] for line in shown] == ["0.000", "0.250", "0.500", "0.750", "1.000"]
    assert [line.endswith("◂") for line in shown] == [False, True, True, False, False]
    assert shown[1].split()[-2] == "2"
    assert len(list(filtering.histogram_lines(rates(row0=0.3), 64, MIDDLE))) == 11


@pytest.mark.parametrize("text", ["", "0.5", "a:b", "0.5:0.1", "-0.1:1", "0:1.1", "nan:1", "0:0.5:1"])
def test_invalid_bands_are_refused_and_bands_include_their_ends(text: str) -> None:
    with pytest.raises(ConfigError, match="give two rates from 0 to 1"):
        RateBand.parse(text)
    band = RateBand.parse("0.1:0.3")
    assert [band.holds(value) for value in (0.1, 3 / 10, 0.0999, 0.3001)] == [True, True, False, False]


class TestRows:
    def test_json_lines_keep_every_column_and_number_their_rows_as_the_file_does(self, tmp_path: Path) -> None:
        path = lines(
            tmp_path / "d.jsonl", {"question": "a", "odd": 1, "none": None, "deep": {"x": [1]}, "nothing": {}},
            "{broken", {"question": "b", "odd": "text", "deep": {"x": []}, "nothing": {}},
            {"question": "c", "odd": [2], "deep": {"x": [2], "y": 1.5}, "nothing": {}},
        )  # fmt: skip
        found, out = rates(row0=0.25, row2=1.0, row3=0.5), tmp_path / "out.parquet"
        assert write_rows(out, original_rows(table_of(path), found, MIDDLE, "m"), {}) == 2
        first, second = pq.read_table(out).to_pylist()
        assert (first["question"], first["solve_rate_m"], first["samples_m"]) == ("a", 0.25, 4)
        assert (second["question"], second["solve_rate_m"], second["samples_m"]) == ("c", 0.5, 4)
        assert (first["odd"], second["odd"]) == ("1", "[2]")  # of many types: JSON
        assert (first["deep"]["x"], second["deep"]["y"], first["none"]) == ([1], 1.5, None)

    def test_types_of_parquet_are_kept(self, tmp_path: Path) -> None:
        table = pa.table(
            {"q": ["a", "b"], "small": pa.array([1, 2], pa.int8()), "l": pa.array([[1], []], pa.list_(pa.int16()))}
        )
        pq.write_table(table, tmp_path / "d.parquet")
        found = original_rows(table_of(tmp_path / "d.parquet"), rates(row1=0.5), MIDDLE, "m")
        assert found.drop_columns(["solve_rate_m", "samples_m"]).equals(table.slice(1))

    def test_rows_are_numbered_through_all_shards(self, tmp_path: Path) -> None:
        for shard in range(3):
            pq.write_table(pa.table({"q": [f"{shard}/{n}" for n in range(4)]}), tmp_path / f"{shard}.parquet")
        found = original_rows(table_of(tmp_path), rates(row2=0.5, row5=0.0, row9=0.5), MIDDLE, "m")
        assert found["q"].to_pylist() == ["0/2", "2/1"]
        whole = original_rows(table_of(tmp_path / "0.parquet"), rates(row1=0.0), None, "m")
        columns = {name: whole[name].to_pylist() for name in ("solve_rate_m", "samples_m")}
        assert columns == {"solve_rate_m": [None, 0.0, None, None], "samples_m": [0, 4, 0, 0]}, "all rows, or none"

    def test_a_task_leads_to_its_row(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "d.jsonl", *({"question": f"{n}?", "answer": f"{n}"} for n in range(20)))
        data = filtering.data_of(build(EnvironmentSettings(name="dataset", data=path, held_out_size=3)))
        assert data is not None
        for part in ("all", "train", "held_out"):
            tasks = tasks_of(data, part)  # type: ignore[arg-type]
            found = [filtering.row_of(data, part, index) for index in range(len(tasks))]  # type: ignore[arg-type]
            assert [task.prompt for task in tasks] == [f"{row}?" for row in found]
        assert filtering.data_of(sort()) is None

    def test_tasks_without_rows_and_columns_that_are_taken(self) -> None:
        (row,) = filtering.task_rows(sort(), "train", rates(row3=0.25, row5=1.0), MIDDLE, "m").to_pylist()
        assert row["problem_id"] == "sort/train/3"
        assert row["answer"] == "".join(sorted(row["prompt"].rstrip("=")))
        assert filtering.task_rows(sort(), "train", rates(row5=1.0), MIDDLE, "m").num_rows == 0
        with pytest.raises(ConfigError, match=r"has a column solve_rate_m already.*--name"):
            filtering.refuse_taken(["question", "solve_rate_m"], "m")
        filtering.refuse_taken(["question", "solve_rate_other"], "m")


class TestTheFile:
    def test_it_is_whole_or_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(_table: Any, hidden: Path, **_how: Any) -> None:
            hidden.write_bytes(b"PAR1")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pq, "write_table", failing)
        with pytest.raises(ResourceError, match="the disk is full"):
            write_rows(tmp_path / "x.parquet", pa.table({"a": [1]}), {})
        assert not (tmp_path / "x.parquet").exists()
        assert write_rows(tmp_path / "y.parquet", pa.table({"a": []}), {}) == 0
        assert not (tmp_path / "y.parquet").exists()

    def test_existing_output_is_recognised(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        assert not written_before(path, {"band": "0:1"})
        write_rows(path, pa.table({"a": [1]}), {"band": "0:1"})
        assert written_before(path, {"band": "0:1"})
        with pytest.raises(ConfigError, match=r"another result: its band is 0:1, here it would be 0:0.5"):
            written_before(path, {"band": "0:0.5"})
        path.write_bytes(b"mine")
        with pytest.raises(ConfigError, match="was not written by shoal filter"):
            written_before(path)


def tasks(environment: Environment, split: str, count: int) -> list[Task]:
    return [environment.tasks(split)[index] for index in range(count)]  # type: ignore[arg-type]


class TestLeaks:
    def test_leaks_are_found_under_other_ids_and_spacing_and_listed_separately_in_batches(self) -> None:
        environment = sort(train_size=50)
        evaluated = [Task("mine", f" {environment.tasks('train')[7].prompt}\n", ""), one_task("999=")]
        assert find_leaks(evaluated, environment) == Leaks(known=("mine",))
        assert find_leaks(tasks(environment, "held_out", 64), sort(train_size=2000)) == Leaks()
        evaluated = tasks(environment, "train", 3)
        found = find_leaks(evaluated, environment, ["sort/train/1", "sort/train/40"])
        assert found == Leaks(("sort/train/0", "sort/train/1", "sort/train/2"), ("sort/train/1",))
        with pytest.raises(LeakFound, match=r"3 of the evaluated .* 1 of them in batches .*: sort/train/0, .*--allow"):
            found.refuse()
        assert LeakFound.exit_code == 5
        Leaks().refuse()

    def test_rows_that_cannot_be_used_are_not_trained_on(self) -> None:
        class Holed(list[Task]):
            def __getitem__(self, index: object) -> Task:  # type: ignore[override]
                if index == 1:
                    raise UnusableTask("row 1")
                return one_task(str(index))

        class Environment:
            def tasks(self, _split: str) -> Sequence[Task]:
                return Holed([one_task("")] * 3)

        assert len(list(train_digests(Environment()))) == 2  # type: ignore[arg-type]

    def test_a_mixture_has_the_prompts_of_all_its_parts(self) -> None:
        parts = (MixPart(name="sort", train_size=20), MixPart(name="addition", train_size=20, weight=1e-6))
        mixture = build(EnvironmentSettings(mix=parts, train_size=8, held_out_size=4))
        rare = build(EnvironmentSettings(name="addition", train_size=20)).tasks("train")[13]
        assert find_leaks([rare], mixture) == Leaks(known=("addition/train/13",))
        assert find_leaks(tasks(mixture, "held_out", 2), mixture) == Leaks()

    def test_the_archive_of_a_run(self, tmp_path: Path) -> None:
        for step, ids in ((0, ["a", "b", "b"]), (1, ["c"]), (2, [])):
            columns = {"task": pa.array(ids, pa.string()), "step": pa.array([step] * len(ids), pa.int64())}
            pq.write_table(pa.table(columns), tmp_path / f"step-{step:05d}.parquet")
        assert archived_ids(tmp_path) == {"a", "b", "c"}
        assert archived_ids(tmp_path / "none") == set()


class TestSummary:
    def test_the_numbers_by_hand_and_by_part_and_kind(self) -> None:
        records = [record("a", 1.0, 0.0), record("b", 0.0, 0.0), record("c", 1.0, 1.0)]
        found = summary_of(SamplingPlan(samples=2, temperature=1), records)
        interval = mean_estimate(np.array([0.5, 0.0, 1.0]), 0)
        assert found["avg_at_k"] == {"k": 2, "value": 0.5, "low": interval.low, "high": interval.high}
        assert [found["pass_at_k"][k]["value"] for k in "12"] == [0.5, pytest.approx(2 / 3)]
        assert (found["parts"], found["mean_tokens"]) == ({"exact": 0.5}, 5.0)
        found = summary_of(SamplingPlan(samples=2, temperature=1), [record("a", 1.0, None), record("b", 0.0, 1.0)])
        assert [found["pass_at_k"][k]["value"] for k in "12"] == [0.75, 1.0], "of tasks with as many samples"
        assert found["unscored"] == {"samples": 1, "share": 0.25, "tasks": ["a"]}
        given = [("m:a", 1.0, "m", "mathematics"), ("c:b", 0.0, "c", "code"), ("m:c", 0.0, "m", "mathematics")]
        records = [record(task, score, part=part, kind=kind) for task, score, part, kind in given]
        found = summary_of(SamplingPlan(), records)
        assert found["by"]["part"]["m"]["avg_at_k"]["value"] == 0.5
        assert found["by"]["kind"]["code"]["tasks"] == 1
        assert {"part m", "kind code"} <= {line[2:].partition("  ")[0] for line in table_lines(found)}

    def test_summary_without_scores_has_no_figures(self) -> None:
        found = summary_of(SamplingPlan(), [record("a", None), record("b", problem="too long")])
        assert (found["avg_at_k"], found["pass_at_k"], found["unscored"]["share"]) == (None, {"1": None}, 1.0)
        assert list(table_lines(found))[1:] == [
            "  nothing could be scored",
            "  1 sample unscored, counted in no figure: scoring failed (a)",
            "  1 task left out: too long",
        ]

    def test_five_percent_of_samples_may_be_missing_not_counting_unusable_rows(self) -> None:
        good, lost = [record(f"t{n}", 1.0) for n in range(18)], record("b", None)
        shares = [summary_of(SamplingPlan(), given)["unscored"]["share"]
                  for given in ([*good, record("a", 1.0), lost], [*good, lost])]  # fmt: skip
        assert shares[0] <= MAX_FAILURES < shares[1]
        unusable = record("b", problem=UNUSABLE)
        tally = summary_of(SamplingPlan(), [record("a", 1.0), unusable, record("c", problem="too long")])
        assert tally["unscored"]["share"] == 0.5
        assert "  1 task left out: its row cannot be used" in table_lines(tally)
        assert summary_of(SamplingPlan(), [unusable])["unscored"]["share"] == 1.0
