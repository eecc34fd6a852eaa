"""How a row of a data set becomes a question and its answer: the known formats, and which one fits the columns.

    columns ─► fit ─► Format: question columns, answer columns ─► Question (prompt, history, grader), answer

LiveCodeBench's private tests are JSON text, or that text as base64 of zlib of a *pickled* string. The pickle is never
executed: its instructions are listed, and a pickle that does more than hold one text is refused.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import math
import pickletools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from shoal.environments.graders import GRADERS, TASK_TYPES
from shoal.environments.graders.mathematics.answer import final_answer
from shoal.environments.settings import Table
from shoal.errors import EnvironmentSetupError, UnusableTask

Row = Mapping[str, Any]
Messages = tuple[tuple[str, str], ...]
Names = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """The user's last message, the messages before it, and the grader of the answer."""

    prompt: str
    kind: str
    history: Messages = ()


@dataclass(frozen=True)
class Format:
    """How a row becomes a task. `question` and `answer` raise `UnusableTask` with the reason where a row does not fit.

    `asks` and `answers` are the columns of questions and of answers, so questions can be read alone. The prompt is the
    column `plain` (a text, or a conversation), or `write` makes it from a row. `grader` is that of all rows; without it
    `judge` maps the kind in column `kinds` to a grader, or raises."""

    name: str
    asks: Names
    answers: Names
    answer: Callable[[Row], str]
    id: str = ""
    plain: str = ""
    write: Callable[[Row], str] | None = None
    kinds: str = ""
    grader: str = ""
    judge: Callable[[object], str] = str

    def question(self, row: Row) -> Question:
        if self.write is not None:
            return Question(self.write(row), self.grader)
        prompt, history = conversation(row.get(self.plain), self.plain)
        return Question(prompt, self.grader or self.judge(row.get(self.kinds)), history)

    @property
    def columns(self) -> Names:
        return tuple(dict.fromkeys((*((self.id,) if self.id else ()), *self.asks, *self.answers)))

    @property
    def signature(self) -> str:
        """Two formats with the same signature give the same tasks."""
        return json.dumps((self.name, self.asks, self.answers, self.id, self.plain, self.kinds, self.grader))


class ChatMessage(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


MESSAGES = TypeAdapter(list[ChatMessage])


def conversation(value: object, column: str) -> tuple[str, Messages]:
    if isinstance(value, str):
        return required(value, column), ()
    messages = messages_of(value, column)
    if not messages or messages[-1][0] != "user":
        raise UnusableTask(f"{column} must end with a message of the user")
    return required(messages[-1][1], column), messages[:-1]


def messages_of(value: object, column: str) -> Messages:
    """A list of messages as (role, text); a system message is the first or none."""
    if value is None:
        raise UnusableTask(f"{column} is missing")
    try:
        messages = tuple((message.role, message.content) for message in MESSAGES.validate_python(value))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UnusableTask(f"{column} is neither text nor messages: {where}: {first['msg']}") from None
    if any(role == "system" for role, _text in messages[1:]):
        raise UnusableTask(f"{column} has a system message that is not its first")
    return messages


def required(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise UnusableTask(f"{column} is " + ("missing" if value is None else f"{type(value).__name__}, not text"))
    if not value.strip():
        raise UnusableTask(f"{column} is empty")
    return value


def answer_text(value: object, column: str) -> str:
    """As written, or as JSON. A boolean is refused: an answer could write it in many ways (yes, True, correct)."""
    if isinstance(value, bool):
        raise UnusableTask(f"{column} is {json.dumps(value)}, neither text nor a number: write it as text")
    if isinstance(value, float):
        finite(value, column)
        return str(int(value)) if value.is_integer() else repr(value)
    return json.dumps(value) if isinstance(value, int | list | dict) else required(value, column)


def finite(value: object, column: str) -> None:
    """Refuse NaN and infinity: as text, `nan` would look like an answer."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableTask(f"{column} is {value}, which is NaN or infinite")


def parsed(value: object, column: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str | bytes) else value
    except (ValueError, RecursionError) as error:
        raise UnusableTask(f"{column} is no JSON: {' '.join(str(error).split())[:120]}") from None


def need(columns: Names, *names: str, what: str) -> None:
    if missing := [name for name in names if name not in columns]:
        raise EnvironmentSetupError(f"the format {what} needs the columns {', '.join(missing)}: {', '.join(columns)}")


def first_of(columns: Names, names: Names) -> str:
    """The first of `names` that is a column, in any case; empty if none is."""
    spelled = {column.lower().replace(" ", "_"): column for column in reversed(columns)}
    return next((spelled[name] for name in names if name in spelled), "")


def _chosen(columns: Names, given: str, usual: Names, what: str) -> str:
    found = given or first_of(columns, usual)
    if found not in columns:
        problem = f"there is no column {given!r} for the {what}" if given else f"no column is known to be the {what}"
        raise EnvironmentSetupError(f"{problem}; there are {', '.join(columns)}: set environment.options.{what}")
    return found


IDS = ("problem_id", "id", "task_id", "question_id", "unique_id", "uuid", "key")
TYPE, INFO, GOLD = "task_type", "verification_info", "ground_truth"


def described(columns: Names, wanted: DatasetOptions) -> Format:
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
    known = TASK_TYPES.get(task_type, task_type) if isinstance(task_type, str) else None
    if known not in GRADERS:
        problem = "is missing" if task_type is None else f"{str(task_type)[:60]!r} is unknown"
        raise UnusableTask(f"task_type {problem}: no grader judges it")
    return str(known)


def known_kinds(problem: str) -> str:
    ways = f"known are {', '.join([*TASK_TYPES, *GRADERS])}; one for all rows: --set environment.options.grader=NAME"
    return f" ({ways})" if "task_type" in problem else ""


def _verification(column: str, row: Row) -> str:
    """The verification info as JSON, which graders read: an object, or a list of test cases."""
    value = row.get(column)
    text = json.dumps(value) if isinstance(value, dict | list) else required(value, column)
    if text.lstrip().startswith(("{'", "[{'")):  # a Python literal, as in SYNTHETIC-1: parsed, never executed
        try:
            text = json.dumps(ast.literal_eval(text.strip()))
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
WORKED = ("####", "\\boxed", "\\fbox")
"""Marks of the final answer in a worked solution."""
LONGEST_BARE = 300
"""Most characters of a solution that is used as the answer without such a mark; proofs and programs are longer."""
KINDS = ("question_type", "problem_type", "ability")
"""Columns with the kind of a row, in NuminaMath and Eurus-2-RL-Data."""
AIME_LARGEST = 999
MISSING = frozenset({"n/a", "na", "none", "null", "nan", "?", "-", "unknown"})


def columns_format(columns: Names, wanted: DatasetOptions) -> Format:
    question = _chosen(columns, wanted.question, QUESTIONS, "question")
    answer = _chosen(columns, wanted.answer, ANSWERS, "answer")
    grader, kinds = wanted.grader or "mathematics", "" if wanted.grader else first_of(columns, KINDS)
    return Format(
        name="columns", asks=(question, *((kinds,) if kinds else ())), answers=(answer,), plain=question,
        id=wanted.id or first_of(columns, IDS), answer=partial(_answer, answer, grader), kinds=kinds,
        grader="" if kinds else grader, judge=partial(_judge, kinds, grader),
    )  # fmt: skip


def _judge(column: str, grader: str, kind: object) -> str:
    """The grader of a kind; rows of an unknown kind are graded like rows without one."""
    word = str(kind).strip().lower()
    if word == "proof":
        raise UnusableTask(f"{column} is 'proof': no grader judges proofs")
    return "code" if word in ("code", "coding") else grader


def _answer(column: str, grader: str, row: Row) -> str:
    """The answer as text. In mathematics each answer of a list is right."""
    value, mathematics = row.get(column), grader in ("mathematics", "math-verify")
    if isinstance(value, list) and mathematics:
        return json.dumps({"answers": value})
    text = answer_text(value, column)
    if mathematics and text.strip().lower() in MISSING:
        raise UnusableTask(f"{column} is {text.strip()!r}, which says that there is no answer")
    if not mathematics or column.lower() not in ("answer", "solution"):
        return text
    if any(mark in text for mark in WORKED):
        return final_answer(text) or text
    if column.lower() == "solution" and len(text) > LONGEST_BARE and "answer is" not in text:
        raise UnusableTask(f"{column} is long and ends in no answer (\\boxed{{}} or ####) to compare with")
    return text


def aime(columns: Names, wanted: DatasetOptions) -> Format:
    layout = columns_format(columns, wanted.model_copy(update={"grader": "mathematics"}))
    (answer,) = layout.answers

    def whole_number(row: Row) -> str:
        text = answer_text(row.get(answer), answer).strip()
        if not (text.isascii() and text.isdecimal() and int(text) <= AIME_LARGEST):
            raise UnusableTask(f"{answer} is {text[:40]!r}, not a whole number from 0 to {AIME_LARGEST}")
        return str(int(text))

    return replace(layout, name="aime", answer=whole_number)


GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ASK_OPTION = "Which option is right? End with a line of the form: Answer: X, where X is one of A, B, C and D."


def gpqa(columns: Names, wanted: DatasetOptions) -> Format:
    """One right and three wrong options, named A to D in the order of their hashes, so no letter is more likely."""
    need(columns, *GPQA, what="gpqa")

    def options(row: Row) -> tuple[str, list[str], int]:
        question, right, *wrong = (required(row.get(column), column).strip() for column in GPQA)
        label = f"shoal/gpqa/v1\n{question}\n"
        listed = sorted((right, *wrong), key=lambda text: hashlib.sha256(f"{label}{text}".encode()).digest())
        if len(set(listed)) != len(listed):
            raise UnusableTask("two of its options are the same")
        return question, listed, listed.index(right)

    def written(row: Row) -> str:
        question, listed, _right = options(row)
        lines = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", listed, strict=True))
        return f"{question}\n\n{lines}\n\n{ASK_OPTION}"

    return Format(
        name="gpqa", asks=GPQA, answers=GPQA, grader="choice", id=wanted.id or first_of(columns, ("record_id", "id")),
        write=written, answer=lambda row: "ABCD"[options(row)[2]],
    )  # fmt: skip


# Programming problems: LiveCodeBench, and those with columns of tests (APPS, TACO, DeepCoder, code_contests and others)

PUBLIC, PRIVATE, STARTER, METADATA = "public_test_cases", "private_test_cases", "starter_code", "metadata"
TESTS = ("input_output", "tests", "test_cases", "official_tests")
CONTESTS = ("public_tests", "private_tests", "generated_tests")
PROBLEMS = ("problem", "question", "prompt", "description")
STATED = {"input_format": "Input", "output_format": "Output"}  # columns of Codeforces beside the description
UNPACKED_LIMIT_BYTES = 256 * 2**20
HARMLESS = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
ASK = "Write a Python program that reads standard input and prints the answer, in a ```python block."
ASK_STARTER = "Complete this Python code so that it solves the problem, and put all of it in a ```python block:"


def code(columns: Names, wanted: DatasetOptions) -> Format:
    question = wanted.question or first_of(columns, PROBLEMS) or PROBLEMS[0]
    found = wanted.answer or first_of(columns, TESTS)
    contests = () if found else tuple(name for name in CONTESTS if name in columns)
    tests = found or TESTS[0]
    need(columns, question, *(contests or (tests,)), what="code")

    def answer(row: Row) -> str:
        if contests:
            return json.dumps([case for name in contests for case in _contest_cases(row.get(name), name)])
        return json.dumps({"test_cases": answer_text(row.get(tests), tests), METADATA: row.get(METADATA)})

    return _programming("code", columns, question, contests or (tests,), answer, wanted.id or first_of(columns, IDS))


def _contest_cases(value: object, column: str) -> list[dict[str, Any]]:
    """What a column of code_contests holds: {"input": […], "output": […]}."""
    given = parsed(value, column) or {"input": [], "output": []}
    inputs, outputs = (given.get(side) if isinstance(given, dict) else None for side in ("input", "output"))
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise UnusableTask(f"{column} is no object of as many inputs as outputs")
    return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def livecodebench(columns: Names, wanted: DatasetOptions) -> Format:
    """Programs read standard input; with starter code they are called by name (metadata.func_name)."""
    question = wanted.question or first_of(columns, ("question_content", "question", "prompt")) or "question_content"
    need(columns, question, *(() if PRIVATE in columns else (PUBLIC,)), what="livecodebench")
    tests = (PUBLIC, PRIVATE)

    def answer(row: Row) -> str:
        return json.dumps({METADATA: row.get(METADATA), **{name: _cases(row.get(name), name) for name in tests}})

    row_id = wanted.id or first_of(columns, ("question_id", "problem_id", "task_id", "id"))
    return _programming("livecodebench", columns, question, tests, answer, row_id)


def _programming(
    name: str, columns: Names, question: str, tests: Names, answer: Callable[[Row], str], row_id: str
) -> Format:
    def written(row: Row) -> str:
        content, starter = required(row.get(question), question), row.get(STARTER) or ""
        if not isinstance(starter, str):
            raise UnusableTask(f"{STARTER} is {type(starter).__name__}, not text")
        asked = f"{ASK_STARTER}\n\n```python\n{starter.rstrip()}\n```" if starter.strip() else ASK
        parts = [f"{title}:\n{row[name]}" for name, title in STATED.items() if row.get(name)]
        return "\n\n".join([*(part.rstrip() for part in (content, *parts)), asked])

    wanted = ((question, *STATED, STARTER), (*tests, METADATA))
    asks, answers = ([one for one in some if one in columns] for some in wanted)
    return Format(name, tuple(asks), tuple(answers), answer, id=row_id, write=written, grader="code")


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
    """Decode base64 of zlib of a pickled string, without executing the pickle."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), UNPACKED_LIMIT_BYTES)
        if not inflater.eof:
            raise UnusableTask(f"{column} is cut off, or unpacks to more than {UNPACKED_LIMIT_BYTES // 2**20} MB")
        if data[:1] in (b"[", b"{"):
            return data.decode(errors="replace")
        texts: list[str] = []
        for operation, argument, _position in pickletools.genops(data):
            if operation.name in TEXTS:
                texts.append(str(argument))
            elif operation.name not in HARMLESS:
                raise UnusableTask(f"{column} holds a pickle of more than a text ({operation.name}): it is not run")
    except (ValueError, zlib.error) as error:
        raise UnusableTask(f"{column} is no JSON, packed or not ({str(error)[:80]})") from None
    if len(texts) != 1:
        raise UnusableTask(f"{column} holds a pickle of {len(texts)} texts instead of one: it is not used")
    return texts[0]


FORMATS: dict[str, Callable[[Names, DatasetOptions], Format]] = {
    "described": described, "columns": columns_format, "aime": aime, "livecodebench": livecodebench, "code": code,
    "gpqa": gpqa,
}  # fmt: skip
# Columns that identify a format. Other data has a column of tests, or question and answer columns.
BY_COLUMNS: tuple[tuple[str, frozenset[str]], ...] = (
    ("described", frozenset({"verification_info", "prompt"})),
    ("livecodebench", frozenset({"question_content", "public_test_cases"})),
    ("gpqa", frozenset({"Question", "Correct Answer", "Incorrect Answer 1"})),
    ("code", frozenset({"description", "public_tests", "private_tests"})),
)


class DatasetOptions(Table):
    """How to read a data set, [environment.options]; with none of these, the columns tell."""

    grader: str = Field(default="", description="who scores all rows; empty: by row (task_type), or by the format")
    question: str = Field(default="", description="the column that is the prompt; empty: found by its name")
    answer: str = Field(default="", description="the column that is the answer; empty: found by its name")
    id: str = Field(default="", description="the column that is the id; empty: found by its name, if there is one")
    format: str = Field(default="", description=f"the schema of the rows ({', '.join(FORMATS)}); empty: by columns")
    split: str = Field(default="", description="which split of a folder that holds several; empty: train")
    bad_rows: Literal["", "skip", "refuse"] = Field(
        default="",
        description="rows that cannot be used; empty: leave single rows out, refuse a kind of which none can be used;"
        " skip: leave both out; refuse: refuse both (checks every answer)",
    )
    held_out: Path | None = Field(default=None, description="data with the held-out tasks; unset: rows of this one")
    solve_rate: str = Field(default="", description="the column of solve rates; empty: the one named solve_rate…")
    keep_solve_rate: tuple[float, float] | None = Field(
        default=None, description="lowest and highest solve rate of the tasks to keep, e.g. [0.125, 0.5]"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.keep_solve_rate is not None and not 0 <= self.keep_solve_rate[0] <= self.keep_solve_rate[1] <= 1:
            raise ValueError("keep_solve_rate must be two numbers from 0 to 1, the lower first")
        return self


def fit(columns: Names, options: DatasetOptions) -> Format:
    if options.format and options.format not in FORMATS:
        raise EnvironmentSetupError(f"there is no format {options.format!r}; there are {', '.join(FORMATS)}")
    if options.id and options.id not in columns:
        raise EnvironmentSetupError(f"there is no column {options.id!r} for the id; there are {', '.join(columns)}")
    other = "code" if first_of(columns, TESTS) else "columns"
    detail = next((name for name, known in BY_COLUMNS if known <= set(columns)), other)
    return FORMATS[options.format or ("columns" if options.question and options.answer else detail)](columns, options)
