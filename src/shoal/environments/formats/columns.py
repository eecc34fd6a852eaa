"""Question and answer columns, whatever they are called; and AIME, which is that with whole numbers from 0 to 999."""

from __future__ import annotations

from functools import partial

from shoal.environments.formats.protocol import Format, Question, Row, Wanted, first_of
from shoal.environments.formats.texts import answer_text, conversation, final_answer
from shoal.errors import EnvironmentSetupError, UnusableTask

QUESTIONS = ("problem", "question", "prompt", "instruction", "query", "input", "messages")
ANSWERS = ("answer", "final_answer", "ground_truth", "expected_answer", "gold", "target", "label", "solution", "output")
IDS = ("problem_id", "id", "task_id", "question_id", "unique_id", "uuid", "key")
WORKED = ("answer", "solution")
AIME_LARGEST = 999


def columns_format(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The first usual name that is there; which it should be can be said: options.question and options.answer."""
    question = _chosen(columns, wanted.question, QUESTIONS, "question")
    answer = _chosen(columns, wanted.answer, ANSWERS, "answer")
    grader = wanted.grader or "mathematics"
    return Format(
        name="columns", asks=(question,), answers=(answer,), id=wanted.id or first_of(columns, IDS), plain=question,
        question=partial(_question, question, grader), answer=partial(_answer, answer, grader), grader=grader,
    )  # fmt: skip


def aime(columns: tuple[str, ...], wanted: Wanted) -> Format:
    """`problem`/`answer`, `Problem`/`Answer`, `question`/`answer`: the answer is a whole number from 0 to 999."""
    question = _chosen(columns, wanted.question, ("problem", "question", "prompt"), "question")
    answer = _chosen(columns, wanted.answer, ("answer", "final_answer", "ground_truth", "expected_answer"), "answer")
    return Format(
        name="aime", asks=(question,), answers=(answer,), id=wanted.id or first_of(columns, IDS), plain=question,
        question=partial(_question, question, "mathematics"), answer=partial(_whole_number, answer),
        grader="mathematics",
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


def _question(column: str, grader: str, row: Row) -> Question:
    prompt, history = conversation(row.get(column), column)
    return Question(prompt, grader, history)


def _answer(column: str, grader: str, row: Row) -> str:
    text = answer_text(row.get(column), column)
    return final_answer(text) if grader == "mathematics" and column.lower() in WORKED else text


def _whole_number(column: str, row: Row) -> str:
    text = answer_text(row.get(column), column).strip()
    if not (text.isascii() and text.isdecimal() and int(text) <= AIME_LARGEST):
        raise UnusableTask(f"{column} is {text[:40]!r}, not a whole number from 0 to {AIME_LARGEST}")
    return str(int(text))
