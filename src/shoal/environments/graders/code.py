"""Runs a Python program against tests: the score is 1 if it passes all of them, else 0.

    completion ── its program, after the thinking ──► Sandbox ── test by test: input in, output out ──► compared

Expected outputs never enter the sandbox. The first test that fails ends the grading.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import ClassVar

from shoal.environments.graders import after_thinking
from shoal.environments.graders.code_tests import BadTests, Test, read_tests
from shoal.environments.protocol import Score
from shoal.environments.sandbox import Limits, Ran, Sandbox, require_sandbox
from shoal.errors import ScoringFailure

MAX_CODE_BYTES = 1_000_000
# Imported once for all tests if the program contains the name; none of them has side effects.
WARM = frozenset({
    "abc", "array", "asyncio", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math",
    "numbers", "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading", "time",
    "typing", "unicodedata",
})  # fmt: skip
_ERROR = re.compile(rb"^([A-Za-z_][\w.]{0,60})(?::|$)")


@dataclass(frozen=True)
class CodeGrader:
    """Implements `Grader`. `parts` has the share of tests that were passed before the first failure."""

    name: ClassVar[str] = "code"
    version: ClassVar[int] = 5

    def problem(self, answer: str) -> str:
        try:
            read_tests(answer)
        except BadTests as error:
            return str(error)
        return ""

    def prepare(self) -> None:
        require_sandbox()

    def clock_s(self, answer: str) -> float:
        if self.problem(answer):
            return 0.0
        tests = read_tests(answer)
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
        cases = tests.cases
        warm = WARM.intersection(re.findall(r"[a-z]+", code.decode(errors="replace"))) | ({"json"} if wanted else set())
        with Sandbox(code, tests.limits, tuple(sorted(warm))) as sandbox:
            for number, case in enumerate(cases):
                wrong = _wrong(case, sandbox.run(case.given, called=case.called), tests.limits)
                if wrong:
                    notes = f"test {number + 1} of {len(cases)}: {wrong}"
                    return Score(value=0.0, parts={"tests": number / len(cases)}, notes=notes)
        return Score(value=1.0, parts={"tests": 1.0})


def _wrong(case: Test, ran: Ran, limits: Limits) -> str:
    """The kind of failure, without the expected output: the worker may read it."""
    match ran.ended:
        case "time":
            return f"took longer than {limits.test_cpu_s} s, or {limits.cpu_s} s for all tests"
        case "output":
            return f"printed more than {limits.output_bytes} bytes"
        case "signal":
            return f"crashed (signal {-ran.status})"
        case "error":
            lines = ran.errors.strip().splitlines()
            found = _ERROR.match(lines[-1]) if lines else None  # the last line of the errors may name the exception
            return f"ended with an error ({found[1].decode() if found else f'status {ran.status}'})"
        case "well":
            if case.passed(ran.output, ran.returned):
                return ""
            return "returned another value" if case.called else "printed something else"


# Blocks are fenced as in CommonMark. Also accepted: text before a fence marked as Python, and an open last block.

_OPENING = re.compile(r"(?P<before>[^`~]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_LIST = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]*)*")
_PYTHON = re.compile(r"\{?\s*\.?(?:i?python|pypy|py)[\d.]*(?![\w-])", re.IGNORECASE)
CLOSING_INDENT = 3  # a fence with more indentation belongs to the code, for example to a docstring


def program(completion: str, functions: Collection[str] = ()) -> str:
    """The last block that defines the wanted functions, else the last one. Blocks marked as Python are preferred to
    unmarked ones; other languages are ignored. An interactive session (>>>) is the last choice."""
    found = [block for block in blocks(completion) if block[0].strip()]
    marked = [code for code, info, _closed in found if _PYTHON.match(info)]
    closed = [code for code, info, closed in found if closed and not info]
    plain = closed or [code for code, info, _closed in found if not info]
    for code in (*reversed(marked), *reversed(plain)) if functions else ():
        if all(_defines(code, name) for name in functions):
            return code
    chosen = marked or plain or [""]
    return next((code for code in reversed(chosen) if not code.lstrip().startswith(">>>")), chosen[-1])


def blocks(completion: str) -> Iterator[tuple[str, str, bool]]:
    fence, info, indent, lines = "", "", 0, list[str]()
    for line in completion.replace("\r\n", "\n").split("\n"):
        bare, left = line.strip(), len(line) - len(line.lstrip(" \t"))
        if not fence:
            found = _OPENING.fullmatch(line) if "```" in line or "~~~" in line else None
            begins = found is not None and _LIST.fullmatch(found["before"])
            if found and (begins or _PYTHON.match(found["info"].strip())):
                fence, info, lines = found["fence"], found["info"].strip(), []
                indent = len(found["before"]) if begins else left
        elif len(bare) >= len(fence) and not bare.strip(fence[0]) and left <= indent + CLOSING_INDENT:
            yield dedent("".join(f"{line}\n" for line in lines)), info, True
            fence = ""
        else:
            lines.append(line)
    if fence:
        yield dedent("".join(f"{line}\n" for line in lines)).rstrip("\n") + "\n", info, False


def _defines(code: str, name: str) -> bool:
    quoted = re.escape(name)
    made, imported = rf"{quoted}[ \t]*(?::[^=\n]*)?=(?!=)", rf"(?:from|import)\b[^#\n]*\b{quoted}\b"
    kinds = rf"(?:async[ \t]+)?def[ \t]+{quoted}\b|{made}|{imported}"
    return re.search(rf"^[ \t]*(?:{kinds})", code, re.MULTILINE) is not None
