"""`shoal filter`: which tasks can a model learn from? Those that it solves sometimes.

shoal filter MODEL data.parquet --out kept.parquet        rows solved in 12.5 to 50 % of 8 samples, with their rate
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import options
from shoal.cli.eval import RESCORE, STOPPED_CODE, Given, refuse_if_hollow, worked
from shoal.errors import ConfigError
from shoal.runtime.text import count_of

if TYPE_CHECKING:
    from shoal.evaluation.filter import RateBand


def filter_tasks(
    model: options.Model,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A data file or folder, FORMAT:FILE, a recipe, or an environment.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.parquet", help="The data set to write.")],
    samples: options.Samples = 8,
    keep: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Pass rates to keep.")] = "0.125:0.5",
    everything: Annotated[bool, typer.Option("--all", help="Keep all rows, with their rates.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Of the new columns: solve_rate_NAME. (default: the model's)")
    ] = None,
    tasks: options.Tasks = 0,
    temperature: options.Temperature = None,
    max_new_tokens: options.MaxTokens = None,
    seed: options.Seed = 0,
    split: Annotated[
        str | None, typer.Option(help="held_out, train or all. (default: train; all of a data file)")
    ] = None,
    overrides: options.EnvironmentSettings = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_rows: options.BatchRows = 256,
) -> None:
    """Measure how often a model solves each task, and write those within a band. The same command continues."""
    from shoal.evaluation.filter import RateBand, written_before
    from shoal.run.sources import task_source

    source, band = task_source(data, overrides or ()), RateBand.parse(keep)
    if out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: the result is a Parquet file; let its name end in .parquet")
    written_before(out)  # what is somebody else's is refused before a model is loaded
    part = split or ("all" if source.whole else "train")  # held-out rows of a recipe must stay out of training
    machine = (engine, device, dtype)
    given = Given(model, source, samples, tasks, temperature, max_new_tokens, seed, part, batch_rows, machine)
    raise typer.Exit(run_filter(given, out, band, everything, name))


def run_filter(given: Given, out: Path, band: RateBand, everything: bool, name: str | None) -> int:
    """Measure, or continue to; write what stays; say how many that are. Returns the exit code."""
    from shoal.environments.data.locating import locate
    from shoal.environments.data.readers import Table
    from shoal.evaluation import filter as filtering
    from shoal.evaluation.job import measure
    from shoal.evaluation.plan import Leaks
    from shoal.evaluation.subject import plain_name
    from shoal.evaluation.summary import missing_lines, summary_of

    source, data = given.source, filtering.data_of(given.environment)
    if data is not None and data.options.held_out is not None and given.split != "train":
        raise ConfigError("the held-out tasks are in a file of their own: filter that file, or give --split train")
    evaluation, _ = given.job(lambda *_: Leaks())
    name, path = plain_name(name or evaluation.subject.name), source.settings.data
    column = filtering.rate_columns(name)[0]
    about = {**evaluation.about, "band": str(band), "all": everything, "column": column}
    if filtering.written_before(out, about):
        typer.echo(f"this is done already: {out}", err=True)
        return 0
    table = None if data is None or path is None else Table(locate(path, data.options.split))
    if table is not None:
        filtering.refuse_taken(table.columns, name)
    work = out.with_name(f"{out.name}.work")  # where the measurement is kept until the result is written
    environment, plan = evaluation.chosen.environment, evaluation.chosen.plan
    journal = worked(
        "filtering", work, source, environment,
        lambda processes, stop, report: measure(evaluation, processes, work, stop, report),
    )  # fmt: skip
    if journal is None:
        return STOPPED_CODE
    rates = filtering.rates_by_row(environment, plan.split, journal.records())
    typer.echo(f"pass rates of {len(rates):,} tasks, {plan.samples} samples each:")
    summary = summary_of(plan, journal.records())
    for line in (*filtering.histogram_lines(rates, plan.samples, band), *missing_lines(summary)):
        typer.echo(line)
    kept = None if everything else band
    if table is None:
        rows = filtering.task_rows(environment, plan.split, rates, kept, name)
    else:
        rows = filtering.original_rows(table, rates, kept, name)
    count, inside = filtering.write_rows(out, rows, about), sum(band.holds(rate.value) for rate in rates.values())
    typer.echo(f"{inside:,} of {len(rates):,} tasks are solved in {band.low:.1%} to {band.high:.1%}")
    if count == 0:
        raise ConfigError(
            f"no task is within --keep {band}: nothing was written; the same command with another band needs no new "
            "samples"
        )
    again = f"remove {out} and filter again"
    if summary["unscored"]["samples"]:
        again = f"{RESCORE.format(work)}, then {again}: no new samples are drawn"
        typer.echo(f"  {again}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    typer.echo(f"wrote {out}: {count_of(count, 'row')}; the rate is the column {column}")
    refuse_if_hollow(summary, source, again, again)
    return 0
