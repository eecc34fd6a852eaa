"""Which formats there are, and which one fits a data set's columns."""

from __future__ import annotations

from collections.abc import Callable

from shoal.environments.formats.code import TESTS, code
from shoal.environments.formats.columns import aime, columns_format
from shoal.environments.formats.described import described
from shoal.environments.formats.gpqa import gpqa
from shoal.environments.formats.ifeval import ifeval
from shoal.environments.formats.livecodebench import livecodebench
from shoal.environments.formats.protocol import Format, Wanted, first_of
from shoal.errors import EnvironmentSetupError

FORMATS: dict[str, Callable[[tuple[str, ...], Wanted], Format]] = {
    "described": described,
    "columns": columns_format,
    "aime": aime,
    "livecodebench": livecodebench,
    "code": code,
    "gpqa": gpqa,
    "ifeval": ifeval,
}
TELLING: tuple[tuple[str, frozenset[str]], ...] = (
    ("described", frozenset({"verification_info", "prompt"})),
    ("livecodebench", frozenset({"question_content", "public_test_cases"})),
    ("gpqa", frozenset({"Question", "Correct Answer", "Incorrect Answer 1"})),
    ("ifeval", frozenset({"prompt", "instruction_id_list"})),
)
"""Columns by which a format is known; any other has a column of tests, or question and answer columns."""


def fit(name: str, columns: tuple[str, ...], wanted: Wanted) -> Format:
    """The format of that name, or the one that the columns tell of, with its columns found."""
    if name and name not in FORMATS:
        raise EnvironmentSetupError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    if wanted.id and wanted.id not in columns:
        raise EnvironmentSetupError(f"there is no column {wanted.id!r} for the id; there are {', '.join(columns)}")
    chosen = name or ("columns" if wanted.question and wanted.answer else told_by(columns))
    return FORMATS[chosen](columns, wanted)


def told_by(columns: tuple[str, ...]) -> str:
    """Which format the columns tell of.

    >>> told_by(("id", "question", "answer"))
    'columns'
    """
    other = "code" if first_of(columns, TESTS) else "columns"
    return next((name for name, known in TELLING if known <= set(columns)), other)
