"""The formats of common data sets: hand-made files of each, and rows that do not fit them."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from kit import data
from kit.tables import table
from shoal.environments.formats import unpacked
from shoal.environments.graders.code_tests import read_tests
from shoal.errors import UnusableTask


def test_the_described_schema() -> None:
    environment = data.open_data(data.FORMATS / "described.jsonl")
    tasks = data.tasks_of(environment)
    assert [task.kind for task in tasks] == ["mathematics"] * 7 + ["code"]
    assert tasks[7].history == (("system", "You write Python."),)
    assert environment.score(tasks[0], "<think>12 squared</think> \\boxed{144}").value == 1.0
    assert environment.score(tasks[0], "\\boxed{143}").value == 0.0


@pytest.mark.parametrize(("prompt", "said"), table("own_environments", "prompts of rows that are no conversations"))
def test_prompts_that_are_no_conversations(prompt: Any, said: str, tmp_path: Path) -> None:
    rows = data.rows_in("described")
    rows[2]["prompt"] = prompt
    ((row, reason),) = data.open_data(data.write_jsonl(tmp_path / "a.jsonl", rows)).problems.first
    assert (row, said in reason) == (2, True), reason


@pytest.mark.parametrize("name", ["aime", "aime_capitals"])
@data.both_kinds
def test_aime(name: str, packed: bool, tmp_path: Path) -> None:
    environment = data.open_data(data.fixture(name, tmp_path, packed), format="aime")
    tasks = data.tasks_of(environment)
    assert [task.answer for task in tasks] == ["144", "392", "24", "100", "120", "18", "4"]
    assert {task.kind for task in tasks} == {"mathematics"}
    assert environment.score(tasks[6], "The answer is \\boxed{004}.").value == 1.0
    assert environment.score(tasks[6], "The answer is \\boxed{5}.").value == 0.0


def test_question_and_answer_columns(tmp_path: Path) -> None:
    tasks = data.tasks_of(data.open_data(data.FORMATS / "gsm.jsonl", held_out_size=1))
    assert [task.answer for task in tasks] == ["5", "15", "14", "9", "13"]
    rows = [{"text": f"Say {word}", "reply": word, "n": 1} for word in ("yes", "no", "well", "so", "then", "now")]
    path = data.write_parquet(tmp_path / "a.parquet", rows)
    environment = data.open_data(path, question="text", answer="reply", grader="exact")
    assert environment.score(environment.task("2"), "well").value == 1.0
    for options, said in [
        ({}, "no column is known to be the question; there are text, reply, n: set"),
        ({"question": "words", "answer": "reply"}, "there is no column 'words' for the question; there are text, "),
        ({"question": "text", "answer": "reply", "grader": "exakt"}, "there is no grader 'exakt'"),
        ({"question": "text", "answer": "reply", "id": "n2"}, "there is no column 'n2' for the id; there are text, "),
        ({"format": "csv"}, "there is no format 'csv'; there are described, "),
        ({"questoin": "text"}, "has no option 'questoin'"),
    ]:
        assert said in data.refused(path, **options)


def test_made_rows_as_gsm8k_has_them() -> None:
    environment = data.open_data(Path(__file__).parents[3] / "recipes" / "data" / "gsm8k.jsonl", held_out_size=1)
    tasks = data.tasks_of(environment)
    golds = "4 4 4 4 9 70 1,250 15 4 4 8 45 4 105 6 1,200 11 45 4 600"
    assert [task.answer for task in tasks] == golds.split()
    assert not any("<<" in task.prompt or "####" in task.prompt for task in tasks)
    for said, value in (
        ("1000+250 = 1250.\n#### 1250", 1.0), ("#### 1,250", 1.0), ("So \\boxed{1250}", 1.0), ("$1,250.00 in all", 1.0),
        ("#### 1000", 0.0), ("#### 125", 0.0), ("", 0.0),
    ):  # fmt: skip
        assert environment.score(tasks[6], said).value == value, said


@pytest.mark.parametrize(("text", "answer"), [
    ("so x = \\boxed{\\frac{1}{2}} so \\boxed{3}", "3"), ("8 - 3 = 5 #### 5", "5"), ("plain", "plain"),
])  # fmt: skip
def test_the_answer_of_a_worked_solution_is_what_it_comes_to(text: str, answer: str, tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "answer": text} for number in range(5)]
    assert data.open_data(data.write_jsonl(tmp_path / "a.jsonl", rows), bad_rows="skip").task("0").answer == answer


@pytest.mark.parametrize("answer", [True, False, float("nan"), float("inf")])
def test_an_answer_that_is_no_text_and_no_number_cannot_be_used(answer: Any, tmp_path: Path) -> None:
    rows = [{"question": f"{row}?", "answer": answer} for row in range(10)]
    problems = data.checked(
        data.open_data(data.write_parquet(tmp_path / "a.parquet", rows), grader="exact", bad_rows="skip")
    )
    assert problems.count == 10
    said = json.dumps(answer) if isinstance(answer, bool) else str(answer)
    assert problems.first[0][1].startswith(f"answer is {said}, ")


@pytest.mark.parametrize("gold", ["NaN", "Infinity", "-Infinity", "true", "null"])
def test_a_ground_truth_that_is_no_answer_cannot_be_used(gold: str, tmp_path: Path) -> None:
    info = f'{{"ground_truth": {gold}}}'
    for path, said in ((tmp_path / "a.jsonl", info), (tmp_path / "a.parquet", json.loads(info))):
        row = {"task_type": "verifiable_math", "verification_info": said}
        rows = [{**row, "prompt": f"{number}?"} for number in range(10)]
        assert data.checked(data.open_data(data.write_either(path, rows), bad_rows="skip")).count == 10


@data.both_kinds
def test_livecodebench(packed: bool, tmp_path: Path) -> None:
    tasks = data.tasks_of(data.open_data(data.fixture("livecodebench", tmp_path, packed)))
    assert [task.id for task in tasks] == [f"{number}/lcb_{number}" for number in range(5)]
    assert {task.kind for task in tasks} == {"code"}
    cases = [read_tests(task.answer).cases for task in tasks]
    read = [(case.given, case.expected) for case in cases[0]]
    assert read == [(b"2\n", b"4\n"), (b"-7\n", b"-14\n"), (b"0\n", b"0\n")]
    called = [(case.function, json.loads(case.given)["arguments"], case.expected) for case in cases[4]]
    assert called == [("addPair", [1, 2], 3), ("addPair", [-1, 1], 0)]
    assert [len(case) for case in cases] == [3, 2, 3, 3, 2]
    assert "reads standard input" in tasks[0].prompt
    assert "def addPair(self, a: int, b: int) -> int:" in tasks[4].prompt


def test_codeforces_input_and_output_formats_are_part_of_the_prompt(tmp_path: Path) -> None:
    stated = {"description": "Print the sum.", "input_format": "Two integers.", "output_format": None}
    rows = [{**stated, "id": f"{row}/A", "official_tests": [{"input": f"{row} 3", "output": "5"}]} for row in range(5)]
    for number, task in enumerate(data.tasks_of(data.open_data(data.write_parquet(tmp_path / "a.parquet", rows)))):
        assert task.prompt.startswith("Print the sum.\n\nInput:\nTwo integers.\n\nWrite a Python program")
        assert read_tests(task.answer).cases[0].given == f"{number} 3".encode()


class Bomb:
    """A pickle that runs something when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise RuntimeError('a pickle was run')",)


def pack(value: object, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_packed_text_is_unpacked_without_unpickling(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("[]", '[{"input": "ä\\n\U0001f41f"}]', "x" * 100_000):
        assert unpacked(pack(text, protocol), "tests") == text
    monkeypatch.setattr("shoal.environments.formats.UNPACKED_LIMIT_BYTES", 1000)
    with pytest.raises(UnusableTask, match="unpacks to more than"):
        unpacked(pack("x" * 2000, protocol), "tests")


@pytest.mark.parametrize(("packed", "said"), [
    (pack(Bomb()), "it is not run"), (pack(Bomb(), 0), "it is not run"), (pack(["a", "b"]), "it is not run"),
    (pack(b"bytes"), "it is not run"), (pack(7), "it is not run"),
    (base64.b64encode(zlib.compress(b"\x80\x04")).decode(), "is no JSON, packed or not"),
    (base64.b64encode(zlib.compress(b"garbage")).decode(), "is no JSON, packed or not"),
    (base64.b64encode(zlib.compress(b"x" * 1000)[:-5]).decode(), "is cut off"),
    (base64.b64encode(b"not zlib").decode(), "is no JSON, packed or not"),
    ("no base64!", "is no JSON, packed or not"),
])  # fmt: skip
def test_packed_things_that_are_no_text_are_refused(packed: str, said: str) -> None:
    with pytest.raises(UnusableTask, match=said):
        unpacked(packed, "private_test_cases")


@pytest.mark.parametrize(("change", "said"), table("own_environments", "rows that are not of LiveCodeBench"))
def test_livecodebench_refuses_other_rows(change: dict[str, str], said: str, tmp_path: Path) -> None:
    rows = data.rows_in("livecodebench")
    rows[0] |= change
    environment = data.open_data(data.write_jsonl(tmp_path / "a.jsonl", rows))
    with pytest.raises(UnusableTask, match=said):
        _ = environment.task("0/lcb_0").answer


def test_gpqa(tmp_path: Path) -> None:
    environment = data.open_data(data.FORMATS / "gpqa.jsonl", held_out_size=1)
    tasks = data.tasks_of(environment)
    assert len(tasks) == 6
    right = ("Nitrogen", "g, directed downwards", "Thymine", "+6", "Faraday's law", "2")
    for task, text in zip(tasks, right, strict=True):
        assert f"\n{task.answer}) {text}\n" in task.prompt
        assert environment.score(task, f"<think>hm</think>I think so.\nAnswer: {task.answer}").value == 1.0
        wrong = "ABCD"[("ABCD".index(task.answer) + 1) % 4]
        assert environment.score(task, f"Answer: {wrong}").value == 0.0
    assert len({task.answer for task in tasks}) > 1  # the right one is not always in the same place


def test_gpqas_order_of_options_follows_from_the_text_alone(tmp_path: Path) -> None:
    rows = data.rows_in("gpqa")
    answers = {
        task.id.partition("/")[2]: task.answer for task in data.tasks_of(data.open_data(data.FORMATS / "gpqa.jsonl"))
    }
    turned = data.open_data(data.write_parquet(tmp_path / "a.parquet", rows[::-1]))
    assert {task.id.partition("/")[2]: task.answer for task in data.tasks_of(turned)} == answers
    rows[2]["Incorrect Answer 1"] = " Thymine "
    rows[3]["Incorrect Answer 2"] = ""
    spoilt = data.open_data(data.write_parquet(tmp_path / "b.parquet", rows))
    assert dict(spoilt.problems.first) == {2: "two of its options are the same", 3: "Incorrect Answer 2 is empty"}


def test_a_format_that_does_not_fit_names_what_is_missing() -> None:
    for name, missing in {
        "described": "prompt, verification_info, task_type",
        "gpqa": "Question, Correct Answer, Incorrect Answer 1", "livecodebench": "public_test_cases", "code": "input_",
    }.items():  # fmt: skip
        assert f"the format {name} needs the columns {missing}" in data.refused(data.FORMATS / "gsm.jsonl", format=name)
