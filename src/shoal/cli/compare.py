"""`shoal compare`: two evaluations of the same tasks, and what may be concluded from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Results of `shoal eval`: their folder, or tasks.parquet.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Others, of another model.")],
    force: Annotated[bool, typer.Option("--force", help="Compare what is not about the same.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Of the resampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say whether B is better than A, task by task, with an interval and a significance test."""
    import json

    from shoal.evaluation.comparing import compare as compared
    from shoal.evaluation.comparing import comparison_lines
    from shoal.evaluation.job import TASKS
    from shoal.evaluation.records import read_results

    first, second = read_results(a, TASKS), read_results(b, TASKS)
    found = compared(first, second, force, seed)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    for line in comparison_lines(first, second, found):
        typer.echo(line)
