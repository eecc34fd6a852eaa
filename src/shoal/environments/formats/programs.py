"""Programming problems: LiveCodeBench, and those with one column of tests (APPS, TACO, DeepCoder and others).

LiveCodeBench's private tests are JSON text, or that text packed as base64 of zlib of a *pickled* string. A pickle is a
program, and is never run here: its instructions are listed, and one that does anything but hold one text is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from functools import partial
from typing import Any

from shoal.environments.formats.columns import IDS
from shoal.environments.formats.protocol import Format, Row, Wanted, answer_text, first_of, need, parsed, required
from shoal.errors import UnusableTask

PUBLIC, PRIVATE, STARTER, METADATA = "public_test_cases", "private_test_cases", "starter_code", "metadata"
TESTS = ("input_output", "tests", "test_cases", "official_tests")
QUESTIONS = ("problem", "question", "prompt", "description")
UNPACKED_LIMIT_BYTES = 256 * 2**20
HARMLESS = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
ASK = "Write a Python program that reads standard input and prints the answer, in a ```python block."
ASK_STARTER = "Complete this Python code so that it solves the problem, and put all of it in a ```python block:"


def code(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The tests are in any spelling that the code grader reads; a program is asked for, or starter code completed."""
    question = wanted.question or first_of(columns, QUESTIONS) or QUESTIONS[0]
    tests = wanted.answer or first_of(columns, TESTS) or TESTS[0]
    need(columns, question, tests, what="code")
    return Format(
        name="code", asks=tuple(name for name in (question, STARTER) if name in columns),
        answers=tuple(name for name in (tests, METADATA) if name in columns), id=wanted.id or first_of(columns, IDS),
        write=partial(_prompt, question), answer=partial(_tests, tests), grader="code",
    )  # fmt: skip


def livecodebench(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """Programs are read from standard input, or called by name where there is starter code (metadata.func_name)."""
    question = wanted.question or first_of(columns, ("question_content", "question", "prompt")) or "question_content"
    need(columns, question, *(() if PRIVATE in columns else (PUBLIC,)), what="livecodebench")
    return Format(
        name="livecodebench", asks=tuple(name for name in (question, STARTER) if name in columns),
        answers=tuple(name for name in (PUBLIC, PRIVATE, METADATA) if name in columns), grader="code",
        id=wanted.id or first_of(columns, ("question_id", "problem_id", "task_id", "id")),
        write=partial(_prompt, question), answer=_cases_answer,
    )  # fmt: skip


def _prompt(column: str, row: Row) -> str:
    """The problem, and what is asked for: a program, or its starter code completed."""
    content, starter = required(row.get(column), column), row.get(STARTER) or ""
    if not isinstance(starter, str):
        raise UnusableTask(f"{STARTER} is {type(starter).__name__}, not text")
    asked = f"{ASK_STARTER}\n\n```python\n{starter.rstrip()}\n```" if starter.strip() else ASK
    return f"{content.rstrip()}\n\n{asked}"


def _tests(column: str, row: Row) -> str:
    return json.dumps({"test_cases": answer_text(row.get(column), column), METADATA: row.get(METADATA)})


def _cases_answer(row: Row) -> str:
    """In the data set's own spelling, which the code grader reads, but for what was packed."""
    return json.dumps(
        {METADATA: row.get(METADATA), **{column: _cases(row.get(column), column) for column in (PUBLIC, PRIVATE)}}
    )


def _cases(value: object, column: str) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
        value = unpacked(value, column)
    cases = parsed(value, column)
    if not isinstance(cases, list):
        raise UnusableTask(f"{column} is no list of test cases")
    return cases


def unpacked(text: str, column: str) -> str:
    """The text in base64 of zlib of a pickled string, without running the pickle."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), UNPACKED_LIMIT_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise UnusableTask(f"{column} is neither JSON nor packed JSON ({error})") from None
    if not inflater.eof:
        raise UnusableTask(f"{column} is cut off, or unpacks to more than {UNPACKED_LIMIT_BYTES // 2**20} MB")
    if data[:1] in (b"[", b"{"):
        return data.decode(errors="replace")
    texts: list[str] = []
    try:
        for operation, argument, _position in pickletools.genops(data):
            if operation.name in TEXTS:
                texts.append(str(argument))
            elif operation.name not in HARMLESS:
                raise UnusableTask(f"{column} holds a pickle of more than a text ({operation.name}): it is not run")
    except ValueError as error:
        raise UnusableTask(f"{column} is no JSON, packed or not ({str(error)[:80]})") from None
    if len(texts) != 1:
        raise UnusableTask(f"{column} holds a pickle of {len(texts)} texts instead of one: it is not used")
    return texts[0]
