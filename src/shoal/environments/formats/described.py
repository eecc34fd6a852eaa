"""The described schema: problem_id, task_type, prompt, verification_info (a JSON string), solve_rate_…"""

from __future__ import annotations

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
        kinds="" if wanted.grader else TYPE, grader=wanted.grader,
    )  # fmt: skip


def kind_of(task_type: object) -> str:
    """The grader of a task type.

    >>> kind_of("verifiable_math")
    'mathematics'
    """
    known = TASK_TYPES.get(task_type, task_type) if isinstance(task_type, str) else None
    if known not in GRADERS:
        known_types = ", ".join([*TASK_TYPES, *GRADERS])
        raise UnusableTask(f"task_type {str(task_type)[:60]!r} is unknown; there are {known_types}")
    return str(known)


def _question(column: str, grader: str, row: Row) -> Question:
    prompt, history = conversation(row.get(column), column)
    return Question(prompt, grader or kind_of(row.get(TYPE)), history)


def _answer(column: str, row: Row) -> str:
    """The verification info as it is written: graders read JSON. That it is JSON is checked here."""
    value = row.get(column)
    info = value if isinstance(value, dict) else parsed(required(value, column), column)
    if not isinstance(info, dict):
        raise UnusableTask(f"{column} is no JSON object")
    finite(info.get(GOLD), GOLD)
    return json.dumps(value) if isinstance(value, dict) else str(value)
