"""The described schema: problem_id, task_type, prompt, verification_info (a JSON string), solve_rate_…"""

from __future__ import annotations

import ast
import json
from functools import partial

from shoal.environments.formats.protocol import Format, Question, Row, Wanted, need
from shoal.environments.formats.texts import conversation, finite, parsed, required
from shoal.environments.graders.registry import GRADERS, TASK_TYPES
from shoal.errors import UnusableTask

TYPE = "task_type"
INFO = "verification_info"
GOLD = "ground_truth"


def described(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """`task_type` names the grader of each row, unless one is given for all."""
    prompt, info = wanted.question or "prompt", wanted.answer or INFO
    types = () if wanted.grader else (TYPE,)
    need(columns, prompt, info, *types, what="described")
    identifier = wanted.id or ("problem_id" if "problem_id" in columns else "")
    return Format(
        name="described", asks=(prompt, *types), answers=(info,), id=identifier, plain=prompt,
        question=partial(_question, prompt, wanted.grader), answer=partial(_answer, info),
        kinds="" if wanted.grader else TYPE, grader=wanted.grader, judge=kind_of,
    )  # fmt: skip


def kind_of(task_type: object) -> str:
    """The grader of a task type.

    >>> kind_of("verifiable_math")
    'mathematics'
    """
    known = TASK_TYPES.get(task_type, task_type) if isinstance(task_type, str) else None
    if known not in GRADERS:
        known_types = ", ".join([*TASK_TYPES, *GRADERS])
        raise UnusableTask(f"task_type {str(task_type)[:60]!r} is unknown: no grader judges it; known: {known_types}")
    return str(known)


def _question(column: str, grader: str, row: Row) -> Question:
    prompt, history = conversation(row.get(column), column)
    return Question(prompt, grader or kind_of(row.get(TYPE)), history)


def _answer(column: str, row: Row) -> str:
    """The verification info as JSON, which graders read: an object, or a list of test cases."""
    value = row.get(column)
    text = json.dumps(value) if isinstance(value, dict | list) else required(value, column)
    if text.startswith("{'"):
        text = _json_of_literal(text, column)
    info = parsed(text, column)
    if isinstance(info, dict):
        finite(info.get(GOLD), GOLD)
    elif not (isinstance(info, list) and info and all(isinstance(case, dict) for case in info)):
        raise UnusableTask(f"{column} is no JSON object")
    return text


def _json_of_literal(text: str, column: str) -> str:
    """What Python writes for a dictionary, which is how SYNTHETIC-1 has it: read, never run.

    >>> _json_of_literal("{'ground_truth': '42'}", "verification_info")
    '{"ground_truth": "42"}'
    """
    try:
        return json.dumps(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise UnusableTask(f"{column} is neither JSON nor a dictionary as Python writes it") from None
