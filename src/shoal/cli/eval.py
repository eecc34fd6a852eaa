"""`shoal eval`: how good is a model at tasks that it was not trained on, and how sure is that? `shoal filter`: which
tasks can it learn from? Those that it solves sometimes. `shoal compare`: is another model better?

shoal eval tiny --env sort                                 greedy, one completion per held-out task
shoal eval runs/mine --env aime:aime24.jsonl --samples 8   avg@8 and pass@k, leaks looked for in what the run trained on
shoal eval --rescore evals/mine                            its completions, scored again: a grader was mended, or failed
shoal filter MODEL data.parquet --out kept.parquet         rows solved in 12.5 to 50 % of 8 samples, with their rate
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import options
from shoal.errors import ConfigError, ScoringFailure, UserError
from shoal.runtime.text import count_of

if TYPE_CHECKING:
    from shoal.environments import Environment
    from shoal.evaluation.filter import RateBand
    from shoal.evaluation.job import Chosen, EvaluationJob
    from shoal.evaluation.plan import Leaks, SamplingPlan
    from shoal.run.sources import ModelSource, TaskSource

STOPPED_CODE = 130
RESCORE = "score them again: shoal eval --rescore {}"
DEFAULT_TOKENS = 1024


def evaluate(
    model: options.OptionalModel = None,
    env: Annotated[str | None, typer.Option(metavar="SPEC", help=options.SPEC_HELP)] = None,
    samples: options.Samples = 1,
    tasks: options.Tasks = 0,
    temperature: options.Temperature = None,
    max_new_tokens: options.MaxTokens = None,
    seed: options.Seed = 0,
    split: Annotated[
        str | None, typer.Option(help="held_out, train or all. (default: held_out; all of a data file)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where results go. (default: evals/MODEL-ENV-…)")
    ] = None,
    rescore: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Score what is kept in DIR again; only --env and --set count.")
    ] = None,
    trained_on: Annotated[
        str | None, typer.Option(metavar="RUN|SPEC", help="Look for leaks in this; a run's folder names its own.")
    ] = None,
    allow_leaks: Annotated[
        bool, typer.Option("--allow-leaks", help="Leave tasks out that are in the training set, and go on.")
    ] = False,
    overrides: options.EnvironmentSettings = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_rows: options.BatchRows = 256,
) -> None:
    """Measure a model: avg@k and pass@k with intervals, per task in a Parquet file. The same command continues."""
    from shoal.evaluation.records import refuse_unusable
    from shoal.run.sources import task_source

    if rescore is not None:
        if model is not None:
            raise UserError(f"--rescore {rescore} needs no model: leave {model} out")
        refused = {
            "--samples": samples != 1, "--tasks": tasks, "--temperature": temperature is not None, "--out": out,
            "--max-new-tokens": max_new_tokens is not None, "--seed": seed, "--split": split,
            "--trained-on": trained_on, "--allow-leaks": allow_leaks,
        }  # fmt: skip
        if wrong := [name for name, value in refused.items() if value]:
            raise UserError(f"--rescore {rescore} scores what is kept there: leave {', '.join(wrong)} out")
        raise typer.Exit(run_rescore(rescore, env, overrides or ()))
    if model is None or env is None:
        raise UserError("give a MODEL and --env SPEC, or --rescore DIR; see shoal eval --help")
    refuse_unusable(out or Path("evals", "results"))
    source, machine = task_source(env, overrides or ()), (engine, device, dtype)
    given = Given(model, source, samples, tasks, temperature, max_new_tokens, seed, split, batch_rows, machine)
    raise typer.Exit(run_eval(given, out, trained_on, allow_leaks))


@dataclass(frozen=True)
class Given:
    """What was asked for on the command line, of `eval` or `filter`; None: what fits."""

    model: str
    source: TaskSource
    samples: int
    tasks: int
    temperature: float | None
    max_new_tokens: int | None
    seed: int
    split: str | None
    batch_rows: int
    machine: tuple[str, str, str]
    environment: Environment = field(init=False)

    def __post_init__(self) -> None:
        """Mistakes on the command line, and tasks that cannot be scored here, are told before a model is loaded."""
        self.plan(None)
        object.__setattr__(self, "environment", scorable(self.source))

    def plan(self, positions: int | None) -> SamplingPlan:
        """The plan, with what was left open taken from the recipe, or from what the model has room for."""
        from shoal.evaluation.plan import PARTS, SamplingPlan

        recipe = self.source.recipe
        split = self.split or ("all" if self.source.whole else "held_out")
        if split not in PARTS:
            raise UserError(f"--split {split}: there are {', '.join(PARTS)}")
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.samples == 1 else recipe.run.temperature if recipe else 1.0
        room = DEFAULT_TOKENS if positions is None else max(1, min(DEFAULT_TOKENS, positions // 2))
        tokens = self.max_new_tokens or (recipe.run.max_new_tokens if recipe else room)
        return SamplingPlan(
            samples=self.samples, tasks=self.tasks, temperature=temperature, max_new_tokens=tokens, seed=self.seed,
            split=split, batch_rows=self.batch_rows,
        )  # fmt: skip

    def job(
        self, look: Callable[[Chosen, ModelSource], Leaks], allow_leaks: bool = False
    ) -> tuple[EvaluationJob, Leaks]:
        """Model and tasks, opened, without the tasks that leaked; refused if there are some and that is not allowed."""
        from shoal.evaluation.job import EvaluationJob, choose, without
        from shoal.evaluation.subject import EngineChoice, open_subject
        from shoal.models.folder import model_folder, read_config, read_files
        from shoal.run.sources import model_source

        with model_source(self.model) as model:
            positions = read_config(read_files(model_folder(model.where))).get("max_position_embeddings")
            plan = self.plan(positions if isinstance(positions, int) and positions > 0 else None)
            chosen = choose(self.environment, plan)
            leaks = look(chosen, model)
            if not allow_leaks:
                leaks.refuse()
            chosen = without(chosen, leaks.known) if leaks.known else chosen
            subject = open_subject(model.name, model.where, EngineChoice(*self.machine), plan.rows)
        return EvaluationJob(subject, chosen, self.source.settings, leaks.known), leaks


def worked(
    what: str, folder: Path, source: TaskSource, environment: Environment, work: Callable[..., Any],
    kept: str = "what is done is kept in {}, and the same command continues",
) -> Any:  # fmt: skip
    """The result of `work(processes, stop, report)`, which keeps what it does in the folder; None if it was told to
    stop before its end. A reward function, or a program under test, may do anything: processes beside this one score.
    """
    from rich.console import Console

    from shoal.cli.printing import counted
    from shoal.rewards import ScoringPatience, ScoringPool
    from shoal.runtime.lock import FolderLock
    from shoal.runtime.stop import stop_on_signals

    stop = stop_on_signals()

    def processes() -> ScoringPool:
        pool = ScoringPool(source.settings, environment, stop, ScoringPatience(all_s=86_400.0))
        pool.start()
        return pool

    with FolderLock(folder).acquire(stop), counted(what, Console(stderr=True)) as report:
        found = work(processes, stop, report)
    if found is None:
        typer.echo(f"stopped; {kept.format(folder)}", err=True)
    return found


def run_eval(given: Given, out: Path | None, trained_on: str | None, allow_leaks: bool) -> int:
    import hashlib

    from shoal.evaluation.job import evaluate as measure
    from shoal.evaluation.job import finished
    from shoal.evaluation.records import dumped
    from shoal.evaluation.subject import plain_name
    from shoal.models import BUILTIN

    source, untold = given.source, [given.model not in BUILTIN]

    def look(chosen: Chosen, model: ModelSource) -> Leaks:
        untold.append(model.run is None and trained_on is None and chosen.plan.split != "train")
        return look_for_leaks(trained_on, chosen, model)

    evaluation, leaks = given.job(look, allow_leaks)
    if out is None:  # a folder that follows from what is evaluated: the same command finds it again
        digest = hashlib.sha256(dumped(evaluation.about)).hexdigest()
        out = Path("evals") / f"{plain_name(evaluation.subject.name)}-{plain_name(source.label)}-{digest[:8]}"
    summary, folder = finished(out, evaluation.about), out
    if summary is not None:
        typer.echo(f"this evaluation is done already: {out}", err=True)
    else:
        summary = worked(
            "evaluating", out, source, evaluation.chosen.environment,
            lambda processes, stop, report: measure(evaluation, processes, folder, stop, report),
        )  # fmt: skip
    if summary is None:
        return STOPPED_CODE
    say(summary, source.label, leaks, out)
    if all(untold):
        typer.echo("  leaks were not looked for: --trained-on names the run or recipe that the model was trained by")
    typer.echo(f"wrote {out}")
    refuse_if_hollow(summary, source, RESCORE.format(out), f"remove {out} and evaluate again")
    return 0


def run_rescore(out: Path, env: str | None, overrides: Sequence[str]) -> int:
    """Score kept completions by the environment as it is now, and say the new numbers; returns the exit code."""
    from shoal.environments import EnvironmentSettings
    from shoal.evaluation.job import ENVIRONMENT, SUMMARY, rescore
    from shoal.evaluation.plan import Leaks
    from shoal.run.sources import TaskSource, task_source

    if not out.is_dir():
        raise UserError(f"--rescore {out}: there is no such folder")
    if env is not None:
        source = task_source(env, overrides)
    elif overrides:
        raise UserError(f"--set {overrides[0]}: say with --env what it changes")
    else:
        try:
            source = TaskSource(EnvironmentSettings.model_validate_json((out / ENVIRONMENT).read_bytes()))
        except (OSError, ValueError) as error:
            raise UserError(f"{out / ENVIRONMENT} cannot be read: say with --env what the tasks are") from error
    environment = scorable(source)
    summary = worked(
        "scoring", out, source, environment,
        lambda processes, stop, report: rescore(out, source.settings, environment, processes, stop, report),
        "{} is as it was",
    )  # fmt: skip
    if summary is None:
        return STOPPED_CODE
    say(summary, source.label, Leaks(), out)
    scored = f"{summary['scored_tasks']:,} of {summary['chosen']['tasks']:,} tasks"
    continues = f"{out} has new scores of {scored}; the command that drew these continues from there"
    typer.echo(f"wrote {out}" if (out / SUMMARY).exists() else continues)
    refuse_if_hollow(summary, source, RESCORE.format(out), f"remove {out} and evaluate again")
    return 0


def scorable(source: TaskSource) -> Environment:
    """The environment, if this machine can score its tasks: who cannot is told before a model is loaded."""
    from shoal.environments import build, require_scoring

    environment = build(source.settings)
    require_scoring(environment)
    return environment


def look_for_leaks(trained_on: str | None, chosen: Chosen, model: ModelSource) -> Leaks:
    """Evaluated tasks that are in the training set: of --trained-on, or of the run that the model is of."""
    from shoal.environments import build
    from shoal.evaluation.plan import Leaks, archived_ids, find_leaks
    from shoal.run.sources import TaskSource, task_source

    if trained_on is not None:
        training = task_source(trained_on)
    elif model.run is not None and chosen.plan.split != "train":
        training = TaskSource(model.run.recipe.environment, run=model.run)
    else:
        return Leaks()
    ids = archived_ids(training.run.path / "trainer" / "rollouts") if training.run else set[str]()
    return find_leaks((task for _, task in chosen.tasks()), build(training.settings), sorted(ids))


def say(summary: dict[str, Any], tasks: str, leaks: Leaks, out: Path) -> None:
    from shoal.evaluation.summary import table_lines

    model, environment, plan = summary["model"], summary["environment"], summary["plan"]
    heat = "greedy" if plan["temperature"] == 0 else f"temperature {plan['temperature']:g}, seed {plan['seed']}"
    typer.echo(
        f"{model['name']} ({model['digest'][:12]}) on {tasks} ({environment['digest'][:12]}, {plan['split']}), {heat}, "
        f"at most {plan['max_new_tokens']} tokens"
    )
    for line in table_lines(summary):
        typer.echo(line)
    if summary["unscored"]["samples"]:
        typer.echo(f"  {RESCORE.format(out)}")
    if leaks.known:
        typer.echo(f"  left out: {leaks.sentence}")
    if plan["split"] == "train":
        typer.echo("  these are training tasks: the numbers say nothing about unseen ones")


def refuse_if_hollow(summary: dict[str, Any], source: TaskSource, rescore: str, again: str) -> None:
    """Results of which much is missing are written and shown, and are no success; `rescore` and `again` are remedies.
    Rows that cannot be used are no failure where bad_rows = "skip" says to leave them out."""
    from shoal.evaluation.records import UNUSABLE
    from shoal.evaluation.summary import MAX_FAILURES

    share, unusable = summary["unscored"]["share"], summary["problems"].get(UNUSABLE, 0)
    if share > MAX_FAILURES:
        remedy = rescore if summary["unscored"]["samples"] else again
        raise ScoringFailure(
            f"{share:.1%} of the samples have no score, more than {MAX_FAILURES:.0%}: these numbers are of what is "
            f"left and may mislead; mend what the lines above name, then {remedy}"
        )
    if unusable > MAX_FAILURES * summary["tasks"] and not source.skips_rows:
        raise ScoringFailure(
            f"{unusable:,} of {summary['tasks']:,} rows cannot be used, more than {MAX_FAILURES:.0%}: shoal data check "
            "lists them; to leave them out: --set environment.options.bad_rows=skip"
        )


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Results of `shoal eval`: their folder, or tasks.parquet.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Others, of another model.")],
    force: Annotated[bool, typer.Option("--force", help="Compare what is not about the same.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the resampling.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Say whether B is better than A, task by task, with an interval and a significance test."""
    import json

    from shoal.evaluation.compare import compare as compared
    from shoal.evaluation.compare import comparison_lines
    from shoal.evaluation.job import TASKS
    from shoal.evaluation.records import read_results

    first, second = read_results(a, TASKS), read_results(b, TASKS)
    found = compared(first, second, force, seed)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    for line in comparison_lines(first, second, found):
        typer.echo(line)


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
    from shoal.evaluation.records import refuse_unusable
    from shoal.run.sources import task_source

    band = RateBand.parse(keep)
    if out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: the result is a Parquet file; let its name end in .parquet")
    written_before(out)  # what is somebody else's, or cannot be written, is refused before a model is loaded
    refuse_unusable(work_of(out))
    source = task_source(data, overrides or ())
    part = split or ("all" if source.whole else "train")  # held-out rows of a recipe must stay out of training
    machine = (engine, device, dtype)
    given = Given(model, source, samples, tasks, temperature, max_new_tokens, seed, part, batch_rows, machine)
    raise typer.Exit(run_filter(given, out, band, everything, name))


def work_of(out: Path) -> Path:
    """Where the measurement is kept until the result is written."""
    return out.with_name(f"{out.name}.work")


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
    work = work_of(out)
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
    if not rates:
        raise ConfigError("no task could be measured: nothing was written; mend what the lines above name")
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
