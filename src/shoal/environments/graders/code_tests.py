"""The tests of a code task, read from its verification info. Three spellings are known:

    {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "2 3", "output": "5"},
                                          {"type": "function_call", "fn_name": "add", "input": [2, 3], "output": 5}]}
    {"inputs": ["2 3"], "outputs": ["5"]}                           APPS, TACO; with "fn_name": arguments, values
    {"public_test_cases": [{"input": "2 3", "output": "5", "testtype": "stdin"}], "private_test_cases": …,
     "metadata": {"func_name": "add"}}                              LiveCodeBench

The list of cases may stand alone, lists may be JSON text, and `test_cases` and `ground_truth` may hold an object in any
of the three forms. Each may have `limits`. A case may also be a pair (input, output), or the text of an assert that
compares a call with a value: "assert add(2, 3) == 5". Input and output that are printed may be numbers.

Printed text is compared line by line; the amount of white space does not matter. Returned values are compared as JSON.
If an expected number has a point or an exponent, the result may differ by 10⁻⁶, or by 10⁻⁹ of its size if that is more;
from a whole number (5.0) by less than one half, and from a very small one by a hundredth, or half of its last digit.
"""

import ast
import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from shoal.environments.sandbox import Limits

ABSOLUTE, RELATIVE, SHARE = 1e-6, 1e-9, 1e-2
ALL_WHOLE = 2**53  # a float can represent every whole number below
_NUMBER = re.compile(rb"[+-]?(?:\d{1,64}\.?\d{0,64}|\.\d{1,64})(?:[eE][+-]?\d{1,3})?")
LANGUAGES = ("", "python", "python3", "py")
MAX_TESTS = 10_000
CPU_S_A_TEST = 0.02  # lower limit for tasks without a time limit but with many tests
SPARE_BYTES, ESCAPED = 65_536, 12  # JSON may write a character in up to twelve bytes


class BadTests(ValueError):
    """A task's verification info cannot be used; the message says why."""


@dataclass(frozen=True)
class Test:
    """One test: input and expected output. `function` is empty for standard input."""

    given: bytes
    expected: Any
    function: str = ""
    expected_bytes: int = 0  # of the expected value as JSON: a much longer result is not parsed
    or_alone: bool = False  # APPS and its derivatives wrap some return values in a list

    @property
    def called(self) -> bool:
        return bool(self.function)

    def passed(self, output: bytes, returned: bytes) -> bool:
        if not self.called:
            return same_text(self.expected, output)
        if len(returned) > SPARE_BYTES + ESCAPED * self.expected_bytes:
            return False
        try:
            value = json.loads(returned)
        except (ValueError, RecursionError):
            return False
        if self.or_alone and isinstance(self.expected, list) and len(self.expected) == 1:
            return same_value(self.expected, value) or same_value(self.expected[0], value)
        return same_value(self.expected, value)


@dataclass(frozen=True)
class Tests:
    cases: tuple[Test, ...]
    limits: Limits


@lru_cache(maxsize=2)
def read_tests(answer: str) -> Tests:
    """The tests in a task's answer, or `BadTests`. Cached for the completions of a group."""
    try:
        info = json.loads(answer)
        info = {"test_cases": info} if isinstance(info, list) else info
        if not isinstance(info, dict):
            raise BadTests("the verification info is no JSON object")
        info = _unwrapped(info)
        language = str(info.get("language") or "").lower()
        if language not in LANGUAGES:
            raise BadTests(f"the language is {language[:40]!r}; only Python is run")
        if "inputs" in info and "test_cases" not in info:
            inputs, outputs, called = _list(info, "inputs"), _list(info, "outputs"), info.get("fn_name")
            if len(inputs) != len(outputs):
                raise BadTests(f"there are not as many outputs ({len(outputs)}) as inputs ({len(inputs)})")
            pairs = zip(inputs, outputs, strict=True)
            cases = [_returned(called, *pair, or_alone=True) if called else _printed(*pair) for pair in pairs]
        else:  # the function's name is in the case, in its metadata, or in those of all cases
            function = info.get("fn_name") or _metadata(info).get("func_name")
            chosen = ["test_cases"] if "test_cases" in info else ["public_test_cases", "private_test_cases"]
            cases = [_case(case, function, field) for field in chosen for case in _list(info, field)]
        if not cases:
            raise BadTests("there are no tests: neither test_cases, nor inputs and outputs, nor public_test_cases")
        if len(cases) > MAX_TESTS:
            raise BadTests(f"there are {len(cases)} tests, more than {MAX_TESTS}")
        try:
            limits = Limits.model_validate(info.get("limits") or {})
        except ValidationError as error:
            first = error.errors()[0]
            raise BadTests(f"limits: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if "cpu_s" not in limits.model_fields_set:
            limits = limits.model_copy(update={"cpu_s": max(limits.cpu_s, math.ceil(CPU_S_A_TEST * len(cases)))})
        return Tests(tuple(cases), limits)
    except BadTests:
        raise
    except (ValueError, RecursionError) as error:
        raise BadTests(f"the verification info is no JSON: {error}") from None


def _unwrapped(info: dict[str, Any]) -> dict[str, Any]:
    for field in ("test_cases", "ground_truth"):
        inner = _parsed(info[field], field) if info.get(field) else None
        if isinstance(inner, dict):
            return _unwrapped({**{key: value for key, value in info.items() if key != field}, **inner})
        if isinstance(inner, list):
            return {**info, "test_cases": inner}
    return info


def _case(case: Any, function: Any, field: str) -> Test:
    if isinstance(case, str):
        return _asserted(case)
    if isinstance(case, list) and len(case) == 2:
        return _returned(function, *case) if function else _printed(*case)
    if not isinstance(case, dict) or "input" not in case or "output" not in case:
        raise BadTests(f"{field}: a test has no input or no output")
    named = case.get("fn_name") or _metadata(case).get("func_name")
    kind = case.get("type") or case.get("testtype") or ("function_call" if named else "stdin_stdout")
    if kind in ("stdin_stdout", "stdin"):
        return _printed(case["input"], case["output"])
    if kind in ("function_call", "functional"):
        return _returned(named or function, case["input"], case["output"], or_alone=kind == "function_call")
    raise BadTests(f"a test is of type {str(kind)[:40]!r}; there are stdin_stdout (stdin), function_call (functional)")


def _asserted(text: str) -> Test:
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(ast.Compare(ast.Call(ast.Name(name), given, []), [ast.Eq()], [wanted]))]:
                values = [ast.literal_eval(each) for each in (*given, wanted)]
                *arguments, value = json.loads(json.dumps(values))
                return _returned(name, arguments, value)
    except (SyntaxError, ValueError, TypeError, MemoryError):
        pass
    raise BadTests(f"{text[:60]!r} does not compare a call with a value: assert name(value, …) == value")


def _returned(function: Any, arguments: Any, wanted: Any, *, or_alone: bool = False) -> Test:
    name = str(function or "").rpartition(".")[2]  # some data sets write the class before it
    if not name.isidentifier():
        raise BadTests("a function call names no function (fn_name, or metadata.func_name)")
    if isinstance(arguments, str):
        arguments = [_parsed(line, "an argument of a call") for line in arguments.split("\n") if line.strip()]
        wanted = _parsed(wanted, "what a call returns")
    if not isinstance(arguments, list):
        raise BadTests("the input of a function call is neither a list of arguments nor a text with one on each line")
    given = json.dumps({"function": name, "arguments": arguments}).encode()
    return Test(given, wanted, name, expected_bytes=len(json.dumps(wanted)), or_alone=or_alone)


def _printed(given: Any, wanted: Any) -> Test:
    texts = []
    for value, what in ((given, "input"), (wanted, "output")):
        lines = value if isinstance(value, list) else [value]
        if not all(type(line) in (str, int, float) for line in lines):
            raise BadTests(f"a test's {what} is no text")
        texts.append("\n".join(map(str, lines)).encode("utf-8", errors="replace"))
    return Test(texts[0], texts[1])


def _list(info: dict[str, Any], field: str) -> list[Any]:
    given = _parsed(info.get(field) or [], field)
    if not isinstance(given, list):
        raise BadTests(f"{field} is no list")
    return given


def _metadata(info: dict[str, Any]) -> dict[str, Any]:
    given = _parsed(info.get("metadata") or {}, "metadata")
    return given if isinstance(given, dict) else {}


def _parsed(given: Any, what: str) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        raise BadTests(f"{what} is text, and no JSON") from None


def same_text(expected: bytes, printed: bytes) -> bool:
    wanted, got = expected.strip(), printed.strip()
    if wanted == got:
        return True
    if wanted.count(b"\n") != got.count(b"\n"):
        return False
    for line, other in zip(wanted.split(b"\n"), got.split(b"\n"), strict=True):
        words, others = line.split(), other.split()
        if line != other and not (len(words) == len(others) and all(map(_same_word, words, others))):
            return False
    return True


def _same_word(wanted: bytes, got: bytes) -> bool:
    if wanted == got:
        return True
    inexact = b"." in wanted or b"e" in wanted.lower()
    if not (inexact and _NUMBER.fullmatch(wanted) and _NUMBER.fullmatch(got)):
        return False
    return near(float(wanted), float(got), wanted.decode())


def near(wanted: float, got: float, spelled: str = "") -> bool:
    if wanted == got or not (math.isfinite(wanted) and math.isfinite(got)):
        return wanted == got or (math.isnan(wanted) and math.isnan(got))
    if wanted.is_integer() and abs(wanted) < ALL_WHOLE and abs(wanted - got) >= 0.5:
        return False
    allowed = ABSOLUTE
    if 0 < abs(wanted) < ABSOLUTE / SHARE:
        last_digit = 10.0 ** int(Decimal(spelled or repr(wanted)).as_tuple().exponent)
        allowed = min(ABSOLUTE, max(SHARE * abs(wanted), last_digit / 2))
    return abs(wanted - got) <= max(allowed, RELATIVE * abs(wanted))


def same_value(expected: Any, returned: Any) -> bool:
    pairs = [(expected, returned)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            pairs += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            pairs += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, list | dict) or not _same_leaf(one, other):
            return False
    return True


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is float and type(other) in (int, float):  # a whole number may be too large to be a float
        return (type(other) is float or abs(other) < 1 << 1000) and near(one, float(other))
    if type(one) is int and type(other) is float:
        return other == one
    return type(one) is type(other) and bool(one == other)
