"""Question and answer columns, whatever they are called; and AIME, which is that with whole numbers from 0 to 999."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from shoal.environments.formats.protocol import Format, Question, Row, Wanted, first_of
from shoal.environments.formats.texts import answer_text, conversation, final_answer
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
