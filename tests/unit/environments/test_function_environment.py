"""A reward of one's own: what a user's file may look like, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.environments import Environment, EnvironmentSettings, Score, build
from shoal.errors import EnvironmentSetupError, ScoringFailure

PLAIN = """
tasks = [{"prompt": f"{i}?", "answer": str(i)} for i in range(20)]
def score(prompt, completion, answer):
    return completion == answer
"""


@pytest.fixture
def load(tmp_path: Path):
    def write_and_build(source: str, **settings: object) -> Environment:
        file = tmp_path / "reward.py"
        file.write_text(source)
        return build(EnvironmentSettings(file=file, **settings))

    return write_and_build


def test_a_plain_function_and_a_list_are_enough(load):
    environment = load(PLAIN)
    assert isinstance(environment, Environment)
    assert environment.name == "reward"
    assert (len(environment.tasks("train")), len(environment.tasks("held_out"))) == (16, 4)
    task = environment.tasks("train")[0]
    assert environment.score(task, task.answer) == Score(value=1.0)
    assert environment.score(task, "no").value == 0.0
    assert environment.task(task.id) == task


def test_tasks_may_be_a_function_of_pairs_and_score_may_return_a_score(load):
    environment = load("""
from shoal.environments import Score
def tasks():
    yield from [("a", "1"), ("b", "2")]
def score(task, completion):
    return Score(0.5, parts={"letters": len(completion)}, notes=task.prompt)
""")
    first, second = environment.tasks("train")
    assert (first.prompt, first.answer, second.prompt) == ("a", "1", "b")
    scored = environment.score(second, "xyz")
    assert (scored.value, scored.parts["letters"], scored.notes) == (0.5, 3, "b")


@pytest.mark.parametrize("name", ["task", "length", "target", "limit", "shuffled_from", "judge.taste"])
def test_a_part_may_not_be_called_like_one_that_decides_something(load, name):
    environment = load(f"""
tasks = [("a", "1")]
def score(task, completion):
    return {{"value": 1, "parts": {{"{name}": 1.0}}}}
""")
    with pytest.raises(ScoringFailure, match=f"call the part '{name}' something else"):
        environment.score(environment.tasks("train")[0], "x")


def test_tasks_may_name_their_split_and_id(load):
    environment = load("""
from shoal.environments import Task
tasks = [{"prompt": "p", "split": "held_out", "id": "x"}, Task("own", "q", ""), {"prompt": "r", "split": "train"}]
def score(prompt, completion, answer): return 0
""")
    assert [task.id for task in environment.tasks("held_out")] == ["x"]
    assert {task.id for task in environment.tasks("train")} == {"own", "reward/2"}


def test_one_prompt_is_never_on_both_sides(load):
    environment = load("""
tasks = [(str(i % 7), str(i)) for i in range(70)]
def score(prompt, completion, answer): return 0
""")
    sides = [{task.prompt for task in environment.tasks(split)} for split in ("train", "held_out")]
    assert sides[0]
    assert sides[1]
    assert sides[0].isdisjoint(sides[1])


def test_the_digest_is_that_of_the_file(load):
    assert load(PLAIN).digest == load(PLAIN).digest
    assert load(PLAIN).digest != load(PLAIN + "# changed\n").digest
    assert load(PLAIN).digest != load(PLAIN, held_out_size=2).digest


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero on task reward/"),
        ("return 'good'", "returned 'good' on task .*: not a number"),
        ("return None", "not a number"),
        ("return float('nan')", "returned nan"),
        ("return float('inf')", "returned inf"),
    ],
)
def test_a_scorer_that_fails_is_no_sample_never_reward_zero(load, body, said):
    environment = load(f"tasks = [('p', 'a')]\ndef score(prompt, completion, answer): {body}\n")
    with pytest.raises(ScoringFailure, match=said):
        environment.score(environment.tasks("train")[0], "x")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("tasks = [('p', 'a')]", r"defines no function score\(prompt, completion, answer\)"),
        ("tasks = [('p', 'a')]\nscore = 3", "defines no function score"),
        ("tasks = [('p', 'a')]\ndef score(x): ...", "takes 1 parameters"),
        ("def score(a, b, c): ...", "defines no tasks"),
        ("tasks = []\ndef score(a, b, c): ...", "is empty"),
        ("tasks = [3]\ndef score(a, b, c): ...", "task 0 .* is int"),
        ("tasks = [{'answer': ''}]\ndef score(a, b, c): ...", "needs `prompt`"),
        ("tasks = [{'prompt': '', 'anser': ''}]\ndef score(a, b, c): ...", "anser"),
        ("tasks = [{'prompt': '', 'split': 'test'}]\ndef score(a, b, c): ...", "train or held_out"),
        ("tasks = [{'prompt': '', 'split': []}]\ndef score(a, b, c): ...", "train or held_out"),
        ("tasks = [{'prompt': '', 'id': 1}] * 2\ndef score(a, b, c): ...", "two tasks .* '1'"),
        ("tasks = [{'prompt': '', 'split': 'held_out'}]\ndef score(a, b, c): ...", "no task to train on"),
        ("def tasks(): raise OSError('gone')\ndef score(a, b, c): ...", "cannot be listed: OSError: gone"),
        ("import nonexistent_module", "does not load: ModuleNotFoundError"),
        ("def score(", "does not load: SyntaxError"),
    ],
)
def test_a_file_that_does_not_load_says_why(load, source, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        load(source)


def test_a_missing_file_and_misplaced_options(tmp_path, load):
    with pytest.raises(EnvironmentSetupError, match=r"cannot read .*: No such file .*; check environment.file"):
        build(EnvironmentSettings(file=tmp_path / "absent.py"))
    with pytest.raises(EnvironmentSetupError, match="a file has none"):
        load(PLAIN, options={"max_digits": 3})
    with pytest.raises(EnvironmentSetupError, match="no task 'zzz'"):
        load(PLAIN).task("zzz")
    plain_text = tmp_path / "reward.txt"
    plain_text.write_text(PLAIN)
    with pytest.raises(EnvironmentSetupError, match=r"must end in \.py"):
        build(EnvironmentSettings(file=plain_text))


@pytest.mark.parametrize(
    "body",
    ["return {'value': 0.5, 'parts': {'style': 1}, 'notes': 'neat'}", "return Score(0.5, {'style': True}, 'neat')"],
)
def test_a_score_may_have_parts_and_notes(load, body):
    environment = load(f"from shoal.environments import Score\ntasks = [('p', 'a')]\ndef score(t, c): {body}\n")
    score = environment.score(environment.tasks("train")[0], "x")
    assert (score.value, dict(score.parts), score.notes) == (0.5, {"style": 1.0}, "neat")
    assert type(score.parts["style"]) is float


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return {'parts': {}}", "a mapping has `value`"),
        ("return {'value': 1, 'note': ''}", "a mapping has `value`"),
        ("return {'value': None}", "its value is no number"),
        ("return {'value': 1, 'parts': {'style': 'good'}}", "part style is no number"),
        ("return {'value': 1, 'parts': {'style': float('nan')}}", "part style is no number"),
        ("return {'value': 1, 'parts': [1]}", "parts must be a mapping"),
    ],
)
def test_a_score_that_is_none_is_no_sample(load, body, said):
    environment = load(f"tasks = [('p', 'a')]\ndef score(prompt, completion, answer): {body}\n")
    with pytest.raises(ScoringFailure, match=said):
        environment.score(environment.tasks("train")[0], "")
