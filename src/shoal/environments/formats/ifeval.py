"""IFEval: key, prompt, instruction_id_list, kwargs."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from shoal.environments.formats.protocol import Format, Question, Row, Wanted, first_of, need
from shoal.environments.formats.texts import conversation, parsed
from shoal.errors import UnusableTask

NAMES, SETTINGS = "instruction_id_list", "kwargs"


def ifeval(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The answer is the list of instructions, each with its settings; whether they are possible, the grader knows."""
    prompt = wanted.question or "prompt"
    need(columns, prompt, NAMES, SETTINGS, what="ifeval")
    return Format(
        name="ifeval", asks=(prompt,), answers=(NAMES, SETTINGS), plain=prompt, grader="instructions",
        id=wanted.id or first_of(columns, ("key", "id")), question=partial(_question, prompt), answer=_answer,
    )  # fmt: skip


def _question(column: str, row: Row) -> Question:
    prompt, history = conversation(row.get(column), column)
    return Question(prompt, "instructions", history)


def _answer(row: Row) -> str:
    names, settings = parsed(row.get(NAMES), NAMES), parsed(row.get(SETTINGS), SETTINGS)
    if not isinstance(names, list) or not isinstance(settings, list) or len(names) != len(settings) or not names:
        raise UnusableTask(f"{NAMES} and {SETTINGS} must be lists of one length")
    return json.dumps({"instructions": [_instruction(*pair) for pair in zip(names, settings, strict=True)]})


def _instruction(name: object, settings: object) -> dict[str, Any]:
    """Columnar files hold every setting of every instruction; those that are null were never given."""
    given = parsed(settings, SETTINGS) if settings is not None else {}
    if not isinstance(name, str) or not isinstance(given, dict):
        raise UnusableTask(f"{NAMES} must hold names, and {SETTINGS} mappings")
    return {"id": name, "settings": {key: value for key, value in given.items() if value is not None}}
