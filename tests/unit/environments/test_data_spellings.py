"""Public data sets in their own spelling, a hand-made file of each: every kind is read, judged, counted or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datakit import both_kinds, checked, described, fixture, open_data, own_cache, refused, write_jsonl, write_parquet

from sandboxkit import needs_bubblewrap
from shoal.environments.dataset import DatasetEnvironment
from shoal.environments.protocol import SPLITS, Task
from shoal.errors import EnvironmentSetupError

__all__ = ["own_cache"]

PRINTS = "```python\nprint(sum(map(int, input().split())))\n```"
RETURNS = "```python\ndef add(a, b):\n    return a + b\n```"
METHOD = "```python\nclass Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b\n```"
MATHEMATICS: dict[str, dict[int, tuple[str, ...]]] = {
    "intellect2": {0: ("56",), 1: ("3", "-3"), 2: ("0.75", "\\frac{3}{4}")},
    "synthetic1": {0: ("56",), 1: ("10",)},
    "numinamath15": {0: ("7",), 1: ("0.5",), 2: ("B",)},
    "deepscaler": {0: ("56",), 1: ("1/2",), 2: ("(0,0)",)},
    "eurus2": {0: ("56",), 1: ("1/2",)},
}
CODE: dict[str, dict[int, str]] = {
    "intellect2": {3: PRINTS, 4: RETURNS}, "synthetic1": {2: PRINTS, 3: RETURNS}, "eurus2": {2: PRINTS},
    "deepcoder": {0: PRINTS, 1: RETURNS, 2: PRINTS, 3: METHOD, 4: PRINTS}, "taco": {0: PRINTS, 1: RETURNS},
}  # fmt: skip
KINDS = {
    "intellect2": ["kind 'verifiable_math': 3 rows, 3 can be used",
                   "kind 'prime_rl_code': 2 rows, 2 can be used"],
    "synthetic1": ["kind 'verifiable_math': 2 rows, 2 can be used",
                   "kind 'verifiable_code': 3 rows, 2 can be used",
                   "kind 'llm_judgeable_groundtruth_similarity': 2 rows, 0 can be used",
                   "kind 'code_output_prediction': 1 row, 0 can be used"],
    "numinamath15": ["kind 'math-word-problem': 3 rows, 2 can be used",
                     "kind 'MCQ': 1 row, 1 can be used",
                     "kind 'proof': 2 rows, 0 can be used"],
    "deepscaler": ["kind 'mathematics': 3 rows, 3 can be used"],
    "eurus2": ["kind 'math': 2 rows, 2 can be used", "kind 'code': 1 row, 1 can be used"],
    "deepcoder": ["kind 'code': 5 rows, 5 can be used"],
    "taco": ["kind 'code': 2 rows, 2 can be used"],
}  # fmt: skip


def opened(name: str, folder: Path, packed: bool) -> tuple[DatasetEnvironment, dict[int, Task]]:
    """The data set, and its tasks by their rows."""
    environment = open_data(fixture(name, folder, packed), bad_rows="skip")
    wanted, tasks = {**MATHEMATICS.get(name, {}), **CODE.get(name, {})}, {}
    for split in SPLITS:
        for place in range(len(environment.tasks(split))):
            row = environment.row_at(split, place)
            if row in wanted:
                tasks[row] = environment.tasks(split)[place]
    assert tasks.keys() == wanted.keys()
    return environment, tasks


@both_kinds
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


@both_kinds
@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_counted(name: str, packed: bool, tmp_path: Path) -> None:
    environment = open_data(fixture(name, tmp_path, packed), bad_rows="skip")
    environment.check(lambda *_: None)
    lines, trained = zip(
        *(line.removesuffix(" to train on").rsplit(", ", 1) for line in environment.kinds()), strict=True
    )
    assert list(lines) == KINDS[name]
    unusable = sum(int(line.partition(": ")[2].split()[0]) for line in lines) - sum(map(can_be_used, lines))
    assert sum(map(int, trained)) + len(environment.tasks("held_out")) + unusable == environment.row_count


def can_be_used(line: str) -> int:
    return int(line.removesuffix(" can be used").rsplit(maxsplit=1)[1])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("synthetic1", ("all 2 rows of kind 'llm_judgeable_groundtruth_similarity' (row 5 ",
                        "all 1 row of kind 'code_output_prediction' (row 7 ")),
        ("numinamath15", ("all 2 rows of kind 'proof' (row 3 ", "no grader judges proofs")),
    ],
)  # fmt: skip
@both_kinds
def test_kinds_that_nobody_can_judge_are_refused_unless_asked_for(
    name: str, said: tuple[str, ...], packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fixture(name, tmp_path, packed)
    for bad_rows in ("", "refuse"):
        message = refused(path, bad_rows=bad_rows)
        assert all(each in message for each in said)
    assert "EVERY row" not in caplog.text
    open_data(path, bad_rows="skip")
    assert all(any("EVERY row" in line and each in line for line in caplog.text.splitlines()) for each in said)


def test_a_kind_whose_answers_cannot_be_read_is_refused_at_opening(tmp_path: Path) -> None:
    """Answers are not read at opening, but some of each kind: a run must not train on the other kinds alone."""
    rows = described(60, task_type=dict.fromkeys(range(20, 60), "prime_rl_code"))
    path = write_parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(EnvironmentSetupError, match=r"all 40 rows of kind 'prime_rl_code' .*there are no tests"):
        open_data(path)
    assert len(open_data(path, bad_rows="skip").tasks("train")) == 58
    rows[59]["verification_info"] = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    assert open_data(write_jsonl(tmp_path / "b.jsonl", rows)).row_count == 60  # one good row was seen


def test_single_bad_rows_are_left_out_without_asking(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", described(20, verification_info={3: "{'a': open('x')}", 4: "{'a'"}))
    problems = checked(open_data(path))
    reason = "verification_info is neither JSON nor a dictionary as Python writes it"
    assert problems.first == [(3, reason), (4, reason)]
