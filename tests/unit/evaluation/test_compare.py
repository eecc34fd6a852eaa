"""Two evaluations: what is paired, what is concluded, and what is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.evaluation import record
from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.evaluation.compare import PairedComparison, compare, comparison_lines
from shoal.evaluation.records import Results, TaskRecord, read_results, write_records

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
    dice = np.random.default_rng(0)
    first, second = [], []
    for number in range(tasks):
        solved = int(dice.integers(1, 5))
        more = solved + (gain if number % 2 else 0) + int(dice.integers(-1, 2))
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
def test_what_is_not_about_the_same_is_compared_only_by_force(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    a = results(tmp_path, "a", [record("t", 1.0)])
    b = results(tmp_path, "b", [record("t", 0.0)], {**ABOUT, **change})
    with pytest.raises(ConfigError, match=said):
        compare(a, b)
    assert isinstance(compare(a, b, force=True), PairedComparison)


def test_more_samples_and_other_dice_are_about_the_same(tmp_path: Path) -> None:
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
