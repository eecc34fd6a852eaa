"""Gold answers as data sets write them, and what a score says."""

from __future__ import annotations

import json

import pytest

from shoal.environments.graders.mathematics import MathematicsGrader, MathVerifyGrader
from shoal.environments.graders.registry import Grader, grader
from shoal.errors import ScoringFailure


@pytest.fixture
def mathematics() -> MathematicsGrader:
    return MathematicsGrader()


def test_the_registry_knows_it_by_name_and_by_the_data_sets_task_type() -> None:
    for name in ("mathematics", "verifiable_math"):
        found = grader(name)
        assert isinstance(found, Grader)
        assert (found.name, found.version) == ("mathematics", 5)


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        "\\boxed{42}",
        "The answer is $\\boxed{42}$.",
        "Half of 84 is 84/2 = 42.\n#### 42",
        "$42$",
        json.dumps({"ground_truth": "42"}),
        json.dumps({"ground_truth": 42}),
        json.dumps({"answer": "42", "source": "somewhere"}),
        json.dumps({"answer": ["41", "42"]}),
        json.dumps({"answers": ["42"]}),
    ],
)
def test_gold_answers_are_read_as_data_sets_write_them(mathematics: MathematicsGrader, answer: str) -> None:
    assert mathematics.problem(answer) == ""
    assert mathematics.score(answer, "\\boxed{42}").value == 1.0
    assert mathematics.score(answer, "\\boxed{43}").value == 0.0


def test_any_of_several_gold_answers_is_right_and_all_together_are_not(mathematics: MathematicsGrader) -> None:
    answer = json.dumps({"answer": ["3", "-3"]})
    assert mathematics.score(answer, "\\boxed{3}").value == 1.0
    assert mathematics.score(answer, "\\boxed{-3}").value == 1.0
    assert mathematics.score(answer, "\\boxed{3, -3}").value == 0.0


def test_braces_that_are_no_json_are_a_set(mathematics: MathematicsGrader) -> None:
    assert mathematics.problem("{1, 2}") == ""
    assert mathematics.score("{1, 2}", "\\boxed{\\{2, 1\\}}").value == 1.0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("", "empty"),
        ("  $ $ ", "empty"),
        ("1" * 3000, "3000 characters"),
        ("1" * 30_000, "30000 characters"),
        ("\\frac{1}{2", "braces"),
        ("}1{", "braces"),
        (json.dumps({"tests": "42"}), "ground_truth"),
        (json.dumps({"answer": []}), "empty"),
        (json.dumps({"answer": ""}), "empty"),
        (json.dumps({"answer": {"x": 1}}), "text or a number"),
        (json.dumps({"answer": True}), "text or a number"),
        (json.dumps({"answer": None}), "text or a number"),
    ],
)
def test_a_gold_answer_that_cannot_be_used_is_a_problem_and_no_zero(
    mathematics: MathematicsGrader, answer: str, says: str
) -> None:
    assert says in mathematics.problem(answer)
    with pytest.raises(ScoringFailure, match=says):
        mathematics.score(answer, "\\boxed{1}")


def test_deep_json_is_no_answer_and_no_crash(mathematics: MathematicsGrader) -> None:
    assert "characters" in mathematics.problem('{"answer":' * 50_000)


def test_notes_say_why_and_never_the_answer(mathematics: MathematicsGrader) -> None:
    assert "no final answer" in mathematics.score("42", "<think>42").notes
    assert "limits" in mathematics.score("42", "\\boxed{9^{9^{9}}}").notes
    assert mathematics.score("42", "\\boxed{43}").notes == ""


def test_one_gold_answer_beyond_the_limits_does_not_hide_the_next(mathematics: MathematicsGrader) -> None:
    answer = json.dumps({"answer": ["9^{9^{9}}", "42"]})
    assert mathematics.score(answer, "\\boxed{42.0}").value == 1.0


def test_lists_cannot_ask_symbolic_algebra_for_every_pair() -> None:
    asked: list[str] = []

    def count(gold: str, given: str) -> bool:
        asked.append(given)
        return False

    unread = ", ".join(f"\\sum_{{k=1}}^{{{n}}} k" for n in range(30))
    score = MathematicsGrader(symbolic=count).score(", ".join(map(str, range(30))), f"\\boxed{{{unread}}}")
    assert (score.value, len(asked)) == (0.0, 4)
    assert "limits" in score.notes


def test_numbers_do_not_start_the_helper() -> None:
    def refuse(gold: str, given: str) -> bool:
        raise AssertionError(f"{gold} and {given} were sent to symbolic algebra")

    direct = MathematicsGrader(symbolic=refuse)
    for gold, given in [("1/2", "0.5"), ("\\sqrt{8}", "2\\sqrt{2}"), ("x^2-1", "(x+1)(x-1)"), ("(1,2]", "1<x\\le 2")]:
        assert direct.score(gold, f"\\boxed{{{given}}}").value == 1.0


def test_the_other_grader_says_what_math_verify_says() -> None:
    found = grader("math-verify")
    assert (found.name, found.version) == ("math-verify", 1)
    assert found.score("\\frac{1}{2}", "<think>\\boxed{1}</think> So $\\boxed{0.5}$.").value == 1.0
    assert found.score("\\frac{1}{2}", "<think>\\boxed{0.5}</think> So $\\boxed{1}$.").value == 0.0
    assert found.score(json.dumps({"answer": ["3", "-3"]}), "$-3$").value == 1.0
    assert "empty" in found.problem("")
    # Here the two differ: shoal's grader does not take units for each other, nor a decimal for a root.
    for gold, given in [("5 cm", "5\\text{ m}"), ("\\sqrt{2}", "1.41421356237")]:
        assert found.score(gold, f"$\\boxed{{{given}}}$").value == 1.0
        assert MathematicsGrader().score(gold, f"$\\boxed{{{given}}}$").value == 0.0


def test_what_exceeds_the_limits_of_math_verify_is_worth_nothing() -> None:
    score = MathVerifyGrader().score("7", "\\boxed{9^{9^{9}}}")
    assert (score.value, "limits" in score.notes) == (0.0, True)
