"""A Python program against tests: worth 1 if it passes all of them, 0 otherwise.

    completion ── its program, after the thinking ──► Sandbox ── test by test: input in, output out ──► compared

Expected outputs never enter the sandbox. The first test that fails ends the grading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from shoal.environments.graders.code_blocks import program
from shoal.environments.graders.code_tests import BadTests, Test, read_tests
from shoal.environments.graders.thinking import after_thinking
from shoal.environments.protocol import Score
from shoal.environments.sandbox import Limits, Ran, Sandbox, require_sandbox
from shoal.errors import ScoringFailure

MAX_CODE_BYTES = 1_000_000
# Imported once for all tests, where a program names them: none of them does anything when it is imported.
WARM = frozenset({
    "abc", "array", "asyncio", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math",
    "numbers", "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading", "time",
    "typing", "unicodedata",
})  # fmt: skip
WARM_FOR_CALLS = ("bisect", "collections", "functools", "heapq", "itertools", "json", "math", "random", "re", "typing")
_IMPORTED = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)
_ERROR = re.compile(rb"^([A-Za-z_][\w.]{0,60})(?::|$)")


@dataclass(frozen=True)
class CodeGrader:
    """Implements `Grader`. `parts` has the share of tests that were passed before the first failure."""

    name: ClassVar[str] = "code"
    version: ClassVar[int] = 3

    def problem(self, answer: str) -> str:
        try:
            read_tests(answer)
        except BadTests as error:
            return str(error)
        return ""

    def prepare(self) -> None:
        """Whether this machine can score at all: an `EnvironmentSetupError` says what is missing."""
        require_sandbox()

    def clock_s(self, answer: str) -> float:
        """How long the task's own limits let a program take by the clock."""
        try:
            tests = read_tests(answer)
        except BadTests:
            return 0.0
        return tests.limits.wall_s(len(tests.cases))

    def score(self, answer: str, completion: str) -> Score:
        try:
            tests = read_tests(answer)
        except BadTests as error:
            raise ScoringFailure(f"the task's tests cannot be read: {error}") from None
        wanted = {case.function for case in tests.cases if case.called}
        code = program(after_thinking(completion), wanted).encode("utf-8", errors="replace")
        if not code.strip():
            return Score(value=0.0, parts={"tests": 0.0}, notes="no program: there is no ```python block")
        if len(code) > MAX_CODE_BYTES:
            return Score(value=0.0, parts={"tests": 0.0}, notes=f"the program is longer than {MAX_CODE_BYTES} bytes")
        passed, failure = _passed(code, tests.cases, tests.limits)
        share = passed / len(tests.cases)
        return Score(value=float(not failure), parts={"tests": share}, notes=failure)


def _passed(code: bytes, cases: tuple[Test, ...], limits: Limits) -> tuple[int, str]:
    """How many tests were passed, and what was wrong with the next one, if there is one."""
    with Sandbox(code, limits, _warm(code, calls=any(case.called for case in cases))) as sandbox:
        for number, case in enumerate(cases):
            ran = sandbox.run(case.given, called=case.called)
            wrong = _wrong(case, ran, limits)
            if wrong:
                return number, f"test {number + 1} of {len(cases)}: {wrong}"
    return len(cases), ""


def _wrong(case: Test, ran: Ran, limits: Limits) -> str:
    """What kind of failure it was. Never what was expected: whoever generated the program may read this."""
    match ran.ended:
        case "time":
            return f"took longer than {limits.test_cpu_s} s, or {limits.cpu_s} s for all tests"
        case "output":
            return f"printed more than {limits.output_bytes} bytes"
        case "signal":
            return f"crashed (signal {-ran.status})"
        case "error":
            return f"ended with an error ({_kind(ran)})"
        case "well":
            if case.passed(ran.output, ran.returned):
                return ""
            return "returned another value" if case.called else "printed something else"


def _kind(ran: Ran) -> str:
    """The name of the exception, if the last line of the errors is one."""
    lines = ran.errors.strip().splitlines()
    found = _ERROR.match(lines[-1]) if lines else None
    return found[1].decode() if found else f"status {ran.status}"


def _warm(code: bytes, *, calls: bool) -> tuple[str, ...]:
    """Modules that the program is going to import, as far as they are known to be harmless."""
    named = _IMPORTED.findall(code.decode("utf-8", errors="replace"))
    words = {word.strip().partition(".")[0] for names in named for word in names.split(",")}
    mentioned = {word.split()[0] for word in words if word.split()}
    return tuple(sorted((mentioned & WARM) | set(WARM_FOR_CALLS if calls else ())))
