"""Graders that run nothing: the part that is the answer, a letter among several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.environments.graders import after_thinking
from shoal.environments.graders.choice import ChoiceGrader, chosen_letter
from shoal.environments.graders.registry import grader

CODE = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("5", "5"), ("", ""), ("<think>4?</think>5", "5"), ("\n<think>4?</think>5", "5"), ("4?</think>5", "5"),
        ("<think>4?</think>4<think>5?</think>5", "5"), ("<think>4?", ""), ("  <think>4?", ""),
        ("</think> 8 <think>7", " 8 "), ("<think>a</think> 8 <think>7", " 8 "),
        ("<think>a</think> 8 <think>7 <think>6", " 8 "), ("Write <think> first. 5", "Write <think> first. 5"),
        (CODE, CODE), ("<think>a</think>" + CODE, CODE), ("a</think>" + CODE + "<think>b", CODE),
        ("<think>```python\nnever closed</think>5", "5"), ("```python\nnever closed\n</think>5", "5"),
    ],
)  # fmt: skip
def test_the_answer_is_what_follows_the_thinking(completion: str, answer: str) -> None:
    assert after_thinking(completion) == answer


@pytest.mark.parametrize("piece", ["</think>", "<think>", "```", "<think></think>", "```</think>"])
def test_many_marks_take_no_longer_than_their_number(piece: str) -> None:
    assert len(after_thinking(piece * 200_000)) <= len(piece) * 200_000


# A letter among several: which one an answer gives, and that no answer gives two

GIVEN = [
    ("Answer: B", "B"), ("answer: (B)", "B"), ("**Answer:** C", "C"), ("The correct answer is **D**.", "D"),
    ("The answer is \\boxed{A}.", "A"), ("\\boxed{\\text{(C)}}", "C"), ("So the final answer is option C.", "C"),
    ("I choose option D", "D"), ("B", "B"), ("(B)", "B"), ("Long thoughts.\n\n**C)**", "C"),
    ("Answer: A\nNo, wait.\nAnswer: B", "B"), ("Answer: C. Option A is wrong because it is cold.", "C"),
    ("Answer: $C$", "C"), ("Answer: A, I am sure", "A"), ("Answer: A or B", ""), ("Answer: A and B", ""),
    ("Answer: (A) / (B)", ""), ("\\boxed{A} or \\boxed{B}", "B"), ("A, B, C, D", ""),
    ("The answer depends on many things.", ""), ("Because it is so", ""), ("a", ""), ("", ""), ("Answer:", ""),
    ("Answer: Argon", ""), ("Answer: A B C D", ""), ("Answer: (A) (B) (C)", ""), ("I think Answer: A|B", ""),
    ("Answer: B; C", ""), ("Answer: B - C", ""), ("Answer: B & C", ""), ("Answer: B or I", ""),
    ("Answer: B\n\nC", ""), ("Answer: B. A is too cold.", "B"), ("Answer: B\nI am sure", "B"),
    ("Answer: B (not C)", "B"), ("The answer is not B", ""), ("The answer cannot be B", ""),
    ("None, the answer would be neither A nor B", ""), ("Answer: A. In the end the answer is not A", ""),
    ("The answer is not B. Answer: C", "C"), ("Final Answer: `B`", "B"), ("`B`", "B"), ("B. foo", "B"),
    ("After all this:\n(C) Nitrogen", "C"), ("A. foo\nB. bar\nC. baz", ""), ("A) B) C) D)", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "letter"), GIVEN)
def test_the_letter_that_an_answer_gives(text: str, letter: str) -> None:
    assert chosen_letter(text) == letter


def test_tasks_have_letters_and_only_what_follows_the_thinking_counts() -> None:
    choice = grader("choice")
    assert choice.problem("C") == ""
    assert all("not a letter" in choice.problem(wrong) for wrong in ("", "c", "AB", "K", "Nitrogen"))
    thoughts = ("<think>Answer: B</think> Answer: C", "<think>Answer: C</think> Answer: B", "<think>Answer: B")
    assert [choice.score("B", said).value for said in thoughts] == [0.0, 1.0, 0.0]
    assert choice.score("B", "B? Perhaps.").notes == "no option was chosen"
    for text in ("answer " * 100_000, "answer is" + " (" * 300_000, "\\boxed{" * 100_000, "\n" * 10**6):
        assert choice.score("B", text).value == 0.0, "read in no time"


@given(st.text())
def test_garbage_never_raises(text: str) -> None:
    assert ChoiceGrader().score("B", text).value in (0.0, 1.0)
