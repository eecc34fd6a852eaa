"""GPQA: Question, Correct Answer, Incorrect Answer 1 to 3. The order of the options follows from the row's text."""

from __future__ import annotations

import hashlib

from shoal.environments.formats.protocol import Format, Question, Row, Wanted, first_of, need
from shoal.environments.formats.texts import required
from shoal.errors import UnusableTask

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
        id=wanted.id or first_of(columns, ("record_id", "id")), question=_question, answer=_letter,
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


def _question(row: Row) -> Question:
    question, options = _options(row)
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, ordered(question, options), strict=True))
    return Question(f"{question}\n\n{listed}\n\n{ASK}", "choice")


def _letter(row: Row) -> str:
    question, options = _options(row)
    return LETTERS[ordered(question, options).index(options[0])]
