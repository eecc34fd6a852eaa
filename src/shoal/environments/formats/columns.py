"""Question and answer columns, whatever they are called; and AIME, which is that with whole numbers from 0 to 999."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.environments.formats.protocol import (
    Format,
    Question,
    Row,
    Wanted,
    answer_text,
    conversation,
    final_answer,
    finite,
    first_of,
    need,
    parsed,
    required,
)
from shoal.environments.graders.registry import GRADERS, TASK_TYPES
from shoal.errors import EnvironmentSetupError, UnusableTask

QUESTIONS = ("problem", "question", "prompt", "instruction", "query", "input", "messages")
ANSWERS = (
    "answer", "final_answer", "ground_truth", "expected_answer", "gold", "target", "label", "solution", "output",
    "reward_model",
)  # fmt: skip
KINDS = ("question_type", "problem_type", "ability")
"""Columns that say of which kind a row is: those of NuminaMath and Eurus-2-RL-Data."""
BY_KIND = {"code": "code", "coding": "code"}
IDS = ("problem_id", "id", "task_id", "question_id", "unique_id", "uuid", "key")
WORKED = ("answer", "solution")
AIME_LARGEST = 999


def columns_format(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The first usual name that is there; which it should be can be said: options.question and options.answer."""
    question = _chosen(columns, wanted.question, QUESTIONS, "question")
    answer = _chosen(columns, wanted.answer, ANSWERS, "answer")
    grader, kinds = wanted.grader or "mathematics", "" if wanted.grader else first_of(columns, KINDS)
    judge = partial(_judge, kinds, grader)
    return Format(
        name="columns", asks=(question, *((kinds,) if kinds else ())), answers=(answer,), plain=question,
        id=wanted.id or first_of(columns, IDS), question=partial(_question, question, judge, kinds),
        answer=partial(_answer, answer, grader), kinds=kinds, grader="" if kinds else grader, judge=judge,
    )  # fmt: skip


def aime(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """`problem`/`answer`, `Problem`/`Answer`, `question`/`answer`: the answer is a whole number from 0 to 999."""
    question = _chosen(columns, wanted.question, ("problem", "question", "prompt"), "question")
    answer = _chosen(columns, wanted.answer, ("answer", "final_answer", "ground_truth", "expected_answer"), "answer")
    return Format(
        name="aime", asks=(question,), answers=(answer,), id=wanted.id or first_of(columns, IDS), plain=question,
        question=partial(_question, question, partial(_judge, "", "mathematics"), ""),
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
    if column and word == "proof":
        raise UnusableTask(f"{column} is 'proof': no grader judges proofs")
    return BY_KIND.get(word, grader) if column else grader


def _question(column: str, judge: Callable[[object], str], kinds: str, row: Row) -> Question:
    prompt, history = conversation(row.get(column), column)
    return Question(prompt, judge(row.get(kinds)), history)


def _answer(column: str, grader: str, row: Row) -> str:
    """Of a list of answers to a question of mathematics, any one is right."""
    value, mathematics = row.get(column), grader in ("mathematics", "math-verify")
    if isinstance(value, list) and mathematics:
        return json.dumps({"answers": value})
    text = answer_text(value, column)
    return final_answer(text) if mathematics and column.lower() in WORKED else text


def _whole_number(column: str, row: Row) -> str:
    text = answer_text(row.get(column), column).strip()
    if not (text.isascii() and text.isdecimal() and int(text) <= AIME_LARGEST):
        raise UnusableTask(f"{column} is {text[:40]!r}, not a whole number from 0 to {AIME_LARGEST}")
    return str(int(text))


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
        question=partial(_described_question, prompt, wanted.grader), answer=partial(_verification, info),
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


def _described_question(column: str, grader: str, row: Row) -> Question:
    prompt, history = conversation(row.get(column), column)
    return Question(prompt, grader or kind_of(row.get(TYPE)), history)


def _verification(column: str, row: Row) -> str:
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


QUESTION, CORRECT = "Question", "Correct Answer"
INCORRECT = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
LETTERS = "ABCD"
ASK = "Which option is right? End with a line of the form: Answer: X, where X is one of A, B, C and D."


def gpqa(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """Options A to D in an order that the text alone fixes, so that everybody has the same letter."""
    need(columns, QUESTION, CORRECT, *INCORRECT, what="gpqa")
    everything = (QUESTION, CORRECT, *INCORRECT)
    return Format(
        name="gpqa", asks=everything, answers=everything, grader="choice",
        id=wanted.id or first_of(columns, ("record_id", "id")), question=_gpqa_question, answer=_letter,
    )  # fmt: skip


def ordered(question: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """The options by their hash with the question: no place is likelier to be right."""
    return tuple(
        sorted(options, key=lambda text: hashlib.sha256(f"shoal/gpqa/v1\n{question}\n{text}".encode()).digest())
    )


def _options(row: Row) -> tuple[str, tuple[str, ...]]:
    question = required(row.get(QUESTION), QUESTION).strip()
    options = tuple(required(row.get(column), column).strip() for column in (CORRECT, *INCORRECT))
    if len(set(options)) != len(options):
        raise UnusableTask("two of its options are the same")
    return question, options


def _gpqa_question(row: Row) -> Question:
    question, options = _options(row)
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, ordered(question, options), strict=True))
    return Question(f"{question}\n\n{listed}\n\n{ASK}", "choice")


def _letter(row: Row) -> str:
    question, options = _options(row)
    return LETTERS[ordered(question, options).index(options[0])]


NAMES, SETTINGS = "instruction_id_list", "kwargs"


def ifeval(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The answer is the list of instructions, each with its settings; whether they are possible, the grader knows."""
    prompt = wanted.question or "prompt"
    need(columns, prompt, NAMES, SETTINGS, what="ifeval")
    return Format(
        name="ifeval", asks=(prompt,), answers=(NAMES, SETTINGS), plain=prompt, grader="instructions",
        id=wanted.id or first_of(columns, ("key", "id")),
        question=partial(_ifeval_question, prompt), answer=_instructions,
    )  # fmt: skip


def _ifeval_question(column: str, row: Row) -> Question:
    prompt, history = conversation(row.get(column), column)
    return Question(prompt, "instructions", history)


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
