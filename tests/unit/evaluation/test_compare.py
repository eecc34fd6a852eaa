"""Two evaluations compared; and the numbers behind it: by hand, against brute force, by what intervals must do."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.evaluation import record
from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.evaluation import statistics
from shoal.evaluation.compare import compare, comparison_lines
from shoal.evaluation.records import Results, TaskRecord, read_results, write_records
from shoal.evaluation.statistics import bootstrap_mean, mean_estimate, sign_flip_p, t_interval, wilson

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


def test_a_difference_is_told_only_where_it_is(tmp_path: Path) -> None:
    a, b = shifted(tmp_path, tasks=60, gain=2)
    found = compare(a, b)
    assert found.difference.low > 0
    assert found.p_value < 0.01
    assert found.sentence.startswith(f"B is better: {found.difference.value:+.3f} [+0.")
    assert (found.verdict, compare(b, a).verdict) == ("better", "worse")
    found = compare(*shifted(tmp_path, tasks=60, gain=0))
    assert found.verdict == "none"
    assert found.sentence.startswith("no difference can be told: ")
    assert f"with these 60 tasks a difference of {found.detectable:.3f} would be" in found.sentence
    assert found.detectable > abs(found.difference.value)
    assert compare(a, a).sentence == "no difference can be told: A and B scored the same on every one of 60 tasks"
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


def test_what_is_left_of_an_evaluation_is_not_compared_unless_forced(tmp_path: Path) -> None:
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
    assert "one task says nothing" in lines[-1]
    with pytest.raises(ConfigError, match="have no task in common"):
        compare(a, results(tmp_path, "c", [record("u", 1.0)]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"environment": {"name": "sort", "digest": "ee" * 32}}, "their environments are not the same"),
        ({"plan": {**ABOUT["plan"], "temperature": 0.6}}, "temperature is 1.0 in one and 0.6 in the other"),
        ({"plan": {**ABOUT["plan"], "samples": 64, "seed": 9}}, ""),
    ],
)
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
def test_what_holds_no_results_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="no results of"):
        read_results(path, "tasks.parquet")
    with pytest.raises(ConfigError, match="is it finished"):
        read_results(tmp_path, "tasks.parquet")


# The numbers of evaluations: by hand, against brute force, and by what intervals must do


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
    def test_it_agrees_with_student_on_well_behaved_values(self) -> None:
        values = np.random.default_rng(1).normal(0.5, 0.1, 200)
        ours, check = bootstrap_mean(values, seed=0), t_interval(values)
        assert (ours.low, ours.high) == pytest.approx((check.low, check.high), abs=0.002)
        assert ours.value == check.value
        assert bootstrap_mean(values, 5) == bootstrap_mean(values, 5) != bootstrap_mean(values, 6)

    def test_few_tasks_have_as_wide_an_interval_as_student_says(self) -> None:
        values = np.arange(10) / 10
        ours, check = bootstrap_mean(values, 0), t_interval(values)
        assert ours.high - ours.low == pytest.approx(check.high - check.low, rel=0.08)  # plain percentiles: 0.82 of it

    def test_samples_of_a_task_are_no_independent_trials(self) -> None:
        """Twenty tasks, half wholly solved: 64 samples each say no more about the next task than one does."""
        means = np.repeat([0.0, 1.0], 10) * 0.998 + 0.001
        found, naive = mean_estimate(means, 0), wilson(640, 1280)
        assert found.high - found.low > 5 * (naive.high - naive.low)

    def test_very_many_tasks_take_the_normal_interval(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statistics, "BOOTSTRAP_TASKS", 10)
        values = np.random.default_rng(3).random(11)
        assert bootstrap_mean(values, 0) == t_interval(values)

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


def test_sign_flips_by_hand() -> None:
    """The 8 sign patterns of (1, 2, 3) have the sums ±6, ±4, ±2 and 0, 0; zeros change nothing."""
    assert sign_flip_p(np.array([1.0, 0.0, 2.0, 0.0, 3.0]), 0) == 2 / 8
    assert sign_flip_p(np.array([-1.0, 2.0, 3.0]), 0) == 4 / 8
    assert sign_flip_p(np.zeros(5), 0) == 1.0
    assert sign_flip_p(np.ones(200), 0) == 1 / 100_001  # never nothing


def test_random_flips_come_to_what_counting_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(4).normal(0.3, 1, 14)
    exact = sign_flip_p(differences, 0)
    monkeypatch.setattr(statistics, "EXACT_FLIPS", 0)
    assert sign_flip_p(differences, 0) == pytest.approx(exact, abs=0.006)
    assert 0.01 < exact < 0.9


def test_where_nothing_differs_the_test_rejects_as_often_as_it_says() -> None:
    rng = np.random.default_rng(8)
    rejected = sum(sign_flip_p(rng.choice([-0.25, 0.0, 0.25, 0.5, -0.5], 15), 0) < 0.05 for _ in range(400))
    assert rejected / 400 < 0.08


def test_the_difference_that_could_be_told_is_told_four_times_in_five() -> None:
    rng = np.random.default_rng(9)
    spread = rng.normal(0, 0.4, 60)
    wanted = statistics.detectable_difference(spread)
    told = sum(t_interval(rng.normal(wanted, spread.std(ddof=1), 60)).low > 0 for _ in range(300))
    assert 0.74 <= told / 300 <= 0.87
    assert math.isnan(statistics.detectable_difference(np.array([0.1])))
