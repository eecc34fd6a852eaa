"""Rows that cannot be used: found, told by number, left out or refused, and never a shift of the others."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datakit import (
    checked,
    described,
    lines,
    open_data,
    own_cache,
    refused,
    write_either,
    write_jsonl,
    write_parquet,
)  # fmt: skip

from shoal.environments.data import readers, scanning
from shoal.environments.data.scanning import Problems
from shoal.errors import EnvironmentSetupError, ScoringFailure, UnusableTask

__all__ = ["own_cache"]

SHALLOW: list[tuple[str, Any, str]] = [
    ("prompt", None, "prompt is missing"), ("prompt", "", "prompt is empty"), ("prompt", " \n\t", "prompt is empty"),
    ("task_type", "riddle", "task_type 'riddle' is unknown"), ("task_type", None, "task_type 'None' is unknown"),
    ("problem_id", "p2", "problem_id 'p2' is that of an earlier row"),
]  # fmt: skip
DEEP: list[tuple[Any, str]] = [
    (None, "verification_info is missing"), ("", "verification_info is empty"),
    ("{not", "verification_info is no JSON"), ("[1]", "verification_info is no JSON object"), ("{}", ""),
    ('{"ground_truth": ""}', ""),
]  # fmt: skip


@pytest.mark.parametrize(("column", "value", "said"), SHALLOW)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_row_that_cannot_be_asked_is_left_out_and_shifts_nothing(
    name: str, column: str, value: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_either(tmp_path / name, described(20, **{column: {7: value}}))
    environment = open_data(path, bad_rows="skip")
    (problem,) = environment.problems.first
    assert problem[0] == 7
    assert problem[1].startswith(said)
    where = "a.parquet" if name == "a.parquet" else "a.jsonl line 8"
    assert f"1 of 20 rows left out, for they cannot be used: row 7 ({where}): {said}" in caplog.text
    ids = {task.id for split in ("train", "held_out") for task in environment.tasks(split)}
    assert len(ids) == 19
    assert "8/p8" in ids
    assert environment.task("8/p8").prompt == "What is 8 + 8?"
    with pytest.raises(UnusableTask):
        environment.task("7/p7")
    with pytest.raises(EnvironmentSetupError, match=r"1 row of .*row 7 "):
        open_data(path, bad_rows="refuse")


@pytest.mark.parametrize(("info", "said"), DEEP)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_answer_that_cannot_be_used_makes_its_task_unusable(name: str, info: Any, said: str, tmp_path: Path) -> None:
    path = write_either(tmp_path / name, described(20, verification_info={7: info}))
    environment = open_data(path)
    assert environment.problems.count == 0  # answers are not read when a data set is opened
    position = [environment.row_at("train", place) for place in range(len(environment.tasks("train")))].index(7)
    with pytest.raises(UnusableTask, match=rf"row 7 .* cannot be used: {said}"):
        environment.tasks("train")[position]
    assert environment.tasks("train")[position + 1].id == "8/p8"
    task = environment.task("7/p7")  # the hub that has drawn it needs its prompt only
    with pytest.raises(UnusableTask):
        _ = task.answer
    with pytest.raises(ScoringFailure, match="row 7"):
        environment.score(task, "14")
    with pytest.raises(EnvironmentSetupError, match=rf"1 row of .* row 7 .*: {said}"):
        open_data(path, bad_rows="refuse")


def test_a_check_finds_everything_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = described(40, prompt={3: "", 30: None}, verification_info={5: "{", 31: None})
    path = write_parquet(tmp_path / "a.parquet", rows)
    done: list[tuple[int, int]] = []
    problems = checked(open_data(path), lambda *now: done.append(now))
    assert done[-1] == (40, 40)
    assert problems.count == 4
    assert [row for row, _ in sorted(problems.first)] == [3, 5, 30, 31]
    again = open_data(path)
    monkeypatch.setattr(scanning, "check", lambda *_: pytest.fail("read everything again"))
    assert checked(again).count == 4
    with pytest.raises(UnusableTask, match="row 5 "):
        again.task("5/p5")  # known without reading its answer
    with pytest.raises(EnvironmentSetupError, match="4 rows"):
        open_data(path, bad_rows="refuse")


def test_bad_rows_of_a_held_out_file_are_told_by_their_own_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = write_parquet(tmp_path / "train.parquet", described(20))
    other = [
        {**row, "prompt": f"Other {number}?"} for number, row in enumerate(described(6, verification_info={4: "{"}))
    ]
    other[2]["prompt"] = ""
    path = write_jsonl(tmp_path / "test.jsonl", other)
    environment = open_data(train, held_out=path)
    assert "1 of 6 rows left out, for they cannot be used: row 2 (test.jsonl line 3): prompt is empty" in caplog.text
    good, found = environment.check(lambda *_: None)
    assert good.problems.count == 0
    assert [(row, found.where(row)) for row, _ in found.problems.first] == [
        (2, "test.jsonl line 3"),
        (4, "test.jsonl line 5"),
    ]
    with pytest.raises(EnvironmentSetupError, match=r"2 rows of the data .*test\.jsonl cannot be used: row 2 "):
        open_data(train, held_out=path, bad_rows="refuse")


@pytest.mark.parametrize("value", [["verifiable_math"], {"name": "verifiable_math"}, 7, b"\xff"])
def test_a_task_type_that_is_no_text_is_unknown(value: object, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", described(10, task_type=dict.fromkeys(range(10), value)))
    assert re.search(r"leaves no task to train on: row 0 \(a\.parquet\): task_type .* is", refused(path))


@pytest.mark.parametrize("column", ["task_type", "verification_info", "problem_id", "prompt"])
@pytest.mark.parametrize("check_first", [False, True])
def test_text_that_is_not_utf_8_in_a_column_of_text_is_a_bad_row(
    column: str, check_first: bool, tmp_path: Path
) -> None:
    rows = described(10)
    texts = [row[column].encode() for row in rows]
    texts[4] = texts[5] = b"\xff\xfe"
    columns = {name: pa.array([row[name] for row in rows]) for name in rows[0]}
    columns[column] = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    environment, good = open_data(tmp_path / "a.parquet"), []
    if column == "prompt":
        assert environment.problems.first == [(row, "prompt is not UTF-8") for row in (4, 5)]
    if check_first:
        assert [row for row, _ in sorted(checked(environment).first)] == [4, 5]
    for tasks in (environment.tasks("train"), environment.tasks("held_out")):
        for position in range(len(tasks)):
            with contextlib.suppress(UnusableTask):
                good.append(tasks[position].id)
    assert sorted(good) == [f"{row}/p{row}" for row in range(10) if row not in (4, 5)]


def test_graders_of_rows_that_cannot_be_asked_are_part_of_the_environment(tmp_path: Path) -> None:
    """Its digest names them, and must not change."""
    rows = described(20, task_type={3: "verifiable_code"}, prompt={3: ""})
    environment = open_data(write_parquet(tmp_path / "a.parquet", rows), bad_rows="skip")
    assert "(code, mathematics)" in environment.description


def test_a_row_is_told_by_one_number_where_one_is_enough(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", [{**row, "problem_id": None} for row in described(10)])
    environment = open_data(tmp_path, bad_rows="refuse")  # which refuses no good data set
    assert [environment.where(row) for row in (7, 17)] == ["a.parquet", "b.parquet row 7"]


def test_the_sequence_of_tasks_does_not_depend_on_whether_it_was_checked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", described(30, verification_info={4: "{", 9: "{"}))
    before = open_data(path)
    before.check(lambda *_: None)
    after = open_data(path)
    assert before.digest == after.digest
    assert before.splits.train.tolist() == after.splits.train.tolist()


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    good = lines(described(12)).splitlines(keepends=True)
    good[2] = b"{broken\n"
    good[4] = b"\n"
    good[6] = b'{"prompt": "\xff\xfe", "task_type": "verifiable_math"}\n'
    good[8] = b"[1, 2]\n"
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(good).rstrip(b"\n") + b"\r\n\n\n")
    environment = open_data(tmp_path / "a.jsonl")
    found = dict(environment.problems.first)
    assert sorted(found) == [2, 4, 6, 8]
    assert found[2].startswith("the line is no JSON object")
    assert found[4] == "the line is empty"
    assert found[6] == "the line is not UTF-8"
    assert environment.row_count == 12  # empty lines at the end are none
    assert environment.task("0/p0").prompt == "What is 0 + 0?"
    assert environment.task("11/p11").prompt == "What is 11 + 11?"


def test_rows_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (readers, scanning):
        monkeypatch.setattr(module, "ROW_LIMIT_BYTES", 500)
    rows = described(10, prompt={3: "x" * 501})
    assert open_data(write_parquet(tmp_path / "a.parquet", rows)).problems.first == [(3, scanning.TOO_LARGE)]
    ((row, reason),) = open_data(write_jsonl(tmp_path / "a.jsonl", rows)).problems.first
    assert (row, reason) == (3, "the line has more than 0 MB")
    monkeypatch.setattr(scanning, "ROW_LIMIT_BYTES", 500)
    info = json.dumps({"ground_truth": "1", "notes": "x" * 600})
    environment = open_data(write_parquet(tmp_path / "b.parquet", described(10, verification_info={3: info})))
    with pytest.raises(UnusableTask, match="the answer has more than"):
        _ = environment.task("3/p3").answer


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{**row, "prompt": ""} for row in described(30)])
    assert re.search(r"leaves no task to train on: row 0 .*; and 27 more", refused(path))


def test_only_the_first_problems_are_listed() -> None:
    problems = Problems()
    for row in reversed(range(1000)):
        problems.add(row, "empty")
    shown = problems.lines(lambda row: f"line {row + 1}")
    assert len(shown) == 21
    assert shown[0] == "row 0 (line 1): empty"
    assert shown[-1] == "and 980 more"
    assert Problems.from_json(**problems.as_json()).lines(str) == problems.lines(str)  # type: ignore[arg-type]
