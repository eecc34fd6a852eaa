"""What `shoal data check` and `shoal data order` do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from shoal.cli.sources import TaskSource, task_source
from shoal.environments import Environment, EnvironmentSettings, build, identity_of
from shoal.errors import EnvironmentSetupError, UnusableTask, UserError
from shoal.hub.state.draws import candidates

if TYPE_CHECKING:
    from shoal.environments.dataset import DatasetEnvironment


def source_at(spec: str, overrides: Sequence[str]) -> TaskSource:
    """What the specification means; an override is of an option of the data set: `keep_solve_rate=[0.1, 0.5]`."""
    for override in overrides:
        if "=" not in override:
            raise UserError(f"expected OPTION=VALUE, not {override!r}; for example: --set format=aime")
    return task_source(spec, [f"environment.options.{override.strip()}" for override in overrides])


# ── check ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_data(spec: str, overrides: Sequence[str]) -> int:
    """Read everything, say what is wrong; 0 or 2."""
    settings = source_at(spec, overrides).settings
    with _unsaid():
        found = list(_data_sets(settings))
    if not found:
        raise UserError(
            f"{spec} trains on no data set: its environment is {settings.name}; give a data file or FORMAT:FILE"
        )
    return max(_check(data) for data in found)


@contextmanager
def _unsaid() -> Iterator[None]:
    """Opening a data set warns of rows that cannot be asked. Here all bad rows are told, once, at the end."""
    opening = logging.getLogger("shoal.environments.rows")
    before = opening.level
    opening.setLevel(logging.ERROR)
    try:
        yield
    finally:
        opening.setLevel(before)


def _data_sets(settings: EnvironmentSettings) -> Iterator[DatasetEnvironment]:
    """The data set of a recipe, or those of its mixture."""
    from shoal.environments.dataset import DatasetEnvironment
    from shoal.environments.registry import build_ingredient

    for part in settings.mix or (settings,):
        if part.name == "dataset" and part.file is None:
            skipping = part.model_copy(update={"options": {**part.options, "bad_rows": "skip"}})
            environment = build_ingredient(skipping)
            assert isinstance(environment, DatasetEnvironment)
            yield environment


def _check(data: DatasetEnvironment) -> int:
    from rich.console import Console

    from shoal.cli.counting import counted
    from shoal.environments.data.checking import count_of

    with counted("checking answers", Console(stderr=True), unit="rows") as report:
        report(0, 0)  # it begins here; how many rows there are is told with the first of them
        findings = data.check(report)
    for found in findings:
        for line in found.problems.lines(found.where):
            typer.echo(line)
        for reason, count in found.problems.reasons.most_common(10):
            typer.echo(f"{count:>10,} {'row' if count == 1 else 'rows'}: {reason}")
    for line in data.kinds():
        typer.echo(line)
    typer.echo(data.description)
    bad = sum(found.problems.count for found in findings)
    if not bad:
        typer.echo("every row can be used")
        return 0
    typer.echo(f"{count_of(bad)} cannot be used", err=True)
    return UserError.exit_code


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────


def show_order(spec: str, overrides: Sequence[str], seed: int | None, units: range) -> None:
    """One line per unit: its number, the row (where there are rows), the id."""
    source = source_at(spec, overrides)
    environment = build(source.settings)
    if source.settings.pools is not None:
        typer.echo("difficulty pools are on: a run may take a later candidate of a unit than the one shown", err=True)
    tasks = len(environment.tasks("train"))
    chosen = seed if seed is not None else source.recipe.run.seed if source.recipe else 0
    identity = identity_of(environment)
    data = f", data digest {identity.data_digest}" if identity.data_digest else ""
    typer.echo(f"# {tasks} tasks, seed {chosen}, environment digest {identity.digest}{data}")
    typer.echo("unit\trow\tid")
    for unit in units:
        typer.echo(f"{unit}\t" + "\t".join(_drawn(environment, chosen, unit, tasks)))


def _drawn(environment: Environment, seed: int, unit: int, count: int) -> tuple[str, str]:
    """The row and id of the first candidate that can be used."""
    from shoal.environments.composed import Composed
    from shoal.environments.dataset import DatasetEnvironment

    inner = environment.inner if isinstance(environment, Composed) else environment
    tasks = environment.tasks("train")
    for position in candidates(count, seed, unit):
        try:
            task = tasks[position]
        except UnusableTask:
            continue
        row = inner.row_at("train", position) if isinstance(inner, DatasetEnvironment) else position
        return str(row), task.id
    raise EnvironmentSetupError(f"none of the tasks that unit {unit} may be can be used: run shoal data check")
