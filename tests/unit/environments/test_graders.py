"""What graders read: the answer's part, a letter among several, a program and its tests, what is the same output."""

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.tables import table
from shoal.environments.graders import after_thinking, grader
from shoal.environments.graders.choice import ChoiceGrader, chosen_letter
from shoal.environments.graders.code import program
from shoal.environments.graders.code_tests import BadTests, read_tests, same_text, same_value


@pytest.mark.parametrize(("completion", "answer"), table("graders", "after thinking"))
def test_the_answer_is_what_follows_the_thinking(completion: str, answer: str) -> None:
    assert after_thinking(completion) == answer


@pytest.mark.parametrize("piece", ["</think>", "<think>", "```", "<think></think>", "```</think>"])
def test_many_marks_take_no_longer_than_their_number(piece: str) -> None:
    assert len(after_thinking(piece * 200_000)) <= len(piece) * 200_000


@pytest.mark.parametrize(("text", "letter"), table("graders", "letters"))
def test_the_letter_that_an_answer_gives(text: str, letter: str) -> None:
    assert chosen_letter(text) == letter


def test_choice_answers_are_letters_after_the_thinking() -> None:
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


PRINTED = {"type": "stdin_stdout", "input": "2 3\n", "output": "5\n"}
CALLED = {"type": "function_call", "fn_name": "add", "input": [2, 3], "output": 5}


@pytest.mark.parametrize(("info", "right", "wrong"), [
    ({"inputs": [[2, 3]], "outputs": [[5]], "fn_name": "add"}, [b"5", b"[5]"], [b"[[5]]"]),  # APPS wraps it
    ({"test_cases": [{**CALLED, "output": [5]}]}, [b"5", b"[5]"], [b"[[5]]"]),  # so do sets that were made of it
    ([{"input": "2\n3", "output": "[5]", "testtype": "functional", "metadata": {"func_name": "add"}}],
     [b"[5]"], [b"5"]),
    ({"test_cases": [CALLED]}, [b" 5 "],
     [b"", b"5 5", b"{", b"[" * 50_000, b"9" * 5000, b"[" + b"1," * 50_000 + b"5]"]),
])  # fmt: skip
def test_return_values_of_calls(info: Any, right: list[bytes], wrong: list[bytes]) -> None:
    (case,) = read_tests(json.dumps(info)).cases
    assert [case.passed(b"5", returned) for returned in right + wrong] == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c"])
def test_only_a_line_break_ends_an_argument(separator: str) -> None:
    """JSON may hold other characters at which Python ends a line, most of them as they are."""
    given = [f"a{separator}b", 3]
    info = {"inputs": ["\r\n".join(json.dumps(one, ensure_ascii=False) for one in given)], "outputs": ["5"]}
    (case,) = read_tests(json.dumps({**info, "fn_name": "add"})).cases
    assert json.loads(case.given)["arguments"] == given


@pytest.mark.parametrize(("spelling", "info", "cases"), table("graders", "spellings of tests"))
def test_spellings_of_public_data_sets(spelling: str, info: Any, cases: list[tuple[str, Any, str]]) -> None:
    found = [(case.given.decode(), case.expected, case.function) for case in read_tests(json.dumps(info)).cases]
    expected = [(given, wanted if name else wanted.encode(), name) for given, wanted, name in cases]
    assert found == expected, spelling


TOO_MUCH = [("9" * 5000, "no JSON"), ("[" * 100_000, "no JSON"), ({"test_cases": [PRINTED] * 10_001}, "10001 tests")]


@pytest.mark.parametrize(("info", "says"), [*table("graders", "bad tests"), *TOO_MUCH])
def test_problems_of_tests_are_named(info: Any, says: str) -> None:
    answer = info if isinstance(info, str) else json.dumps(info)
    with pytest.raises(BadTests, match=says):
        read_tests(answer)
    assert says in grader("prime_rl_code").problem(answer)


@pytest.mark.parametrize(("completion", "code", "functions"), [
    *((*case, []) for case in table("graders", "programs")),
    *((*case, ["f"]) for case in table("graders", "programs that define f")),
])  # fmt: skip
def test_which_block_is_the_program_or_the_last_that_defines_the_function(completion, code, functions):
    assert program(after_thinking(completion), functions) == code


@pytest.mark.parametrize(("expected", "printed", "same"), [
    *((*case, True) for case in table("same_output", "same text")),
    *((*case, False) for case in table("same_output", "other text")), ("5", "\udcff\udcfe", False),
])  # fmt: skip
def test_text_that_is_the_same_or_not(expected: str, printed: str, same: bool) -> None:
    assert same_text(os.fsencode(expected), os.fsencode(printed)) == same


HUGE, INFINITE = 10**400, float("inf")


@pytest.mark.parametrize(("expected", "returned", "same"), [
    *((*case, True) for case in table("same_output", "same value")), (HUGE, HUGE, True),
    *((*case, False) for case in table("same_output", "other value")),
    *((*case, False) for case in ((HUGE, 1.0), (1.0, HUGE), (HUGE, INFINITE))),
])  # fmt: skip
def test_values_that_are_the_same_or_not(expected: Any, returned: Any, same: bool) -> None:
    assert same_value(expected, returned) == same


def test_values_of_any_depth_are_compared() -> None:
    deep: Any = 1
    other: Any = 2
    for _ in range(50_000):
        deep, other = [deep], [other]
    assert (same_value(deep, deep), same_value(deep, other)) == (True, False)
