"""Rows: public data sets in their own spelling, those that cannot be used, and which split each is in."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import data
from kit.sandbox import needs_bubblewrap
from kit.tables import table
from shoal.environments.data import readers, scanning
from shoal.environments.data.scanning import Problems
from shoal.environments.dataset import DatasetEnvironment
from shoal.environments.protocol import SPLITS, Task, prompt_digest, question_digest
from shoal.errors import ScoringFailure, UnusableTask

PRINTS = "```python\nprint(sum(map(int, input().split())))\n```"
RETURNS = "```python\ndef add(a, b):\n    return a + b\n```"
METHOD = "```python\nclass Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b\n```"
MATHEMATICS: dict[str, dict[int, tuple[str, ...]]] = {
    "intellect2": {0: ("56",), 1: ("3", "-3"), 2: ("0.75", "\\frac{3}{4}")}, "synthetic1": {0: ("56",), 1: ("10",)},
    "numinamath15": {0: ("7",), 1: ("0.5",), 2: ("B",)}, "deepscaler": {0: ("56",), 1: ("1/2",), 2: ("(0,0)",)},
    "eurus2": {0: ("56",), 1: ("1/2",)},
}  # fmt: skip
CODE: dict[str, dict[int, str]] = {
    "intellect2": {3: PRINTS, 4: RETURNS}, "synthetic1": {2: PRINTS, 3: RETURNS}, "eurus2": {2: PRINTS},
    "deepcoder": {0: PRINTS, 1: RETURNS, 2: PRINTS, 3: METHOD, 4: PRINTS}, "taco": {0: PRINTS, 1: RETURNS},
    "code_contests": {0: PRINTS, 1: PRINTS},
}  # fmt: skip


def opened(name: str, folder: Path, packed: bool) -> tuple[DatasetEnvironment, dict[int, Task]]:
    """The data set, and its tasks by their rows."""
    environment = data.open_data(data.fixture(name, folder, packed), bad_rows="skip")
    wanted, tasks = {**MATHEMATICS.get(name, {}), **CODE.get(name, {})}, {}
    for split in SPLITS:
        for place in range(len(environment.tasks(split))):
            if (row := environment.row_at(split, place)) in wanted:
                tasks[row] = environment.tasks(split)[place]
    assert tasks.keys() == wanted.keys()
    return environment, tasks


@data.both_kinds
@pytest.mark.parametrize("name", MATHEMATICS)
def test_mathematics_is_read_and_judged(name: str, packed: bool, tmp_path: Path) -> None:
    environment, tasks = opened(name, tmp_path, packed)
    for row, answers in MATHEMATICS[name].items():
        for answer in answers:
            assert environment.score(tasks[row], f"\\boxed{{{answer}}}").value == 1.0, (row, answer)
        assert environment.score(tasks[row], "\\boxed{99}").value == 0.0


@needs_bubblewrap
@pytest.mark.parametrize("name", CODE)
def test_code_is_read_and_judged(name: str, tmp_path: Path) -> None:
    environment, tasks = opened(name, tmp_path, name == "eurus2")
    for row, program in CODE[name].items():
        score = environment.score(tasks[row], program)
        assert (score.value, score.notes) == (1.0, ""), row
        wrong = program.replace("a + b", "a - b").replace("sum(", "max(")
        assert environment.score(tasks[row], wrong).value == 0.0, row


@pytest.mark.parametrize(("name", "said"), [
    ("synthetic1", ("kind 'llm_judgeable_groundtruth_similarity', 2 rows (row 5 ",
                    "kind 'code_output_prediction', 1 row (row 7 ", "(known are verifiable_math, ")),
    ("numinamath15", ("kind 'proof', 2 rows (row 3 ", "no grader judges proofs")),
])  # fmt: skip
@data.both_kinds
def test_unjudged_kinds_are_refused_by_default(name, said, packed, tmp_path, caplog):
    path = data.fixture(name, tmp_path, packed)
    for bad_rows in ("", "refuse"):
        message = data.refused(path, bad_rows=bad_rows)
        assert all(each in message for each in said)
    assert "EVERY row" not in caplog.text
    data.open_data(path, bad_rows="skip")
    assert all(any("EVERY row" in line and each in line for line in caplog.text.splitlines()) for each in said)


def test_a_kind_whose_answers_cannot_be_read_is_refused_at_opening(tmp_path: Path) -> None:
    """Answers are not read at opening, but some of each kind: a run must not train on the other kinds alone."""
    rows = data.described(60, task_type=dict.fromkeys(range(20, 60), "prime_rl_code"))
    path = data.write_parquet(tmp_path / "a.parquet", rows)
    assert re.search(r"kind 'prime_rl_code', 40 rows .*there are no tests", data.refused(path))
    assert len(data.open_data(path, bad_rows="skip").tasks("train")) == 58
    rows[59]["verification_info"] = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    assert data.open_data(data.write_jsonl(tmp_path / "b.jsonl", rows))._main.table.rows == 60  # one good row was seen


@pytest.mark.parametrize("solution", ["We prove it by induction. " * 20, "def f(n):\n    return n\n" * 20])
def test_long_solutions_without_an_answer_are_not_compared(solution: str, tmp_path: Path) -> None:
    """Proofs of NuminaMath-CoT, which names no kinds, and programs of data sets whose tests are not read."""
    rows = [{"problem": f"{row}?", "solution": solution if row < 3 else "so \\boxed{2}"} for row in range(9)]
    path = data.write_jsonl(tmp_path / "a.jsonl", rows)
    problems = data.checked(data.open_data(path))
    assert [row for row, _ in problems.first] == [0, 1, 2]
    assert "ends in no answer" in problems.first[0][1]
    assert "kind 'mathematics', 3 rows" in data.refused(data.write_jsonl(tmp_path / "b.jsonl", rows[:3]))


CONTEST = {"description": "?", "public_tests": {"input": ["1"], "output": ["1"]}, "private_tests": None}
PAIRS = "public_tests is no object of as many inputs as outputs"
LITERAL = "verification_info is neither JSON nor a dictionary as Python writes it"


@pytest.mark.parametrize(("others", "change", "options", "reason"), [
    *((CONTEST, {"public_tests": tests}, {}, PAIRS)
      for tests in ({"input": ["1"], "output": []}, {"input": "1", "output": "1"}, ["1"])),
    *(({"problem": "?", "answer": "1"}, {"answer": gold}, {}, f"answer is {gold.strip()!r}, which says that")
      for gold in ("N/A", "none", "?", " - ")),
    *((data.described(1)[0], {"verification_info": info}, {}, LITERAL) for info in ("{'a': open('x')}", "{'a'")),
    *(({"problem": "?", "answer": "7"}, {"answer": answer}, {"format": "aime"}, "answer is")
      for answer in ("1000", "-1", "3.5", "ten", "", None, "٣")),
])  # fmt: skip
def test_single_bad_row_is_left_out_with_its_reason(others, change, options, reason, tmp_path):
    column = next(name for name in ("prompt", "problem", "description") if name in others)
    rows = [{**others, column: f"{row}?"} for row in range(8)]
    rows[2] |= change
    problems = data.checked(data.open_data(data.write_jsonl(tmp_path / "a.jsonl", rows), **options))
    assert [(row, said.startswith(reason)) for row, said in problems.first] == [(2, True)]


def test_a_band_without_a_column_of_rates_says_how_to_name_one(tmp_path: Path) -> None:
    rows = [{"problem": f"{row}?", "answer": "1", "llama8b_solve_rate": 0.3} for row in range(6)]
    said = data.refused(data.write_jsonl(tmp_path / "a.jsonl", rows), keep_solve_rate=(0.1, 0.8))
    assert "needs one column of solve rates, not none (by its name, solve_rate…); there are problem, answer, " in said


@pytest.mark.parametrize(("info", "read"), [
    (" {'ground_truth': \"it's\"}", {"ground_truth": "it's"}),
    ("[{'input': '1', 'output': None}]", [{"input": "1", "output": None}]),
])  # fmt: skip
def test_python_literals_are_read(info: str, read: Any, tmp_path: Path) -> None:
    rows = data.described(6, verification_info={0: info})
    task = data.open_data(data.write_jsonl(tmp_path / "a.jsonl", rows), grader="exact").task("0/p0")
    assert json.loads(task.answer) == read


@pytest.mark.parametrize(("column", "value", "said"), table("own_environments", "rows that cannot be asked"))
@pytest.mark.parametrize(("name", "where"), [("a.jsonl", "a.jsonl line 8"), ("a.parquet", "a.parquet")])
def test_a_row_that_cannot_be_asked_is_left_out_and_shifts_nothing(name, where, column, value, said, tmp_path, caplog):
    path = data.write_either(tmp_path / name, data.described(20, **{column: {7: value}}))
    environment = data.open_data(path, bad_rows="skip")
    assert [(row, reason.startswith(said)) for row, reason in environment.problems.first] == [(7, True)]
    assert f"1 of 20 rows cannot be used and are left out: row 7 ({where}): {said}" in caplog.text
    assert [task.id for task in data.tasks_of(environment)] == [f"{row}/p{row}" for row in range(20) if row != 7]
    assert environment.task("8/p8").prompt == "What is 8 + 8?"
    with pytest.raises(UnusableTask):
        environment.task("7/p7")
    assert re.search(r"1 row .*row 7 ", data.refused(path, bad_rows="refuse"))


@pytest.mark.parametrize(("info", "said"), table("own_environments", "answers that cannot be used"))
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_answer_that_cannot_be_used_makes_its_task_unusable(name: str, info: Any, said: str, tmp_path: Path) -> None:
    path = data.write_either(tmp_path / name, data.described(20, verification_info={7: info}))
    environment = data.open_data(path)
    assert environment.problems.count == 0  # answers are not read when a data set is opened
    tasks = environment.tasks("train")
    position = [environment.row_at("train", place) for place in range(len(tasks))].index(7)
    with pytest.raises(UnusableTask, match=rf"row 7 .* cannot be used: {said}"):
        tasks[position]
    assert tasks[position + 1].id == "8/p8"
    task = environment.task("7/p7")  # the hub that has drawn it needs its prompt only
    with pytest.raises(UnusableTask):
        _ = task.answer
    with pytest.raises(ScoringFailure, match="row 7"):
        environment.score(task, "14")
    assert re.search(rf"1 row of .* row 7 .*: {said}", data.refused(path, bad_rows="refuse"))


def test_a_check_finds_everything_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = data.described(40, prompt={3: "", 30: None}, verification_info={5: "{", 31: None})
    path = data.write_parquet(tmp_path / "a.parquet", rows)
    done: list[tuple[int, int]] = []
    problems = data.checked(data.open_data(path), lambda *now: done.append(now))
    assert done[-1] == (40, 40)
    assert problems.count == 4
    assert [row for row, _ in sorted(problems.first)] == [3, 5, 30, 31]
    again = data.open_data(path)
    monkeypatch.setattr(scanning, "usable_answer", lambda *_: pytest.fail("read everything again"))
    assert data.checked(again).count == 4
    with pytest.raises(UnusableTask, match="row 5 "):
        again.task("5/p5")  # known without reading its answer
    assert "4 rows" in data.refused(path, bad_rows="refuse")


def test_bad_rows_of_a_held_out_file_have_its_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = data.write_parquet(tmp_path / "train.parquet", data.described(20))
    prompts = {**{number: f"Other {number}?" for number in range(6)}, 2: ""}
    path = data.write_jsonl(tmp_path / "test.jsonl", data.described(6, verification_info={4: "{"}, prompt=prompts))
    environment = data.open_data(train, held_out=path)
    assert "1 of 6 rows cannot be used and are left out: row 2 (test.jsonl line 3): prompt is empty" in caplog.text
    good, found = environment.check(lambda *_: None)
    assert good.problems.count == 0
    assert [found.where(row) for row, _ in found.problems.first] == ["test.jsonl line 3", "test.jsonl line 5"]
    said = data.refused(train, held_out=path, bad_rows="refuse")
    assert re.search(r"2 rows of the data .*test\.jsonl cannot be used: row 2 ", said)


@pytest.mark.parametrize("value", [["verifiable_math"], {"name": "verifiable_math"}, 7, b"\xff"])
def test_a_task_type_that_is_no_text_is_unknown(value: object, tmp_path: Path) -> None:
    path = data.write_parquet(tmp_path / "a.parquet", data.described(10, task_type=dict.fromkeys(range(10), value)))
    assert re.search(
        r"leaves no task to train on: row 0 \(a\.parquet\): task_type .* is .*known are verifiable_math, .*--set ",
        data.refused(path),
    )


@pytest.mark.parametrize("column", ["task_type", "verification_info", "problem_id", "prompt"])
@pytest.mark.parametrize("check_first", [False, True])
def test_text_that_is_not_utf_8_is_a_bad_row(column: str, check_first: bool, tmp_path: Path) -> None:
    rows = data.described(10)
    texts = [row[column].encode() for row in rows]
    texts[4] = texts[5] = b"\xff\xfe"
    columns = {name: pa.array([row[name] for row in rows]) for name in rows[0]}
    columns[column] = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    environment, good = data.open_data(tmp_path / "a.parquet"), []
    if column == "prompt":
        assert environment.problems.first == [(row, "prompt is not UTF-8") for row in (4, 5)]
    if check_first:
        assert [row for row, _ in sorted(data.checked(environment).first)] == [4, 5]
    for tasks in map(environment.tasks, SPLITS):
        for position in range(len(tasks)):
            with contextlib.suppress(UnusableTask):
                good.append(tasks[position].id)
    assert sorted(good) == [f"{row}/p{row}" for row in range(10) if row not in (4, 5)]


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    written = data.lines(data.described(12)).splitlines(keepends=True)
    bad = {2: b"{broken\n", 4: b"\n", 6: b'{"prompt": "\xff\xfe", "task_type": "verifiable_math"}\n', 8: b"[1, 2]\n"}
    written[10] = written[10].replace(b"{", b'{"rate": NaN, "most": -Infinity, ', 1)  # as Python writes them
    content = b"".join(bad.get(number, line) for number, line in enumerate(written))
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + content.rstrip(b"\n") + b"\r\n\n\n")
    environment = data.open_data(tmp_path / "a.jsonl")
    found = dict(environment.problems.first)
    assert found.keys() == bad.keys()
    assert found[2].startswith("the line is no JSON object")
    assert (found[4], found[6]) == ("the line is empty", "the line is not UTF-8")
    assert environment._main.table.rows == 12  # empty lines at the end are none
    assert [environment.task(f"{row}/p{row}").prompt for row in (0, 11)] == ["What is 0 + 0?", "What is 11 + 11?"]


def test_rows_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (readers, scanning):
        monkeypatch.setattr(module, "ROW_LIMIT_BYTES", 500)
    rows = data.described(10, prompt={3: "x" * 501})
    assert data.open_data(data.write_parquet(tmp_path / "a.parquet", rows)).problems.first == [
        (3, f"the prompt is too large: {scanning.TOO_LARGE}")
    ]
    ((row, reason),) = data.open_data(data.write_jsonl(tmp_path / "a.jsonl", rows)).problems.first
    assert (row, reason) == (3, "the line has more than 0 MB")
    monkeypatch.setattr(scanning, "ROW_LIMIT_BYTES", 500)
    info = json.dumps({"ground_truth": "1", "notes": "x" * 600})
    environment = data.open_data(
        data.write_parquet(tmp_path / "b.parquet", data.described(10, verification_info={3: info}))
    )
    with pytest.raises(UnusableTask, match="the answer is too large"):
        _ = environment.task("3/p3").answer


def test_only_the_first_problems_are_listed() -> None:
    problems = Problems()
    for row in reversed(range(1000)):
        problems.add(row, "empty")
    shown = problems.lines(lambda row: f"line {row + 1}")
    assert (len(shown), shown[0], shown[-1]) == (21, "row 0 (line 1): empty", "and 980 more")
    assert Problems.from_json(**problems.as_json()).lines(str) == problems.lines(str)  # type: ignore[arg-type]


@given(st.text(max_size=60))
def test_spaces_case_and_width_do_not_make_another_question(text: str) -> None:
    digest = prompt_digest(text)
    assert len(digest) == 16
    assert prompt_digest(f"  {text.replace(' ', '   ')}\n") == digest
    if text.isascii():
        assert prompt_digest(text.upper()) == prompt_digest(text.lower()) == digest


def test_history_is_part_of_the_question_digest(tmp_path: Path) -> None:
    """The last words of many conversations are the same."""
    first, second = ([("user", text), ("assistant", "4")] for text in ("2+2?", "3+1?"))
    assert len({question_digest("And doubled?", history) for history in (first, second, ())}) == 3
    spaced = [("user", "2 + 2 ?"), ("assistant", "4")]
    assert question_digest("and doubled ?", spaced) == question_digest("And doubled?", first)
    assert question_digest("2+2?", [("system", "Be brief.")]) == prompt_digest("2+2?")
    said = [[("user", f"{n}+1?"), ("assistant", "?"), ("user", "So?")] for n in range(20)]
    rows = [{"prompt": [{"role": role, "content": text} for role, text in talk], "answer": "1"} for talk in said]
    environment = data.open_data(data.write_jsonl(tmp_path / "a.jsonl", rows), held_out_size=4)
    assert (len(environment.tasks("train")), len(environment.tasks("held_out"))) == (16, 4)
    found = [question_digest(task.prompt, task.history) for task in environment.tasks("train")]
    assert list(environment.prompt_digests("train")) == found


def test_a_held_out_question_is_never_trained_on(tmp_path: Path) -> None:
    rows = data.described(60)
    for number, row in enumerate(rows):
        row["prompt"] = f"What is {number % 20}?" if number < 40 else f"WHAT  is {number % 20} ?\n"
    environment = data.open_data(data.write_parquet(tmp_path / "a.parquet", rows), held_out_size=3)
    held_out, train = environment.tasks("held_out"), environment.tasks("train")
    aside = {prompt_digest(task.prompt) for task in held_out}
    assert len(held_out) == len(aside) == 3
    assert not aside & {prompt_digest(task.prompt) for task in train}
    assert (len(train), environment.splits.shared) == (51, 6)


def test_split_depends_on_content_and_all_questions_of_a_held_out_file_are_held_out(tmp_path: Path) -> None:
    rows = data.described(50)
    one = data.open_data(data.write_parquet(tmp_path / "a.parquet", rows), held_out_size=5)
    other = data.open_data(data.write_parquet(tmp_path / "b.parquet", rows[::-1]), held_out_size=5)
    prompts = [{task.prompt for task in environment.tasks("held_out")} for environment in (one, other)]
    assert (prompts[0], len(prompts[0])) == (prompts[1], 5)
    path = data.write_parquet(tmp_path / "a.parquet", data.described(10))
    assert "all of its questions are held-out ones" in data.refused(path, held_out_size=1, held_out=path)


def test_a_held_out_file_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = data.write_parquet(tmp_path / "train.parquet", data.described(30))
    shared = [{"question": "what is 3+3?", "answer": "6"}, {"question": "WHAT IS 8 + 8 ?", "answer": 16}]
    path = data.write_jsonl(tmp_path / "test.jsonl", [*shared, {"question": "New?", "answer": "1"}])
    environment = data.open_data(train, held_out_size=2, held_out=path)
    assert [task.id for task in environment.tasks("held_out")] == ["held_out/0", "held_out/1"]
    task = environment.tasks("held_out")[1]
    assert environment.task(task.id) == task
    assert environment.score(task, "\\boxed{16}").value == 1.0
    assert list(environment.prompt_digests("held_out"))[1] == prompt_digest(task.prompt)
    ids = {task.id for task in environment.tasks("train")}
    assert len(ids) == 28
    assert not ids & {"3/p3", "8/p8"}
    assert "2 rows left out of training: a held-out question is repeated" in caplog.text
    alone = data.open_data(train)
    assert environment.data_digest != alone.data_digest
    data.write_jsonl(path, [*shared, {"question": "Newer?", "answer": "1"}])
    assert data.open_data(train, held_out_size=2, held_out=path).digest != environment.digest


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_solve_rates_outside_the_band_are_left_out_also_if_written_as_text(name, text, tmp_path):
    rows = data.described(27, solve_rate_tiny={1: None})
    if text:
        rows = [{**row, "solve_rate_tiny": str(row["solve_rate_tiny"] or "")} for row in rows]
        rows[3]["solve_rate_tiny"] = "often"
    path = data.write_either(tmp_path / name, rows)
    environment = data.open_data(path, held_out_size=1, keep_solve_rate=[0.125, 0.5])
    kept = {int(task.id.partition("/")[0]) for task in data.tasks_of(environment)}
    assert kept == {row for row in range(27) if 1 <= row % 9 <= 4 and row not in ((1, 3) if text else (1,))}
    assert environment.problems.first == ([(3, "solve_rate_tiny is 'often', not a solve rate")] if text else [])
    assert not text or "1 row of the data" in data.refused(path, keep_solve_rate=[0.125, 0.5], bad_rows="refuse")


def test_which_column_holds_the_solve_rates_must_be_clear(tmp_path: Path) -> None:
    rows = [{**row, "solve_rate_large": 0.5} for row in data.described(10)]
    path = data.write_parquet(tmp_path / "a.parquet", rows)
    assert len(data.open_data(path, keep_solve_rate=[0.5, 0.5], solve_rate="solve_rate_large").tasks("train")) == 8
    for band, column, said in [
        ([0.0, 1.0], "", "one column of solve rates, not solve_rate_tiny, solve_rate_large"),
        ([0.5, 0.5], "prompt", "row 0 (a.parquet): prompt is 'What is 0 + 0?', not a solve rate"),
        ([0.5, 0.1], "", "the lower first"),
        ([0.13, 0.2], "solve_rate_tiny", "no row has a solve rate within"),
    ]:
        assert said in data.refused(path, keep_solve_rate=band, solve_rate=column)
