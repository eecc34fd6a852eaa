"""Verification info of code tasks, as data sets write it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.environments.graders.code_tests import BadTests, read_tests
from shoal.environments.graders.registry import grader

PRINTED = {"type": "stdin_stdout", "input": "2 3\n", "output": "5\n"}
CALLED = {"type": "function_call", "fn_name": "add", "input": [2, 3], "output": 5}


def read(**info: Any) -> list[tuple[str, Any, str]]:
    cases = read_tests(json.dumps(info)).cases
    return [(case.given.decode(), case.expected, case.function) for case in cases]


def test_the_described_form() -> None:
    call = json.dumps({"function": "add", "arguments": [2, 3]})

    cases = read(language="python", test_cases=[PRINTED, CALLED])

    assert cases == [("2 3\n", b"5\n", ""), (call, 5, "add")]


def test_tests_as_json_text() -> None:
    assert read(test_cases=json.dumps([PRINTED])) == [("2 3\n", b"5\n", "")]


def test_apps_with_standard_input_also_as_lines() -> None:
    assert read(inputs=["1", ["2", "3"]], outputs=["a", ["b"]]) == [("1", b"a", ""), ("2\n3", b"b", "")]


def test_apps_with_a_function_whose_value_may_be_wrapped() -> None:
    (case,) = read_tests(json.dumps({"inputs": [[2, 3]], "outputs": [[5]], "fn_name": "add"})).cases

    assert case.passed(b"", b"5")
    assert case.passed(b"", b"[5]")
    assert not case.passed(b"", b"[[5]]")


def test_a_described_value_is_not_unwrapped() -> None:
    (case,) = read_tests(json.dumps({"test_cases": [{**CALLED, "output": [5]}]})).cases

    assert case.passed(b"", b"[5]")
    assert not case.passed(b"", b"5")


@pytest.mark.parametrize("returned", [b"", b"5 5", b"{", b"[" * 50_000, b"9" * 5000, b"[" + b"1," * 50_000 + b"5]"])
def test_what_is_no_value_at_all_is_not_the_expected_one(returned: bytes) -> None:
    (case,) = read_tests(json.dumps({"test_cases": [CALLED]})).cases

    assert case.passed(b"", b" 5 ")
    assert not case.passed(b"5", returned)


def test_livecodebench_public_then_private() -> None:
    cases = read(
        public_test_cases=json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
        private_test_cases=[{"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional"}],
        metadata=json.dumps({"func_name": "Solution.join"}),
    )

    call = json.dumps({"function": "join", "arguments": [[1, 2], "x"]})
    assert cases == [("1", b"2", ""), (call, [3], "join")]


ADD_2_3 = json.dumps({"function": "add", "arguments": [2, 3]})


@pytest.mark.parametrize(
    ("info", "cases"),
    [
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
    ],
)  # fmt: skip
def test_spellings_of_public_data_sets(info: Any, cases: list[tuple[str, Any, str]]) -> None:
    found = read_tests(json.dumps(info)).cases

    assert [(case.given.decode(), case.expected, case.function) for case in found] == cases


def test_limits_of_a_task() -> None:
    limits = read_tests(json.dumps({"test_cases": [PRINTED], "limits": {"cpu_s": 3, "memory_mb": 64}})).limits

    assert (limits.cpu_s, limits.memory_mb, limits.test_cpu_s) == (3, 64, 4)


BAD: list[tuple[Any, str]] = [
    ("", "no JSON"),
    ("{", "no JSON"),
    ("[]", "empty"),
    ("5", "no JSON object"),
    ("9" * 5000, "no JSON"),
    ("[" * 100_000, "nested too deeply"),
    ({}, "no tests"),
    ({"test_cases": []}, "empty"),
    ({"test_cases": None}, "empty"),
    ({"test_cases": 5}, "no list"),
    ({"test_cases": "{}"}, "no tests"),
    ({"ground_truth": "42"}, "no tests"),
    ({"test_cases": "x"}, "no JSON"),
    ({"test_cases": [5]}, "no input"),
    ({"test_cases": [{"input": "1"}]}, "no output"),
    ({"test_cases": [{**PRINTED, "input": 5}]}, "no text"),
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
    ({"test_cases": [PRINTED] * 10_001}, "10001 tests"),
    ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ({"inputs": ["1"]}, "outputs is no list"),
    ({"public_test_cases": [{"input": 1, "output": "2"}]}, "no text"),
    ({"public_test_cases": [{"input": "x", "output": "2", "testtype": "functional"}], "metadata": {"func_name": "f"}},
     "no JSON"),
    ({"public_test_cases": [{"input": "1", "output": "2", "testtype": "functional"}], "metadata": "x"}, "metadata"),
]  # fmt: skip


@pytest.mark.parametrize(("info", "says"), BAD)
def test_what_is_wrong_is_said(info: Any, says: str) -> None:
    answer = info if isinstance(info, str) else json.dumps(info)

    with pytest.raises(BadTests, match=says):
        read_tests(answer)
    assert says in grader("prime_rl_code").problem(answer)


def test_nothing_is_wrong_with_good_tests() -> None:
    assert grader("code").problem(json.dumps({"test_cases": [PRINTED, CALLED]})) == ""
