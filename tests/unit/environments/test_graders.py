"""What graders read: the answer's part, a letter among several, a program and its tests, what is the same output."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.environments.graders import after_thinking
from shoal.environments.graders.choice import ChoiceGrader, chosen_letter
from shoal.environments.graders.code import program
from shoal.environments.graders.code_tests import BadTests, read_tests, same_text, same_value
from shoal.environments.graders.registry import grader

CODE = "```python\nprint(1)\n```"


@pytest.mark.parametrize(("completion", "answer"), [
    ("5", "5"), ("", ""), ("<think>4?</think>5", "5"), ("\n<think>4?</think>5", "5"), ("4?</think>5", "5"),
    ("<think>4?</think>4<think>5?</think>5", "5"), ("<think>4?", ""), ("  <think>4?", ""),
    ("</think> 8 <think>7", " 8 "), ("<think>a</think> 8 <think>7", " 8 "),
    ("<think>a</think> 8 <think>7 <think>6", " 8 "), ("Write <think> first. 5", "Write <think> first. 5"),
    (CODE, CODE), ("<think>a</think>" + CODE, CODE), ("a</think>" + CODE + "<think>b", CODE),
    ("<think>```python\nnever closed</think>5", "5"), ("```python\nnever closed\n</think>5", "5"),
])  # fmt: skip
def test_the_answer_is_what_follows_the_thinking(completion: str, answer: str) -> None:
    assert after_thinking(completion) == answer


@pytest.mark.parametrize("piece", ["</think>", "<think>", "```", "<think></think>", "```</think>"])
def test_many_marks_take_no_longer_than_their_number(piece: str) -> None:
    assert len(after_thinking(piece * 200_000)) <= len(piece) * 200_000


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


ADD_2_3 = json.dumps({"function": "add", "arguments": [2, 3]})


JOIN = json.dumps({"function": "join", "arguments": [[1, 2], "x"]})


@pytest.mark.parametrize(("info", "cases"), [
    ({"language": "python", "test_cases": [PRINTED, CALLED]}, [("2 3\n", b"5\n", ""), (ADD_2_3, 5, "add")]),
    # APPS: standard input, also as lines
    ({"inputs": ["1", ["2", "3"]], "outputs": ["a", ["b"]]}, [("1", b"a", ""), ("2\n3", b"b", "")]),
    # LiveCodeBench: public tests, then private ones
    ({"public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
      "private_test_cases": [{"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional"}],
      "metadata": json.dumps({"func_name": "Solution.join"})}, [("1", b"2", ""), (JOIN, [3], "join")]),
    # INTELLECT-2: the tests are JSON text in JSON text
    ({"test_cases": '{"inputs": ["2 3\\n"], "outputs": ["5\\n"]}'}, [("2 3\n", b"5\n", "")]),
    ({"test_cases": '{"fn_name": "add", "inputs": ["2\\n3"], "outputs": ["5"]}'}, [(ADD_2_3, 5, "add")]),
    ({"test_cases": '{"fn_name": null, "inputs": ["2 3"], "outputs": ["5"]}'}, [("2 3", b"5", "")]),
    ({"test_cases": {"inputs": ["2 3"], "outputs": ["5"]}}, [("2 3", b"5", "")]),
    # Eurus-2-RL-Data: the reward model's ground truth
    ({"ground_truth": '{"inputs": ["2 3"], "outputs": ["5"]}', "style": "rule"}, [("2 3", b"5", "")]),
    # SYNTHETIC-1
    ({"language": "Python", "test_cases": [{**PRINTED, "fn_name": None}]}, [("2 3\n", b"5\n", "")]),
    # DeepCoder: bare lists
    ([PRINTED, CALLED], [("2 3\n", b"5\n", ""), (ADD_2_3, 5, "add")]),
    ([{"input": "2 3", "output": "5"}], [("2 3", b"5", "")]),
    ([{"input": "2\n3", "output": "5", "testtype": "functional", "metadata": {"func_name": "add"}}],
     [(ADD_2_3, 5, "add")]),
])  # fmt: skip
def test_spellings_of_public_data_sets(info: Any, cases: list[tuple[str, Any, str]]) -> None:
    found = read_tests(json.dumps(info)).cases
    assert [(case.given.decode(), case.expected, case.function) for case in found] == cases


BAD: list[tuple[Any, str]] = [
    ("", "no JSON"), ("{", "no JSON"), ("[]", "no tests"), ("5", "no JSON object"), ("9" * 5000, "no JSON"),
    ("[" * 100_000, "no JSON"), ({}, "no tests"), ({"test_cases": []}, "no tests"), ({"test_cases": None}, "no tests"),
    ({"test_cases": 5}, "no list"), ({"test_cases": "{}"}, "no tests"), ({"ground_truth": "42"}, "no tests"),
    ({"test_cases": "x"}, "no JSON"), ({"test_cases": [5]}, "no input"),
    ({"test_cases": [{"input": "1"}]}, "no output"), ({"test_cases": [{**PRINTED, "input": 5}]}, "no text"),
    ({"test_cases": [{**PRINTED, "output": None}]}, "no text"),
    ({"test_cases": [{**PRINTED, "type": "shell"}]}, "stdin_stdout"),
    ({"test_cases": [{**CALLED, "fn_name": None}]}, "names no function"),
    ({"test_cases": [{**CALLED, "fn_name": "a b"}]}, "names no function"),
    ({"test_cases": [{**CALLED, "input": 5}]}, "list of arguments"),
    ({"inputs": ["x"], "outputs": ["5"], "fn_name": "f"}, "an argument of a call is text, and no JSON"),
    ({"inputs": ["5"], "outputs": ["x"], "fn_name": "f"}, "what a call returns is text, and no JSON"),
    ({"test_cases": [PRINTED], "language": "rust"}, "only Python"),
    ({"test_cases": [PRINTED], "limits": {"cpu_s": -1}}, "limits: cpu_s"),
    ({"test_cases": [PRINTED], "limits": {"files": 1}}, "limits: files"),
    ({"test_cases": [PRINTED] * 10_001}, "10001 tests"), ({"inputs": ["1"], "outputs": []}, "not as many outputs"),
    ({"inputs": ["1"], "outputs": 5}, "outputs is no list"),
    ({"public_test_cases": [{"input": 1, "output": "2"}]}, "no text"),
    ({"public_test_cases": [{"input": "x", "output": "2", "testtype": "functional"}], "metadata": {"func_name": "f"}},
     "no JSON"),
    ({"public_test_cases": [{"input": "1", "output": "2", "testtype": "functional"}], "metadata": "x"}, "metadata"),
]  # fmt: skip


@pytest.mark.parametrize(("info", "says"), BAD)
def test_problems_of_tests_are_named(info: Any, says: str) -> None:
    answer = info if isinstance(info, str) else json.dumps(info)
    with pytest.raises(BadTests, match=says):
        read_tests(answer)
    assert says in grader("prime_rl_code").problem(answer)


BLOCKS = [
    ("```python\na\n```", "a\n"), ("```py\na\n```", "a\n"), ("```Python3 title=x\na\n```", "a\n"),
    ("```py3\na\n```", "a\n"), ("```python3.11\na\n```", "a\n"), ("```{python}\na\n```", "a\n"),
    ("```{.python .numbers}\na\n```", "a\n"), ("``` python\na\n```", "a\n"), ("```python,linenos\na\n```", "a\n"),
    ("```\na\n```", "a\n"), ("```python\r\na\r\n```\r\n", "a\n"), ("````python\na\n````", "a\n"),
    ("````python\na\n```\nb\n````", "a\n```\nb\n"), ("```python\na\n````", "a\n"), ("~~~python\na\n~~~", "a\n"),
    ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"), ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
    ("```python\na\n```\nprints\n```\n5\n```", "a\n"), ("```python\na\n```\n```json\n{}\n```", "a\n"),
    ("  ```python\na\n  ```", "a\n"), ("1. so\n   ```python\n   a\n     b\n   ```", "a\n  b\n"),
    ("- ```python\n  a\n\n    b\n  ```", "a\n\n  b\n"), ("      ```python\n      a\n      ```", "a\n"),
    ("Here it is:```python\na\n```", "a\n"), ("- **Code:** ```python\na\n```", "a\n"),
    ("```python\na  # ```\nb\n```", "a  # ```\nb\n"),
    ("```python\n\"\"\"see:```\n\"\"\"\nb\n```", "\"\"\"see:```\n\"\"\"\nb\n"),
    ("```python\ndef f():\n    \"\"\"\n    ```\n    5\n    ```\n    \"\"\"\n```",
     "def f():\n    \"\"\"\n    ```\n    5\n    ```\n    \"\"\"\n"),
    ("```python\na", "a\n"), ("```python\na\n", "a\n"), ("```python\na\n```\n```python\nb", "b\n"),
    ("```python\na\n```\nDone.\n```", "a\n"), ("```python\na\n```\n```python\n>>> a\n5\n```", "a\n"),
    ("Use `x` and ```y``` then\n```python\na\n```", "a\n"), ("```python a```\n```python\nb\n```", "b\n"),
    ("```pycon\n>>> a\n```", ""), ("<think>```python\na\n```</think>no code", ""), ("<think>```python\na\n```", ""),
    ("<think>```python\na\n```</think>```python\nb\n```", "b\n"), ("```rust\na\n```", ""), ("```python\n```", ""),
    ("a = 1", ""), ("", ""),
]  # fmt: skip


WANTED = [
    ("```python\ndef f(): 1\n```\n```python\nf()\n```", "def f(): 1\n"),
    ("```python\ndef f(): 1\n```\n```python\ndef f(): 2\n```", "def f(): 2\n"),
    ("```\ndef f(): 1\n```\n```python\nf()\n```", "def f(): 1\n"),
    ("```python\nclass Solution:\n  def f(self): 1\n```\n```python\nassert f == 2\n```",
     "class Solution:\n  def f(self): 1\n"),
    ("```python\nf = max\n```\n```python\nprint(f(1))\n```", "f = max\n"),
    ("```python\ndef f2(): 1\n```\n```python\ng()\n```", "g()\n"),
    ("```python\nfrom math import gcd as f\n```\n```python\nf(1)\n```", "from math import gcd as f\n"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("completion", "code", "functions"), [*((*pair, []) for pair in BLOCKS), *((*pair, ["f"]) for pair in WANTED)]
)
def test_which_block_is_the_program_or_the_last_that_defines_the_function(completion, code, functions):
    assert program(after_thinking(completion), functions) == code


SAME_TEXT = [
    (b"5", b"5\n"), (b"5\n", b"5"), (b"1 2 3\n", b"1 2 3 \n\n"), (b"1 2 3", b"1  2\t3"), (b"a\nb", b"a\r\nb\r\n"),
    (b"\n5\n", b"5"), (b"", b"\n"), (b"0.5", b"0.50"), (b"0.3333333333", b"0.333333"), (b"1e-3", b"0.001"),
    (b"1000000000.0", b"1000000000.2"), (b"1000000000.1", b"1000000000.6"),
    (b"1234567890123456.0", b"1234567890123456"), (b"0.000123", b"0.00012345678"), (b"0.000123456789", b"0.000123"),
    (b"0.000000001", b"1.001e-9"), (b"0.000012", b"0.0000123"), (b"0.0", b"0.0000001"), (b"0.000000000000", b"1e-10"),
    (b"0e999", b"0"), (b"x 2.50 y", b"x 2.5 y"), (b"-0.0", b"0.0"), (b"2.0", b"2"), ("é ü".encode(), "é ü".encode()),
]  # fmt: skip
OTHER_TEXT = [
    (b"5", b"6"), (b"5", b"5.0"), (b"5", b"05"), (b"5", b"+5"), (b"5", b""), (b"", b"5"), (b"5", b"5\n5"),
    (b"5", b"5 5"), (b"5", b"The answer is 5"), (b"YES", b"Yes"), (b"a b", b"ab"), (b"a\nb", b"a b"),
    (b"a\n\nb", b"a\nb"), (b"1 2", b"2 1"), (b"3.1416", b"3.14"), (b"0.333333", b"0.333336"),
    (b"1234567.89", b"1234567.88"), (b"100000000000000000001", b"100000000000000000002"),
    (b"1000000000.0", b"1000000000.5"), (b"1234567890123456.0", b"1234567890100000"), (b"0.000000001", b"0"),
    (b"1e-9", b"0.0"), (b"0.000000001", b"0.000000002"), (b"-0.00000123", b"0.00000123"), (b"0.5", b"nan"),
    (b"0.5", b"inf"), (b"1e999", b"5.0"), (b"0.5", b"1/2"), (b"5", b"\xff\xfe"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "printed", "same"), [(*p, True) for p in SAME_TEXT] + [(*p, False) for p in OTHER_TEXT]
)
def test_text_that_is_the_same_or_not(expected: bytes, printed: bytes, same: bool) -> None:
    assert same_text(expected, printed) == same


SAME_VALUE: list[tuple[Any, Any]] = [
    (5, 5), (5, 5.0), (5.0, 5), (10**12, 1e12), (1e-9, 1.001e-9), (1e16, 1.0000000001e16), (0.3, 0.1 + 0.2),
    ([1, [2, 3]], [1, [2, 3]]), ({"a": [1.0]}, {"a": [1]}), (None, None), ("é", "é"), ([], []), (True, True),
    (float("nan"), float("nan")), (float("inf"), float("inf")), (10**400, 10**400),
]  # fmt: skip
OTHER_VALUE: list[tuple[Any, Any]] = [
    (5, 6), (5, "5"), (1, True), (True, 1), (0, False), (0.0, False), (0, None), ("", None), ([], {}), ([1], [1, 1]),
    ([1, 2], [2, 1]), ([1], 1), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1, "b": 1}),
    (10**400, 1.0), (1.0, 10**400), (10**12, 1e12 + 999), (3, 3.0000009), (3, float("nan")), (10**400, float("inf")),
    (1e-9, 0.0), (1e-9, 0), (1e12, 10**12 + 1), (float("inf"), 1.0), (1.0, float("nan")), (float("inf"), float("-inf")),
    (1.0, 1.001), (5, [5]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "returned", "same"), [(*p, True) for p in SAME_VALUE] + [(*p, False) for p in OTHER_VALUE]
)
def test_values_that_are_the_same_or_not(expected: Any, returned: Any, same: bool) -> None:
    assert same_value(expected, returned) == same


def test_values_of_any_depth_are_compared() -> None:
    deep: Any = 1
    other: Any = 2
    for _ in range(50_000):
        deep, other = [deep], [other]
    assert (same_value(deep, deep), same_value(deep, other)) == (True, False)
