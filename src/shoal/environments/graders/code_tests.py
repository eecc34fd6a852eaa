"""The tests of a code task, read from its verification info. Three spellings are known:

    {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "2 3", "output": "5"},
                                          {"type": "function_call", "fn_name": "add", "input": [2, 3], "output": 5}]}
    {"inputs": ["2 3"], "outputs": ["5"]}                           APPS, TACO; with "fn_name": arguments, values
    {"public_test_cases": [{"input": "2 3", "output": "5", "testtype": "stdin"}], "private_test_cases": …,
     "metadata": {"func_name": "add"}}                              LiveCodeBench; functional: a value per line

Lists may also be given as JSON text. `limits` may be added to any of them, and raises or lowers the usual ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from shoal.environments.graders.code_compare import read_value, same_text, same_value, written
from shoal.environments.sandbox import Limits

LANGUAGES = ("", "python", "python3", "py")
MAX_TESTS = 10_000
CPU_S_A_TEST = 0.02
"""Where a task says nothing of time: what each of its tests adds, once there are so many that the usual is less."""
SPARE_BYTES, ESCAPED = 65_536, 12
"""JSON may write a character in up to twelve bytes."""


class BadTests(ValueError):
    """A task's verification info cannot be used; the message says why."""


@dataclass(frozen=True)
class Test:
    """One test: what the program is given, and what must come out. `function` is empty for standard input."""

    given: bytes
    expected: Any
    function: str = ""
    expected_bytes: int = 0
    """How long the expected value is as JSON: something much longer is another value, and is not read at all."""
    or_alone: bool = False
    """APPS wraps what a function returns in a list; not everywhere."""

    @property
    def called(self) -> bool:
        return bool(self.function)

    def passed(self, output: bytes, returned: bytes) -> bool:
        if not self.called:
            return same_text(self.expected, output)
        if len(returned) > SPARE_BYTES + ESCAPED * self.expected_bytes:
            return False
        try:
            value = read_value(returned)
        except (ValueError, RecursionError):
            return False
        if self.or_alone and isinstance(self.expected, list) and len(self.expected) == 1:
            return same_value(self.expected, value) or same_value(self.expected[0], value)
        return same_value(self.expected, value)


@dataclass(frozen=True)
class Tests:
    """All tests of a task, in the order in which they are run."""

    cases: tuple[Test, ...]
    limits: Limits


@lru_cache(maxsize=2)
def read_tests(answer: str) -> Tests:
    """The tests in a task's answer; `BadTests` says what is wrong. The completions of a group share one reading."""
    try:
        info = read_value(answer)
        if not isinstance(info, dict):
            raise BadTests("the verification info is no JSON object")
        return _tests(info)
    except RecursionError:
        raise BadTests("the verification info is nested too deeply") from None
    except BadTests:
        raise
    except ValueError as error:
        raise BadTests(f"the verification info is no JSON: {error}") from None


def _tests(info: dict[str, Any]) -> Tests:
    language = str(info.get("language") or "").lower()
    if language not in LANGUAGES:
        raise BadTests(f"the language is {language[:40]!r}; only Python is run")
    if "test_cases" in info:
        cases = [_described(case) for case in _list(info["test_cases"], "test_cases")]
    elif "inputs" in info:
        cases = _apps(info)
    elif "public_test_cases" in info or "private_test_cases" in info:
        cases = _livecodebench(info)
    else:
        raise BadTests("there are no tests: neither test_cases, nor inputs and outputs, nor public_test_cases")
    if not cases:
        raise BadTests("there are no tests: the list is empty")
    if len(cases) > MAX_TESTS:
        raise BadTests(f"there are {len(cases)} tests, more than {MAX_TESTS}")
    return Tests(tuple(cases), _limits(info.get("limits"), len(cases)))


def _limits(given: Any, tests: int) -> Limits:
    try:
        limits = Limits.model_validate(given or {})
    except ValidationError as error:
        first = error.errors()[0]
        raise BadTests(f"limits: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if "cpu_s" in limits.model_fields_set:
        return limits
    return limits.model_copy(update={"cpu_s": max(limits.cpu_s, math.ceil(CPU_S_A_TEST * tests))})


def _described(case: Any) -> Test:
    if not isinstance(case, dict) or "input" not in case or "output" not in case:
        raise BadTests("a test has no input or no output")
    kind = case.get("type", "stdin_stdout")
    if kind == "stdin_stdout":
        return _printed(case["input"], case["output"])
    if kind == "function_call":
        return _returned(_name(case.get("fn_name")), case["input"], case["output"])
    raise BadTests(f"a test is of type {str(kind)[:40]!r}; there are stdin_stdout and function_call")


def _apps(info: dict[str, Any]) -> list[Test]:
    inputs, outputs = _list(info["inputs"], "inputs"), _list(info.get("outputs"), "outputs")
    if len(inputs) != len(outputs):
        raise BadTests(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if info.get("fn_name"):
        return [_returned(_name(info["fn_name"]), given, wanted, or_alone=True) for given, wanted in pairs]
    return [_printed(given, wanted) for given, wanted in pairs]


def _livecodebench(info: dict[str, Any]) -> list[Test]:
    metadata = _object(info.get("metadata"))
    tests = []
    for field in ("public_test_cases", "private_test_cases"):
        for case in _list(info.get(field) or [], field):
            if not isinstance(case, dict) or not isinstance(case.get("input"), str) or "output" not in case:
                raise BadTests(f"{field}: a test has no input or no output")
            if case.get("testtype") == "functional":
                tests.append(_functional(_name(metadata.get("func_name")), case["input"], case["output"]))
            else:
                tests.append(_printed(case["input"], case["output"]))
    return tests


def _functional(function: str, given: str, wanted: Any) -> Test:
    """One argument per line, each as JSON; what is expected as JSON too."""
    try:
        arguments = [read_value(line) for line in given.splitlines() if line.strip()]
        value = read_value(wanted) if isinstance(wanted, str) else wanted
    except ValueError as error:
        raise BadTests(f"a functional test is no JSON: {error}") from None
    return _returned(function, arguments, value)


def _printed(given: Any, wanted: Any) -> Test:
    return Test(given=_text(given, "input"), expected=_text(wanted, "output"))


def _returned(function: str, arguments: Any, wanted: Any, *, or_alone: bool = False) -> Test:
    if not isinstance(arguments, list):
        raise BadTests("the input of a function call is no list of arguments")
    given = written({"function": function, "arguments": arguments}).encode()
    size = len(written(wanted))
    return Test(given=given, expected=wanted, function=function, expected_bytes=size, or_alone=or_alone)


def _name(given: Any) -> str:
    """The function's name; some data sets write the class before it."""
    name = str(given or "").rpartition(".")[2]
    if not name.isidentifier():
        raise BadTests("a function call names no function (fn_name, or metadata.func_name)")
    return name


def _text(given: Any, what: str) -> bytes:
    """Text, or a list of lines."""
    if isinstance(given, list) and all(isinstance(line, str) for line in given):
        given = "\n".join(given)
    if not isinstance(given, str):
        raise BadTests(f"a test's {what} is no text")
    return given.encode("utf-8", errors="replace")


def _list(given: Any, what: str) -> list[Any]:
    if isinstance(given, str):
        try:
            given = read_value(given)
        except ValueError:
            raise BadTests(f"{what} is text, and no JSON") from None
    if not isinstance(given, list):
        raise BadTests(f"{what} is no list")
    return given


def _object(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = read_value(given)
        except ValueError:
            raise BadTests("metadata is text, and no JSON") from None
    return given if isinstance(given, dict) else {}
