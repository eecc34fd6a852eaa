"""What may be said about a data set in a recipe: [environment.options]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.environments.formats import FORMATS, Wanted
from shoal.environments.generated import Options


class DatasetOptions(Options):
    """How to read a data set; with none of these, the columns tell."""

    format: str = Field(
        default="",
        description=f"which schema the rows have ({', '.join(FORMATS)}); empty: told by the columns",
    )
    grader: str = Field(default="", description="who scores all rows; empty: by row (task_type), or by the format")
    question: str = Field(default="", description="the column that is the prompt; empty: found by its name")
    answer: str = Field(default="", description="the column that is the answer; empty: found by its name")
    id: str = Field(default="", description="the column that is the id; empty: found by its name, if there is one")
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

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.question, self.answer, self.id, self.grader)
