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
from shoal.evaluation.compare import PairedComparison, compare, comparison_lines
from shoal.evaluation.records import Results, TaskRecord, read_results, write_records
from shoal.evaluation.statistics import (
    bootstrap_means,
    detectable_difference,
    ks_up_to,
    mean_estimate,
    pass_at_k,
    sign_flip_p,
    t_interval,
    t_quantile,
    wilson,
)

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


def test_a_difference_that_is_there_is_told(tmp_path: Path) -> None:
    found = compare(*shifted(tmp_path, tasks=60, gain=2))
    assert found.verdict == "better"
    assert found.difference.low > 0
    assert found.p_value < 0.01
    assert found.sentence.startswith(f"B is better: {found.difference.value:+.3f} [+0.")
    a, b = shifted(tmp_path, tasks=60, gain=2)
    assert compare(b, a).verdict == "worse"


def test_a_difference_that_is_not_there_is_not(tmp_path: Path) -> None:
    found = compare(*shifted(tmp_path, tasks=60, gain=0))
    assert found.verdict == "none"
    assert found.sentence.startswith("no difference can be told: ")
    assert f"with these 60 tasks a difference of {found.detectable:.3f} would be" in found.sentence
    assert found.detectable > abs(found.difference.value)


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
        assert compare(*pair, force=True).only_a + compare(*pair, force=True).only_b == 5


def test_equal_everywhere(tmp_path: Path) -> None:
    a = results(tmp_path, "a", [record("t", 1.0), record("u", 0.0)])
    assert compare(a, a).sentence == "no difference can be told: A and B scored the same on every one of 2 tasks"


def test_only_tasks_of_both_with_the_same_prompt_are_paired(tmp_path: Path) -> None:
    a = results(tmp_path, "a", [record("x", 1.0), record("y", 0.0), record("z", 1.0, digest="1"), record("gone", None)])
    b = results(tmp_path, "b", [record("y", 1.0), record("z", 0.0, digest="2"), record("w", 1.0), record("gone", 1.0)])
    found = compare(a, b)
    assert [pair.first.task for pair in found.pairs] == ["y"]
    assert (found.only_a, found.only_b, found.other_prompt) == (1, 2, 1)
    lines = list(comparison_lines(a, b, found))
    assert lines[2] == "1 tasks in both (1 only in A, 2 only in B, 1 with another prompt in each)"
    assert "one task says nothing" in lines[-1]


def test_the_tasks_that_moved_most(tmp_path: Path) -> None:
    a = results(tmp_path, "a", [record(f"t{n}", 0.5) for n in range(9)])
    b = results(tmp_path, "b", [record(f"t{n}", n / 8) for n in range(9)])
    gained, lost = compare(a, b).movers()
    assert [pair.first.task for pair in gained] == ["t8", "t7", "t6", "t5"]
    assert [pair.first.task for pair in lost] == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"environment": {"name": "sort", "digest": "ee" * 32}}, "their environments are not the same"),
        ({"plan": {**ABOUT["plan"], "temperature": 0.6}}, "temperature is 1.0 in one and 0.6 in the other"),
    ],
)
def test_other_tasks_or_plans_are_compared_only_by_force(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    a = results(tmp_path, "a", [record("t", 1.0)])
    b = results(tmp_path, "b", [record("t", 0.0)], {**ABOUT, **change})
    with pytest.raises(ConfigError, match=said):
        compare(a, b)
    assert isinstance(compare(a, b, force=True), PairedComparison)


def test_more_samples_and_other_seeds_are_about_the_same(tmp_path: Path) -> None:
    a = results(tmp_path, "a", [record("t", 1.0)])
    b = results(tmp_path, "b", [record("t", 0.0)], {**ABOUT, "plan": {**ABOUT["plan"], "samples": 64, "seed": 9}})
    assert len(compare(a, b).pairs) == 1


def test_nothing_in_common(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have no task in common"):
        compare(results(tmp_path, "a", [record("t", 1.0)]), results(tmp_path, "b", [record("u", 1.0)]))


class TestTheCommand:
    def test_for_people_and_for_programs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        a, b = shifted(tmp_path, tasks=60, gain=2)
        assert main(["compare", str(a.path), str(b.path)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith("A  base (abababababab, ")
        assert said[-1].startswith("B is better: +0.")
        assert main(["compare", str(a.path), str(b.path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sentence"] == said[-1]

    @pytest.mark.parametrize("content", [None, b"", b"PAR1nonsense", b"{}"])
    def test_what_holds_no_results(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
    ) -> None:
        path = tmp_path / "x.parquet"
        if content is not None:
            path.write_bytes(content)
        assert main(["compare", str(path), str(path)]) == 2
        assert "no results of" in capsys.readouterr().err
        assert main(["compare", str(tmp_path), str(path)]) == 2
        assert "(is it finished?)" in capsys.readouterr().err


# The numbers of evaluations: by hand, against brute force, and by what intervals must do


class TestPassAtK:
    @pytest.mark.parametrize(
        ("samples", "passes", "k", "expected"),
        [(4, 0, 2, 0.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (4, 3, 2, 1.0), (5, 5, 5, 1.0)],
    )
    def test_by_hand(self, samples: int, passes: int, k: int, expected: float) -> None:
        assert pass_at_k(samples, passes, k) == pytest.approx(expected, abs=1e-15)

    @given(st.data())
    def test_it_is_the_share_of_choices_that_hold_a_pass(self, data: st.DataObject) -> None:
        samples = data.draw(st.integers(1, 9))
        passes, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
        outcomes = [True] * passes + [False] * (samples - passes)
        choices = list(itertools.combinations(outcomes, k))
        assert pass_at_k(samples, passes, k) == pytest.approx(sum(map(any, choices)) / len(choices))

    def test_many_samples_do_not_overflow(self) -> None:
        assert pass_at_k(4096, 1, 2048) == pytest.approx(0.5)

    @pytest.mark.parametrize(("samples", "passes", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5), (0, 0, 1)])
    def test_what_makes_no_sense_is_refused(self, samples: int, passes: int, k: int) -> None:
        with pytest.raises(ValueError, match="no pass@"):
            pass_at_k(samples, passes, k)

    @pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (6, [1, 2, 4, 6])])
    def test_the_ks_that_are_shown(self, samples: int, expected: list[int]) -> None:
        assert ks_up_to(samples) == expected


class TestWilson:
    def test_by_hand(self) -> None:
        found = wilson(3, 10)  # z = 1.96: centre 0.3555, half width 0.2478
        assert (found.value, round(found.low, 4), round(found.high, 4)) == (0.3, 0.1078, 0.6032)

    @pytest.mark.parametrize(("passes", "low", "high"), [(0, 0.0, 0.2775), (10, 0.7225, 1.0)])
    def test_none_and_all_still_have_a_width(self, passes: int, low: float, high: float) -> None:
        found = wilson(passes, 10)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)

    def test_no_trials_are_refused(self) -> None:
        with pytest.raises(ValueError, match="no proportion"):
            wilson(0, 0)


class TestStudent:
    @pytest.mark.parametrize(
        ("freedom", "expected"),
        [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (29, 2.0452), (30, 2.0423), (120, 1.9799)],
    )
    def test_the_table(self, freedom: int, expected: float) -> None:
        assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=5e-5)

    def test_the_correction_for_many_continues_the_sums_for_few(self) -> None:
        assert t_quantile(0.975, 1001) == pytest.approx(t_quantile(0.975, 1000), abs=1e-5)

    def test_the_interval_by_hand(self) -> None:
        found = t_interval(np.array([1.0, 2.0, 3.0]))  # standard error 1/√3, t = 4.3027
        assert (found.value, round(found.low, 3), round(found.high, 3)) == (2.0, -0.484, 4.484)

    def test_one_value_has_none(self) -> None:
        found = t_interval(np.array([0.5]))
        assert (found.value, str(found)) == (0.5, "0.500")


class TestBootstrap:
    def test_it_agrees_with_student_on_well_behaved_values(self) -> None:
        values = np.random.default_rng(1).normal(0.5, 0.1, 200)
        ours, check = bootstrap_means(values[:, None], seed=0)[0], t_interval(values)
        assert (ours.low, ours.high) == pytest.approx((check.low, check.high), abs=0.002)
        assert ours.value == check.value

    def test_the_same_seed_gives_the_same_interval_and_another_another(self) -> None:
        values = np.random.default_rng(2).random((40, 2))
        assert bootstrap_means(values, 5) == bootstrap_means(values, 5)
        assert bootstrap_means(values, 5) != bootstrap_means(values, 6)

    def test_few_tasks_have_as_wide_an_interval_as_student_says(self) -> None:
        values = np.arange(10) / 10
        ours, check = bootstrap_means(values[:, None], 0)[0], t_interval(values)
        assert ours.high - ours.low == pytest.approx(check.high - check.low, rel=0.08)  # plain percentiles: 0.82 of it

    def test_samples_of_a_task_are_no_independent_trials(self) -> None:
        """Twenty tasks, half wholly solved: 64 samples each say no more about the next task than one does."""
        means = np.repeat([0.0, 1.0], 10) * 0.998 + 0.001
        found = mean_estimate(means, 0)
        naive = wilson(640, 1280)
        assert found.high - found.low > 5 * (naive.high - naive.low)

    def test_very_many_tasks_take_the_normal_interval(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statistics, "BOOTSTRAP_TASKS", 10)
        values = np.random.default_rng(3).random(11)
        assert bootstrap_means(values[:, None], 0)[0] == t_interval(values)

    def test_it_covers_the_truth_as_often_as_it_says(self) -> None:
        """300 evaluations of 30 tasks with 4 samples each, success rates of tasks from a U-shape: seeded."""
        rng, hits = np.random.default_rng(7), 0
        for trial in range(300):
            rates = rng.beta(0.5, 0.5, 30)
            found = mean_estimate(rng.binomial(4, rates) / 4, trial)
            hits += found.low <= 0.5 <= found.high
        assert 0.92 <= hits / 300 <= 0.98


class TestMeanEstimate:
    def test_zeros_and_ones_get_wilsons_interval(self) -> None:
        assert mean_estimate(np.array([1.0, 0.0, 0.0, 1.0]), 0) == wilson(2, 4)

    def test_all_solved_is_not_certainty(self) -> None:
        assert mean_estimate(np.ones(30), 0).low < 0.9

    def test_neither_is_the_same_part_of_every_task(self) -> None:
        found = mean_estimate(np.full(10, 0.5), 0)
        assert (found.value, found.low, found.high) == (0.5, wilson(5, 10).low, wilson(5, 10).high)
        assert mean_estimate(np.full(10, 0.1), 0).value == 0.1
        assert str(mean_estimate(np.full(10, 3.0), 0)) == "3.000", "of rewards beyond 1 no interval is known"


class TestSignFlips:
    def test_by_hand(self) -> None:
        """The 8 sign patterns of (1, 2, 3) have the sums ±6, ±4, ±2 and 0, 0."""
        assert sign_flip_p(np.array([1.0, 2.0, 3.0]), 0) == 2 / 8
        assert sign_flip_p(np.array([-1.0, 2.0, 3.0]), 0) == 4 / 8

    def test_zeros_change_nothing(self) -> None:
        assert sign_flip_p(np.array([1.0, 0.0, 2.0, 0.0, 3.0]), 0) == 2 / 8
        assert sign_flip_p(np.zeros(5), 0) == 1.0

    def test_random_flips_come_to_what_counting_comes_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        differences = np.random.default_rng(4).normal(0.3, 1, 14)
        exact = sign_flip_p(differences, 0)
        monkeypatch.setattr(statistics, "EXACT_FLIPS", 0)
        assert sign_flip_p(differences, 0) == pytest.approx(exact, abs=0.006)
        assert 0.01 < exact < 0.9

    def test_a_p_value_is_never_nothing(self) -> None:
        assert sign_flip_p(np.ones(200), 0) == 1 / 100_001

    def test_where_nothing_differs_it_rejects_as_often_as_it_says(self) -> None:
        rng = np.random.default_rng(8)
        rejected = sum(sign_flip_p(rng.choice([-0.25, 0.0, 0.25, 0.5, -0.5], 15), 0) < 0.05 for _ in range(400))
        assert rejected / 400 < 0.08


def test_the_difference_that_could_be_told_is_told_four_times_in_five() -> None:
    rng = np.random.default_rng(9)
    spread = rng.normal(0, 0.4, 60)
    wanted = detectable_difference(spread)
    told = 0
    for _ in range(300):
        found = t_interval(rng.normal(wanted, spread.std(ddof=1), 60))
        told += found.low > 0
    assert 0.74 <= told / 300 <= 0.87
    assert math.isnan(detectable_difference(np.array([0.1])))
