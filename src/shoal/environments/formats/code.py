"""Programming problems with one column of tests: APPS and TACO (`input_output`), DeepCoder (`tests`), and others."""

from __future__ import annotations

import json
from functools import partial

from shoal.environments.formats.columns import IDS
from shoal.environments.formats.livecodebench import METADATA, STARTER, question_of
from shoal.environments.formats.protocol import Format, Row, Wanted, first_of, need
from shoal.environments.formats.texts import answer_text

TESTS = ("input_output", "tests", "test_cases", "official_tests")
QUESTIONS = ("problem", "question", "prompt", "description")


def code(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The tests are in any spelling that the code grader reads; a program is asked for, or starter code completed."""
    question = wanted.question or first_of(columns, QUESTIONS) or QUESTIONS[0]
    tests = wanted.answer or first_of(columns, TESTS) or TESTS[0]
    need(columns, question, tests, what="code")
    return Format(
        name="code", asks=tuple(name for name in (question, STARTER) if name in columns),
        answers=tuple(name for name in (tests, METADATA) if name in columns), id=wanted.id or first_of(columns, IDS),
        question=partial(question_of, question), answer=partial(_answer, tests), grader="code",
    )  # fmt: skip


def _answer(column: str, row: Row) -> str:
    return json.dumps({"test_cases": answer_text(row.get(column), column), METADATA: row.get(METADATA)})
