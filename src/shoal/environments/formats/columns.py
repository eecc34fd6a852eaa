"""Formats by their columns: the described schema; question and answer, whatever they are called; AIME, GPQA, IFEval."""

from __future__ import annotations

import ast
import hashlib
import json
from functools import partial
from typing import Any

from shoal.environments.formats.protocol import (
    Format,
    Row,
    Wanted,
    answer_text,
    final_answer,
    finite,
    first_of,
    need,
    parsed,
    required,
)  # fmt: skip
from shoal.environments.graders.registry import GRADERS, TASK_TYPES
from shoal.errors import EnvironmentSetupError, UnusableTask

IDS = ("problem_id", "id", "task_id", "question_id", "unique_id", "uuid", "key")

TYPE, INFO, GOLD = "task_type", "verification_info", "ground_truth"


def described(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """`task_type` names the grader of each row, unless one is given for all."""
    prompt, info = wanted.question or "prompt", wanted.answer or INFO
    types = () if wanted.grader else (TYPE,)
    need(columns, prompt, info, *types, what="described")
    return Format(
        name="described", asks=(prompt, *types), answers=(info,), plain=prompt, answer=partial(_verification, info),
        id=wanted.id or ("problem_id" if "problem_id" in columns else ""),
        kinds="" if wanted.grader else TYPE, grader=wanted.grader, judge=kind_of,
    )  # fmt: skip


def kind_of(task_type: object) -> str:
    """The grader of a task type."""
    known = TASK_TYPES.get(task_type, task_type) if isinstance(task_type, str) else None
    if known not in GRADERS:
        known_types = ", ".join([*TASK_TYPES, *GRADERS])
        raise UnusableTask(f"task_type {str(task_type)[:60]!r} is unknown: no grader judges it; known: {known_types}")
    return str(known)


def _verification(column: str, row: Row) -> str:
    """The verification info as JSON, which graders read: an object, or a list of test cases."""
    value = row.get(column)
    text = json.dumps(value) if isinstance(value, dict | list) else required(value, column)
    if text.startswith("{'"):  # as Python writes a dictionary, which is how SYNTHETIC-1 has it: read, never run
        try:
            text = json.dumps(ast.literal_eval(text))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise UnusableTask(f"{column} is neither JSON nor a dictionary as Python writes it") from None
    info = parsed(text, column)
    if isinstance(info, dict):
        finite(info.get(GOLD), GOLD)
    elif not (isinstance(info, list) and info and all(isinstance(case, dict) for case in info)):
        raise UnusableTask(f"{column} is no JSON object")
    return text


QUESTIONS = ("problem", "question", "prompt", "instruction", "query", "input", "messages")
ANSWERS = (
    "answer", "final_answer", "ground_truth", "expected_answer", "gold", "target", "label", "solution", "output",
    "reward_model",
)  # fmt: skip
KINDS = ("question_type", "problem_type", "ability")
"""Columns that say of which kind a row is: those of NuminaMath and Eurus-2-RL-Data."""
AIME_LARGEST = 999


def columns_format(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The first usual name that is there; which it should be can be said: options.question and options.answer."""
    question = _chosen(columns, wanted.question, QUESTIONS, "question")
    answer = _chosen(columns, wanted.answer, ANSWERS, "answer")
    grader, kinds = wanted.grader or "mathematics", "" if wanted.grader else first_of(columns, KINDS)
    return Format(
        name="columns", asks=(question, *((kinds,) if kinds else ())), answers=(answer,), plain=question,
        id=wanted.id or first_of(columns, IDS), answer=partial(_answer, answer, grader), kinds=kinds,
        grader="" if kinds else grader, judge=partial(_judge, kinds, grader),
    )  # fmt: skip


def aime(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """`problem`/`answer`, `Problem`/`Answer`, `question`/`answer`: the answer is a whole number from 0 to 999."""
    question = _chosen(columns, wanted.question, QUESTIONS[:3], "question")
    answer = _chosen(columns, wanted.answer, ANSWERS[:4], "answer")
    return Format(
        name="aime", asks=(question,), answers=(answer,), id=wanted.id or first_of(columns, IDS), plain=question,
        answer=partial(_whole_number, answer), grader="mathematics",
    )  # fmt: skip


def _chosen(columns: tuple[str, ...], given: str, usual: tuple[str, ...], what: str) -> str:
    if given and given not in columns:
        raise EnvironmentSetupError(f"there is no column {given!r} for the {what}; there are {', '.join(columns)}")
    found = given or first_of(columns, usual)
    if not found:
        raise EnvironmentSetupError(
            f"which column is the {what}? there are {', '.join(columns)}; set environment.options.{what}"
        )
    return found


def _judge(column: str, grader: str, kind: object) -> str:
    """Who grades a kind of rows: kinds that mean nothing here are graded like rows without one."""
    word = str(kind).strip().lower()
    if word == "proof":
        raise UnusableTask(f"{column} is 'proof': no grader judges proofs")
    return "code" if word in ("code", "coding") else grader


def _answer(column: str, grader: str, row: Row) -> str:
    """Of a list of answers to a question of mathematics, any one is right."""
    value, mathematics = row.get(column), grader in ("mathematics", "math-verify")
    if isinstance(value, list) and mathematics:
        return json.dumps({"answers": value})
    text = answer_text(value, column)
    return final_answer(text) if mathematics and column.lower() in ("answer", "solution") else text


def _whole_number(column: str, row: Row) -> str:
    text = answer_text(row.get(column), column).strip()
    if not (text.isascii() and text.isdecimal() and int(text) <= AIME_LARGEST):
        raise UnusableTask(f"{column} is {text[:40]!r}, not a whole number from 0 to {AIME_LARGEST}")
    return str(int(text))


GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ASK = "Which option is right? End with a line of the form: Answer: X, where X is one of A, B, C and D."


def gpqa(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """One right and three wrong options, which are called A to D."""
    need(columns, *GPQA, what="gpqa")
    return Format(
        name="gpqa", asks=GPQA, answers=GPQA, grader="choice", id=wanted.id or first_of(columns, ("record_id", "id")),
        write=_options_prompt, answer=lambda row: "ABCD"[_options(row)[2]],
    )  # fmt: skip


def _options(row: Row) -> tuple[str, list[str], int]:
    """The question, its options by their hash with it (no place is likelier to be right), and which is right."""
    question, right, *wrong = (required(row.get(column), column).strip() for column in GPQA)
    options = sorted(
        (right, *wrong), key=lambda text: hashlib.sha256(f"shoal/gpqa/v1\n{question}\n{text}".encode()).digest()
    )
    if len(set(options)) != len(options):
        raise UnusableTask("two of its options are the same")
    return question, options, options.index(right)


def _options_prompt(row: Row) -> str:
    question, options, _right = _options(row)
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", options, strict=True))
    return f"{question}\n\n{listed}\n\n{ASK}"


NAMES, SETTINGS = "instruction_id_list", "kwargs"


def ifeval(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The answer is the list of instructions, each with its settings; whether they are possible, the grader knows."""
    prompt = wanted.question or "prompt"
    need(columns, prompt, NAMES, SETTINGS, what="ifeval")
    return Format(
        name="ifeval", asks=(prompt,), answers=(NAMES, SETTINGS), plain=prompt, grader="instructions",
        id=wanted.id or first_of(columns, ("key", "id")), answer=_instructions,
    )  # fmt: skip


def _instructions(row: Row) -> str:
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
