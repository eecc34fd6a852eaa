"""Which formats there are, which one fits a data set's columns, and what a recipe may say about a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.environments.formats.columns import aime, columns_format, described, gpqa, ifeval
from shoal.environments.formats.programs import TESTS, code, livecodebench
from shoal.environments.formats.protocol import Format, Wanted, first_of
from shoal.errors import EnvironmentSetupError

FORMATS: dict[str, Callable[[tuple[str, ...], Wanted], Format]] = {
    "described": described, "columns": columns_format, "aime": aime, "livecodebench": livecodebench, "code": code,
    "gpqa": gpqa, "ifeval": ifeval,
}  # fmt: skip
TELLING: tuple[tuple[str, frozenset[str]], ...] = (
    ("described", frozenset({"verification_info", "prompt"})),
    ("livecodebench", frozenset({"question_content", "public_test_cases"})),
    ("gpqa", frozenset({"Question", "Correct Answer", "Incorrect Answer 1"})),
    ("ifeval", frozenset({"prompt", "instruction_id_list"})),
)
"""Columns by which a format is known; any other has a column of tests, or question and answer columns."""


class DatasetOptions(Wanted):
    """How to read a data set, [environment.options]; with none of these, the columns tell."""

    format: str = Field(
        default="", description=f"which schema the rows have ({', '.join(FORMATS)}); empty: told by the columns"
    )
    split: str = Field(default="", description="which split of a folder that holds several; empty: train")
    bad_rows: Literal["", "skip", "refuse"] = Field(
        default="",
        description="rows that cannot be used; empty: leave single rows out, refuse a kind of which none can be used;"
        " skip: leave both out; refuse: refuse both (checks every answer)",
    )
    held_out: Path | None = Field(
        default=None, description="another file or folder with the held-out tasks; unset: some rows of this one"
    )
    solve_rate: str = Field(default="", description="the column of solve rates; empty: the one named solve_rate…")
    keep_solve_rate: tuple[float, float] | None = Field(
        default=None, description="lowest and highest solve rate of the tasks to keep, e.g. [0.125, 0.5]"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.keep_solve_rate is not None and not 0 <= self.keep_solve_rate[0] <= self.keep_solve_rate[1] <= 1:
            raise ValueError("keep_solve_rate must be two numbers from 0 to 1, the lower first")
        return self


def fit(columns: tuple[str, ...], options: DatasetOptions) -> Format:
    """The format that the options name, or the one that the columns tell of, with its columns found."""
    if options.format and options.format not in FORMATS:
        raise EnvironmentSetupError(f"there is no format {options.format!r}; there are {', '.join(FORMATS)}")
    if options.id and options.id not in columns:
        raise EnvironmentSetupError(f"there is no column {options.id!r} for the id; there are {', '.join(columns)}")
    chosen = options.format or ("columns" if options.question and options.answer else told_by(columns))
    return FORMATS[chosen](columns, options)


def told_by(columns: tuple[str, ...]) -> str:
    """Which format the columns tell of."""
    other = "code" if first_of(columns, TESTS) else "columns"
    return next((name for name, known in TELLING if known <= set(columns)), other)
