"""`shoal filter`: which tasks can a model learn from? Those that it solves sometimes.

shoal filter MODEL data.parquet --out kept.parquet        rows solved in 12.5 to 50 % of 8 samples, with their rate
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.eval import (
    STOPPED_CODE,
    BatchRows,
    Device,
    Dtype,
    Engine,
    Given,
    MaxTokens,
    Model,
    Overrides,
    Seed,
    Tasks,
    Temperature,
    positions_of,
    refuse_if_hollow,
    scorable,
    scorer_of,
)
from shoal.errors import ConfigError
from shoal.runtime.text import count_of

if TYPE_CHECKING:
    from shoal.environments.data.readers import Table
    from shoal.evaluation.filter import RateBand
    from shoal.evaluation.job import EvaluationJob
    from shoal.evaluation.records import EvaluationJournal
    from shoal.evaluation.subject import EngineChoice
    from shoal.run.sources import TaskSource


def filter_tasks(
    model: Model,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A data file or folder, FORMAT:FILE, a recipe, or an environment.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.parquet", help="The data set to write.")],
    samples: Annotated[int, typer.Option(help="Completions per task.")] = 8,
    keep: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Pass rates to keep.")] = "0.125:0.5",
    everything: Annotated[bool, typer.Option("--all", help="Keep all rows, with their rates.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Of the new columns: solve_rate_NAME.  [default: the model's]")
    ] = None,
    tasks: Tasks = 0,
    temperature: Temperature = None,
    max_new_tokens: MaxTokens = None,
    seed: Seed = 0,
    split: Annotated[
        str | None, typer.Option(help="held_out, train or all.  [default: train; all of a data file]")
    ] = None,
    overrides: Overrides = None,
    engine: Engine = "torch",
    device: Device = "auto",
    dtype: Dtype = "float32",
    batch_rows: BatchRows = 256,
) -> None:
    """Measure how often a model solves each task, and write those within a band. The same command continues."""
    from shoal.evaluation.filter import RateBand
    from shoal.evaluation.subject import EngineChoice
    from shoal.run.sources import task_source

    source = task_source(data, overrides or ())
    part = split or ("all" if source.whole else "train")  # held-out rows of a recipe must stay out of training
    given = Given(samples, tasks, temperature, max_new_tokens, seed, part, batch_rows)
    request = FilterRequest(
        model, source, given, out, RateBand.parse(keep), everything, name, EngineChoice(engine, device, dtype)
    )
    raise typer.Exit(run_filter(request))


@dataclass(frozen=True)
class FilterRequest:
    model: str
    source: TaskSource
    given: Given
    out: Path
    band: RateBand
    everything: bool
    name: str | None
    machine: EngineChoice

    @property
    def work(self) -> Path:
        """Where the measurement is kept until the result is written."""
        return self.out.with_name(f"{self.out.name}.work")


def run_filter(request: FilterRequest) -> int:
    """Measure, or go on measuring; write what stays; say how many that are. Returns the exit code."""
    from shoal.evaluation.filter import rate_columns, refuse_taken, stored_about, written_before
    from shoal.evaluation.subject import plain_name

    if request.out.suffix != ".parquet":
        raise ConfigError(f"--out {request.out}: the result is a Parquet file; let its name end in .parquet")
    stored_about(request.out)  # what is somebody else's is refused before a model is loaded
    evaluation = prepared(request)
    name = plain_name(request.name or evaluation.subject.name)
    about = {**evaluation.about, "band": str(request.band), "all": request.everything, "column": rate_columns(name)[0]}
    if written_before(request.out, about):
        typer.echo(f"this is done already: {request.out}", err=True)
        return 0
    if (table := table_of(request, evaluation)) is not None:
        refuse_taken(table.columns, name)
    journal = measured(request, evaluation)
    if journal is None:
        return STOPPED_CODE
    conclude(request, evaluation, journal, name, about)
    return 0


def prepared(request: FilterRequest) -> EvaluationJob:
    from shoal.evaluation.filter import data_of
    from shoal.evaluation.job import EvaluationJob, choose
    from shoal.evaluation.subject import open_subject
    from shoal.run.sources import model_source

    request.given.plan(request.source, None)  # mistakes on the command line, before anything is loaded
    environment = scorable(request.source)
    data = data_of(environment)
    if data is not None and data.options.held_out is not None and request.given.split != "train":
        raise ConfigError("the held-out tasks are in a file of their own: filter that file, or give --split train")
    with model_source(request.model) as model:
        plan = request.given.plan(request.source, positions_of(model))
        chosen = choose(environment, plan)
        subject = open_subject(model.name, model.where, request.machine, plan.rows)
        return EvaluationJob(subject, chosen)


def table_of(request: FilterRequest, evaluation: EvaluationJob) -> Table | None:
    """The original rows, if the tasks are rows of a data set."""
    from shoal.environments.data.locating import locate
    from shoal.environments.data.readers import Table
    from shoal.evaluation.filter import data_of

    data, path = data_of(evaluation.chosen.environment), request.source.settings.data
    return None if data is None or path is None else Table(locate(path, data.options.split))


def measured(request: FilterRequest, evaluation: EvaluationJob) -> EvaluationJournal | None:
    """All rates, kept in the work folder; None if it was told to stop before the end."""
    from rich.console import Console

    from shoal.cli.printing import counted
    from shoal.evaluation.job import measure
    from shoal.runtime.lock import FolderLock
    from shoal.runtime.stop import stop_on_signals

    stop = stop_on_signals()
    with FolderLock(request.work).acquire(stop), counted("filtering", Console(stderr=True)) as report:
        processes = partial(scorer_of, request.source, evaluation.chosen.environment, stop)
        journal = measure(evaluation, processes, request.work, stop, report)
    if journal is None:
        typer.echo(f"stopped; what is done is kept in {request.work}, and the same command continues", err=True)
    return journal


def conclude(
    request: FilterRequest, evaluation: EvaluationJob, journal: EvaluationJournal, name: str, about: dict[str, Any]
) -> None:
    """Write the result and say what is in it. Measurements stay until something is written, and all is scored."""
    from shoal.evaluation.filter import histogram_lines, original_rows, rates_by_row, task_rows, write_rows
    from shoal.evaluation.summary import SummaryTally, missing_lines

    environment, plan = evaluation.chosen.environment, evaluation.chosen.plan
    rates = rates_by_row(environment, plan.split, journal.records())
    typer.echo(f"pass rates of {len(rates):,} tasks, {plan.samples} samples each:")
    summary = SummaryTally.of(plan, journal.records()).as_json()
    for line in (*histogram_lines(rates, plan.samples, request.band), *missing_lines(summary)):
        typer.echo(line)
    table, band = table_of(request, evaluation), None if request.everything else request.band
    rows = write_rows(
        request.out,
        task_rows(environment, plan.split, rates, band, name)
        if table is None
        else original_rows(table, rates, band, name),
        about,
    )
    inside = sum(request.band.holds(rate.value) for rate in rates.values())
    typer.echo(f"{inside:,} of {len(rates):,} tasks are solved in {request.band.low:.1%} to {request.band.high:.1%}")
    if rows == 0:
        raise ConfigError(
            f"no task is within --keep {request.band}: nothing was written; the same command with "
            "another band needs no new samples"
        )
    shutil.rmtree(request.work, ignore_errors=True)
    typer.echo(f"wrote {request.out}: {count_of(rows, 'row')}; the rate is the column {about['column']}")
    refuse_if_hollow(summary, request.source, f"remove {request.out} and filter again")
