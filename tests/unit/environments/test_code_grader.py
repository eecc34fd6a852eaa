"""The code grader with the real sandbox: gold programs are worth 1, near-misses and garbage 0."""

import json
from typing import Any

import pytest

from kit.sandbox import needs_bubblewrap
from kit.tables import table
from shoal.environments.graders.code import CodeGrader
from shoal.errors import ScoringFailure

SUM = json.dumps({"inputs": ["3\n1 2 3\n", "1\n-5\n", "2\n10 20\n"], "outputs": ["6\n", "-5\n", "30\n"]})
PAIRS = json.dumps({
    "test_cases": [
        {"type": "function_call", "fn_name": "pairs", "input": [[1, 2, 3], 4], "output": [[1, 3]]},
        {"type": "function_call", "fn_name": "pairs", "input": [[], 4], "output": []},
    ],
})  # fmt: skip


def block(code: str, mark: str = "python") -> str:
    return f"<think>hm</think>Here it is:\n```{mark}\n{code}\n```\nDone."


def score(answer: str, code: str) -> tuple[float, float, str]:
    scored = CodeGrader().score(answer, block(code))
    return scored.value, scored.parts["tests"], scored.notes


RIGHT = [
    *((SUM, *case) for case in table("programs", "right sums")),
    *((PAIRS, *case) for case in table("programs", "right pairs")),
    *((json.dumps({"inputs": ["\n"], "outputs": ["6\n"]}), *case) for case in table("programs", "with granted names")),
]  # answer, what the program does, the program
# and how many tests it passes, what the note says
WRONG = [
    *((SUM, *case) for case in table("programs", "wrong sums")),
    *((PAIRS, name, code, 0, says) for name, code, says in table("programs", "wrong pairs")),
]


@needs_bubblewrap
@pytest.mark.parametrize(("answer", "name", "code"), RIGHT, ids=[name for _, name, _ in RIGHT])
def test_a_right_program_is_worth_one(answer: str, name: str, code: str) -> None:
    assert score(answer, code) == (1.0, 1.0, ""), name


@needs_bubblewrap
@pytest.mark.parametrize(("answer", "name", "code", "passed", "says"), WRONG, ids=[case[1] for case in WRONG])
def test_a_wrong_program_is_worth_nothing_and_the_note_says_the_kind(answer, name, code, passed, says):
    value, share, notes = score(answer, code)
    assert value == 0.0, name
    if answer == SUM:
        assert (share, notes.startswith(f"test {passed + 1} of 3: ")) == (passed / 3, True)
    assert says in notes


def call_of(name: str, *given: Any, output: Any) -> str:
    case = {"type": "function_call", "fn_name": name, "input": list(given), "output": output}
    return json.dumps({"test_cases": [case]})


@needs_bubblewrap
@pytest.mark.parametrize(("name", "output"), [("gcd", 4), ("sqrt", 2.0), ("Any", None), ("max", 8)])
def test_predefined_names_are_not_the_programs_functions(name: str, output: Any) -> None:
    value, _share, notes = score(call_of(name, 12, 8, output=output), "pass")
    assert (value, notes) == (0.0, "test 1 of 1: ended with an error (KeyError)")


@needs_bubblewrap
def test_an_example_after_the_function_is_not_the_program() -> None:
    completion = "```python\ndef f(x): return x\n```\nFor example:\n```python\nprint(f(2))\n```"
    assert CodeGrader().score(call_of("f", 1, output=1), completion).value == 1.0


@pytest.mark.parametrize("completion", ["", "print(6)", "```python\n\n```", "```rust\nfn main() {}\n```"])
def test_a_completion_without_a_program_is_worth_nothing(completion: str) -> None:
    scored = CodeGrader().score(SUM, completion)
    assert (scored.value, scored.notes) == (0.0, "no program: there is no ```python block")


def test_an_answer_that_cannot_be_read_is_a_failure_of_the_machinery() -> None:
    with pytest.raises(ScoringFailure, match="tests cannot be read"):
        CodeGrader().score("{}", block("print(1)"))


def test_many_tests_are_given_more_time() -> None:
    case = {"type": "stdin_stdout", "input": "", "output": "1"}
    few, many = (json.dumps({"test_cases": [case] * count}) for count in (10, 10_000))
    assert CodeGrader().clock_s(few) == pytest.approx(45.4)
    assert CodeGrader().clock_s(many) == 4 * (200 + 100) + 5


@needs_bubblewrap
def test_time_is_counted_over_all_tests() -> None:
    case = {"type": "stdin_stdout", "input": "", "output": "1"}
    answer = json.dumps({"test_cases": [case] * 9, "limits": {"cpu_s": 1, "test_cpu_s": 1}})
    busy = "import time\nwhile time.process_time() < 0.4: pass\nprint(1)"
    value, share, notes = score(answer, busy)
    assert (value, 0 < share <= 3 / 9) == (0.0, True)
    assert "took longer" in notes
