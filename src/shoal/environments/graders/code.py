"""A Python program against tests: worth 1 if it passes all of them, 0 otherwise.

    completion ── its program, after the thinking ──► Sandbox ── test by test: input in, output out ──► compared

Expected outputs never enter the sandbox. The first test that fails ends the grading.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

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
    version: ClassVar[int] = 4

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
        with Sandbox(code, tests.limits, _warm(code, calls=any(case.called for case in cases))) as sandbox:
            for number, case in enumerate(cases):
                wrong = _wrong(case, sandbox.run(case.given, called=case.called), tests.limits)
                if wrong:
                    notes = f"test {number + 1} of {len(cases)}: {wrong}"
                    return Score(value=0.0, parts={"tests": number / len(cases)}, notes=notes)
        return Score(value=1.0, parts={"tests": 1.0})


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
            lines = ran.errors.strip().splitlines()
            found = _ERROR.match(lines[-1]) if lines else None  # the last line of the errors may name the exception
            return f"ended with an error ({found[1].decode() if found else f'status {ran.status}'})"
        case "well":
            if case.passed(ran.output, ran.returned):
                return ""
            return "returned another value" if case.called else "printed something else"


def _warm(code: bytes, *, calls: bool) -> tuple[str, ...]:
    """Modules that the program is going to import, as far as they are known to be harmless."""
    named = _IMPORTED.findall(code.decode("utf-8", errors="replace"))
    words = {word.strip().partition(".")[0] for names in named for word in names.split(",")}
    mentioned = {word.split()[0] for word in words if word.split()}
    return tuple(sorted((mentioned & WARM) | set(WARM_FOR_CALLS if calls else ())))


# The blocks of code in a completion, fenced as CommonMark has it, and with what models do besides: text before a fence
# that is marked as Python, a closing fence at the end of the last line of code, a last block that is not closed

_OPENING = re.compile(r"(?P<before>[ \t]*(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]*)*)(?P<fence>`{3,}|~{3,})(?P<info>.*)")
_AFTER_TEXT = re.compile(r"(?P<before>[^`~]+)(?P<fence>`{3,}|~{3,})(?P<info>.*)")
_PYTHON = re.compile(r"\{?\s*\.?(?:i?python|pypy|py)[\d.]*(?![\w-])", re.IGNORECASE)
_QUOTED = re.compile(r"[ \t]{0,3}>[ ]?")
CLOSING_INDENT = 3
"""A fence that is indented by more closes nothing: it is in the code, most likely in a docstring."""


@dataclass
class Block:
    """A block while it is read. `code` has neither the list's indentation nor the quotation's marks.

    `indent` is how far the fence itself is indented, and `quotes` how many quotations it is in.
    """

    fence: str
    python: bool
    unmarked: bool
    indent: int
    quotes: int
    lines: list[str] = field(default_factory=list)
    closed: bool = False
    _in_text: dict[str, bool] = field(default_factory=lambda: {'"""': False, "'''": False})

    @property
    def code(self) -> str:
        first = next((line for line in self.lines if line.strip()), "")
        width = min(self.indent, _indent(first))
        return "".join(line[min(width, _indent(line)) :] + "\n" for line in self.lines)

    def add(self, line: str) -> None:
        for _ in range(self.quotes):
            line = _QUOTED.sub("", line, count=1)
        bare = line.strip()
        if self._closes(bare) and _indent(line) <= self.indent + CLOSING_INDENT:
            self.closed = True
            return
        for quote in self._in_text:
            self._in_text[quote] ^= line.count(quote) % 2 == 1
        code = bare.rstrip(self.fence[0])
        ends = self._closes(bare[len(code) :]) and self.fence[0] not in code and "#" not in code
        if ends and not any(self._in_text.values()):
            line = line.rstrip()[: len(code) - len(bare)]
            self.closed = True
        self.lines.append(line)

    def _closes(self, text: str) -> bool:
        return len(text) >= len(self.fence) and not text.strip(self.fence[0])


def program(completion: str, functions: Collection[str] = ()) -> str:
    """The program: the last block that defines the functions, if some are wanted; otherwise the last one.

    Blocks that are marked as Python go before those that are not marked at all; others are none. A session of an
    interpreter (>>>) is taken only where there is nothing else.
    """
    found = [block for block in blocks(completion) if block.code.strip()]
    marked = [block.code for block in found if block.python]
    plain = [block.code for block in found if block.unmarked and block.closed]
    plain = plain or [block.code for block in found if block.unmarked]
    if functions:
        for code in (*reversed(marked), *reversed(plain)):
            if all(defines(code, name) for name in functions):
                return code
    chosen = marked or plain or [""]
    return next((code for code in reversed(chosen) if not code.lstrip().startswith(">>>")), chosen[-1])


def blocks(completion: str) -> Iterator[Block]:
    block: Block | None = None
    for line in completion.replace("\r\n", "\n").split("\n"):
        if block is None:
            block = _opened(line)
            continue
        block.add(line)
        if block.closed:
            yield block
            block = None
    if block is not None:
        if block.lines and not block.lines[-1]:
            block.lines.pop()
        yield block


def defines(code: str, name: str) -> bool:
    """Whether it looks as if the code defined this name: a function, a method, an assignment or an import."""
    quoted = re.escape(name)
    kinds = (
        rf"(?:async[ \t]+)?def[ \t]+{quoted}\b|{quoted}[ \t]*(?::[^=\n]*)?=(?!=)|(?:from|import)\b[^#\n]*\b{quoted}\b"
    )
    return re.search(rf"^[ \t]*(?:{kinds})", code, re.MULTILINE) is not None


def _opened(line: str) -> Block | None:
    if "```" not in line and "~~~" not in line:
        return None
    found = _OPENING.fullmatch(line)
    if found is None:
        found = _AFTER_TEXT.fullmatch(line)
        if found is None or not _PYTHON.match(found["info"].strip()):
            return None
    before, fence, info = found["before"], found["fence"], found["info"].strip()
    if "`" in info:
        return None  # code within a line
    begins_line = found.re is _OPENING
    indent = len(before.rpartition(">")[2]) if begins_line else _indent(line)
    quotes = before.count(">") if begins_line else 0
    return Block(fence, bool(_PYTHON.match(info)), not info, indent, quotes)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))
