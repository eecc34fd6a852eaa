"""The mathematics grader: tables of pairs, gold answers as data sets write them, properties, garbage."""

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.tables import table
from shoal.environments.graders import grader
from shoal.environments.graders.mathematics.grader import MathematicsGrader
from shoal.errors import ScoringFailure


@dataclass(frozen=True)
class Pair:
    category: str
    right: bool
    gold: str
    completion: str

    def __str__(self) -> str:
        return f"{self.category}: {self.gold} {'=' if self.right else '!='} {self.completion}"


def pairs(name: str = "math_pairs.txt") -> list[Pair]:
    lines = (Path(__file__).parents[2] / "data" / name).read_text(encoding="utf-8").splitlines()
    return [_pair(line) for line in lines if line and not line.startswith("# ")]


def _pair(line: str) -> Pair:
    category, right, gold, answer = f"{line} ".split(" | ", 3)
    answer = answer.removesuffix(" ")
    completion = answer[1:].replace("⏎", "\n") if answer.startswith(">") else f"So it is \\boxed{{{answer}}}."
    return Pair(category, right == "1", gold, completion)


PAIRS = pairs()
CATEGORIES = sorted({pair.category for pair in PAIRS})
GRADER = MathematicsGrader()


@pytest.mark.parametrize("category", CATEGORIES)
def test_answers_are_worth_what_the_table_says(category: str) -> None:
    mine = [pair for pair in PAIRS if pair.category == category]
    scores = {pair: GRADER.score(pair.gold, pair.completion) for pair in mine}
    assert [str(pair) for pair, score in scores.items() if score.value != float(pair.right)] == []
    assert all(score.parts == {"correct": score.value} for score in scores.values())


def test_every_gold_answer_is_usable_and_right_against_itself() -> None:
    for gold in {pair.gold for pair in PAIRS}:
        assert GRADER.problem(gold) == "", gold
        assert GRADER.score(gold, f"\\boxed{{{gold}}}").value == 1.0, gold
        assert GRADER.score(gold, f"<think>Hm.</think>\nThus\n$$\\boxed{{{gold}}}$$").value == 1.0, gold


def test_unseen_pairs_are_mostly_graded_right() -> None:
    """The bar for the grader: at least nine of ten, and five wrong acceptances of 684. Do not tune to these pairs: a
    class that is judged wrongly gets new pairs in the other table."""
    unseen = pairs("math_unseen.txt")
    said = [GRADER.score(pair.gold, pair.completion).value == 1.0 for pair in unseen]
    agreed = sum(right == pair.right for pair, right in zip(unseen, said, strict=True))
    accepted = sum(right and not pair.right for pair, right in zip(unseen, said, strict=True))
    assert len(unseen) >= 150
    assert agreed >= 0.9 * len(unseen)
    assert accepted <= 5 / 684 * len(unseen)


@pytest.mark.parametrize("answer", [
    "42", "\\boxed{42}", "The answer is $\\boxed{42}$.", "Half of 84 is 84/2 = 42.\n#### 42", "$42$",
    json.dumps({"ground_truth": "42"}), json.dumps({"ground_truth": 42}),
    json.dumps({"answer": "42", "source": "somewhere"}), json.dumps({"answer": ["41", "42"]}),
    json.dumps({"answers": ["42"]}),
])  # fmt: skip
def test_gold_answers_are_read_as_data_sets_write_them(answer: str) -> None:
    assert GRADER.problem(answer) == ""
    assert GRADER.score(answer, "\\boxed{42}").value == 1.0
    assert GRADER.score(answer, "\\boxed{43}").value == 0.0


def test_any_of_several_gold_answers_is_right_and_notes_never_say_the_answer() -> None:
    answer = json.dumps({"answer": ["3", "-3"]})
    assert GRADER.score(answer, "\\boxed{3}").value == 1.0
    assert GRADER.score(answer, "\\boxed{-3}").value == 1.0
    assert GRADER.score(answer, "\\boxed{3, -3}").value == 0.0
    assert "no final answer" in GRADER.score("42", "<think>42").notes
    assert "limits" in GRADER.score("42", "\\boxed{9^{9^{9}}}").notes
    assert GRADER.score("42", "\\boxed{43}").notes == ""


@pytest.mark.parametrize(("answer", "says"), [
    ("", "empty"), ("  $ $ ", "empty"), ("1" * 3000, "3000 characters"), ("1" * 30_000, "30000 characters"),
    ("\\frac{1}{2", "braces"), ("}1{", "braces"), (json.dumps({"tests": "42"}), "ground_truth"),
    (json.dumps({"answer": []}), "empty"), (json.dumps({"answer": ""}), "empty"),
    (json.dumps({"answer": {"x": 1}}), "text or a number"), (json.dumps({"answer": True}), "text or a number"),
    (json.dumps({"answer": None}), "text or a number"),
])  # fmt: skip
def test_unusable_gold_answer_is_a_problem_and_never_zero(answer: str, says: str) -> None:
    assert says in GRADER.problem(answer)
    with pytest.raises(ScoringFailure, match=says):
        GRADER.score(answer, "\\boxed{1}")


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
    for gold, text in [("1/2", "0.5"), ("\\sqrt{8}", "2\\sqrt{2}"), ("x^2-1", "(x+1)(x-1)"), ("(1,2]", "1<x\\le 2")]:
        assert direct.score(gold, f"\\boxed{{{text}}}").value == 1.0


def test_the_other_grader_says_what_math_verify_says() -> None:
    found = grader("math-verify")
    assert (found.name, found.version) == ("math-verify", 1)
    assert found.score("\\frac{1}{2}", "<think>\\boxed{1}</think> So $\\boxed{0.5}$.").value == 1.0
    assert found.score("\\frac{1}{2}", "<think>\\boxed{0.5}</think> So $\\boxed{1}$.").value == 0.0
    assert found.score(json.dumps({"answer": ["3", "-3"]}), "$-3$").value == 1.0
    assert "empty" in found.problem("")
    # Here the two differ: shoal's grader does not take units for each other, nor a decimal for a root.
    for gold, text in [("5 cm", "5\\text{ m}"), ("\\sqrt{2}", "1.41421356237")]:
        assert found.score(gold, f"$\\boxed{{{text}}}$").value == 1.0
        assert MathematicsGrader().score(gold, f"$\\boxed{{{text}}}$").value == 0.0


_SIGNS = (
    r"\frac { } 1 2 x + - * / ^ ( ) [ ] , \sqrt \pi = < | \{ \} % \text{cm} . : \pm \cup \infty ! _ \sin e i or $ "
    r"\le \begin{pmatrix} \end{pmatrix} & \\ \log \overline \circ and 0"
)
PIECES = st.sampled_from([*_SIGNS.split(), " "])
FORMULAS = st.lists(PIECES, max_size=25).map("".join)
NUMBERS = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=1000)


def never(gold: str, given: str) -> bool:
    """Symbolic algebra has tests of its own; here it would only take time."""
    return False


SIMPLE = MathematicsGrader(symbolic=never)


@given(gold=FORMULAS | st.text(max_size=40), completion=FORMULAS | st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_text_raises_and_none_is_scored_twice_differently(gold: str, completion: str) -> None:
    if SIMPLE.problem(gold):
        return
    first = SIMPLE.score(gold, completion)
    assert first.value in (0.0, 1.0)
    assert SIMPLE.score(gold, completion) == first
    boxed = SIMPLE.score(gold, f"\\boxed{{{completion}}}")
    assert SIMPLE.score(gold, f"\\boxed{{{completion}}}") == boxed


@given(text=FORMULAS | st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_gold_answer_is_right_against_itself(text: str) -> None:
    if SIMPLE.problem(text) or "<think>" in text or text.endswith("\\"):  # a last backslash would take the box's brace
        return
    assert SIMPLE.score(text, f"\\boxed{{{text}}}").value == 1.0


@given(value=NUMBERS)
@settings(max_examples=80, deadline=None)
def test_every_spelling_of_a_number_is_that_number_and_no_other(value: Fraction) -> None:
    gold = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    top, bottom = value.numerator, value.denominator
    spellings = [
        f"{top}/{bottom}", f"\\dfrac{{{3 * top}}}{{{3 * bottom}}}", f"x = {top}/{bottom}", f"{top} \\div {bottom}",
    ]  # fmt: skip
    for spelling in spellings:
        assert SIMPLE.score(gold, f"\\boxed{{{spelling}}}").value == 1.0
    other = value + Fraction(1, 1001)
    assert SIMPLE.score(gold, f"\\boxed{{{other.numerator}/{other.denominator}}}").value == 0.0


# What no person would answer: it is worth 0, and neither raises nor hangs. (A hang fails by the test's time limit.)

GOLDS = (
    "7", "10^{900}", "x^2+1", "(1,2)", "Tuesday", "\\frac{\\sqrt{3}}{2}", "x > 3",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
)  # fmt: skip


def garbage(section: str) -> dict[str, str]:
    """By name; a piece [text, count] stands for the text that many times."""
    cases = {name: pieces for name, *pieces in table("math_garbage", section)}
    return {name: "".join(p if isinstance(p, str) else p[0] * p[1] for p in each) for name, each in cases.items()}


BOXED = garbage("boxed") | {
    "all numbers": ", ".join(map(str, range(400))),
    "large denominators": "+".join(f"1/{n}" for n in range(100_000_000, 100_000_150)),
}
UNBOXED = garbage("unboxed") | {"all numbers": "The answer is " + " or ".join(map(str, range(1000)))}


@pytest.mark.parametrize("name", BOXED)
def test_a_strange_answer_is_worth_nothing(name: str) -> None:
    for gold in GOLDS:
        assert GRADER.score(gold, f"\\boxed{{{BOXED[name]}}}").value == 0.0
    GRADER.score("5", BOXED[name])  # unboxed: whatever is found in it, it does not raise


@pytest.mark.parametrize("name", UNBOXED)
def test_a_strange_completion_is_worth_nothing(name: str) -> None:
    for gold in GOLDS:
        assert GRADER.score(gold, UNBOXED[name]).value == 0.0
