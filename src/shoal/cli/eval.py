"""`shoal eval`, `shoal compare`, `shoal filter` and `shoal sft`: what they are given; `measuring` and `sft` do it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

from shoal.cli import options
from shoal.errors import ConfigError, UserError
from shoal.runtime.stop import STOPPED_CODE, stop_on_signals

ENV = f"Whose held-out tasks stay out, and who verifies. {options.SPEC_HELP}"
SET = "Rate, clip, memory, …, or environment.KEY; repeatable."
FORM = "Last words must have: thinking, boxed, answer, or a pattern."
TASKS = "A data file or folder, FORMAT:FILE, a recipe, or an environment."
SPLIT = "held_out, train or all. (default: held_out; all of a data file)"
RESCORE = "Score what is kept in DIR again; only --env and --set count."
TRAINED_ON = "Look for leaks in this; a run's folder names its own."
ALLOW = "Leave tasks out that are in the training set, and go on."
DATA = "Demonstrations: JSON lines, Parquet, a folder; columns messages, prompt and completion, or text. Repeatable."


def evaluate(
    model: options.OptionalModel = None,
    env: Annotated[str | None, Option(metavar="SPEC", help=options.SPEC_HELP)] = None,
    samples: options.Samples = 1,
    tasks: options.Tasks = 0,
    temperature: options.Temperature = None,
    max_new_tokens: options.MaxTokens = None,
    seed: options.Seed = 0,
    split: Annotated[str | None, Option(help=SPLIT)] = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="Where results go. (default: evals/MODEL-ENV-…)")] = None,
    rescore: Annotated[Path | None, Option(metavar="DIR", help=RESCORE)] = None,
    trained_on: Annotated[str | None, Option(metavar="RUN|SPEC", help=TRAINED_ON)] = None,
    allow_leaks: Annotated[bool, Option("--allow-leaks", help=ALLOW)] = False,
    overrides: options.EnvironmentSettings = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_rows: options.BatchRows = 256,
) -> None:
    """Measure a model: avg@k and pass@k with intervals, per task in a Parquet file. The same command continues."""
    from shoal.cli.measuring import Given, run_eval, run_rescore
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
        return run_rescore(rescore, env, overrides or ())
    if model is None or env is None:
        raise UserError("give a MODEL and --env SPEC, or --rescore DIR; see shoal eval --help")
    refuse_unusable(out or Path("evals", "results"))
    source, machine = task_source(env, overrides or ()), (engine, device, dtype)
    given = Given(model, source, samples, tasks, temperature, max_new_tokens, seed, split, batch_rows, machine)
    return run_eval(given, out, trained_on, allow_leaks)


def compare(
    a: Annotated[Path, Argument(metavar="A", help="Results of `shoal eval`: their folder, or tasks.parquet.")],
    b: Annotated[Path, Argument(metavar="B", help="Others, of another model.")],
    force: Annotated[bool, Option("--force", help="Compare what is not about the same.")] = False,
    seed: Annotated[int, Option(min=0, max=2**31, help="Of the resampling.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Say whether B is better than A, task by task, with an interval and a significance test."""
    import json

    from shoal.evaluation import job
    from shoal.evaluation.compare import compare as compared
    from shoal.evaluation.compare import comparison_lines
    from shoal.evaluation.records import read_results

    first, second = read_results(a, job.TASKS), read_results(b, job.TASKS)
    found = compared(first, second, force, seed)
    echo(json.dumps(found.as_json(), indent=2) if as_json else "\n".join(comparison_lines(first, second, found)))


def filter_tasks(
    model: options.Model,
    data: Annotated[str, Argument(metavar="DATA", help=TASKS)],
    out: Annotated[Path, Option(metavar="FILE.parquet", help="The data set to write.")],
    samples: options.Samples = 8,
    keep: Annotated[str, Option(metavar="LOW:HIGH", help="Pass rates to keep.")] = "0.125:0.5",
    everything: Annotated[bool, Option("--all", help="Keep all rows, with their rates.")] = False,
    name: Annotated[str | None, Option(help="Of the new columns: solve_rate_NAME. (default: the model's)")] = None,
    tasks: options.Tasks = 0,
    temperature: options.Temperature = None,
    max_new_tokens: options.MaxTokens = None,
    seed: options.Seed = 0,
    split: Annotated[str | None, Option(help="held_out, train or all. (default: train; all of a data file)")] = None,
    overrides: options.EnvironmentSettings = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_rows: options.BatchRows = 256,
) -> None:
    """Measure how often a model solves each task, and write those within a band. The same command continues."""
    from shoal.cli.measuring import Given, run_filter, work_of
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
    run_filter(given, out, band, everything, name)


def sft(
    model: options.Model,
    data: Annotated[list[Path], Option("--data", metavar="FILE", help=DATA)],
    out: Annotated[Path, Option(metavar="FOLDER", help="The model to write.")],
    env: Annotated[str | None, Option(metavar="SPEC", help=ENV)] = None,
    settings: Annotated[list[str] | None, Option("--set", metavar="trainer.KEY=VALUE", help=SET)] = None,
    epochs: Annotated[int, Option(min=1, max=10_000, help="Passes over all of them.")] = 1,
    steps: Annotated[int | None, Option(min=1, help="Steps, instead of epochs.")] = None,
    batch: Annotated[int, Option(min=1, help="Demonstrations per step.")] = 32,
    validation: Annotated[int | None, Option(min=0, help="Not trained on. (default: 5 %, at most 256)")] = None,
    seed: options.Seed = 0,
    chat: Annotated[bool | None, Option(help="Ask by its chat template. (default: if it has one)")] = None,
    max_tokens: Annotated[int | None, Option(min=2, help="Longest. (default: the model's context)")] = None,
    require: Annotated[list[str] | None, Option(metavar="FORM", help=FORM)] = None,
    verify: Annotated[bool, Option("--verify", help="Only what the environment of --env rewards.")] = False,
    min_reward: Annotated[float, Option(help="Least reward, with --verify.")] = 1.0,
    rank: Annotated[Path | None, Option(metavar="FOLDER", help="A sequence classifier that ranks them.")] = None,
    best: Annotated[float | None, Option(min=1e-6, max=1, help="Share to keep, by rank.")] = None,
) -> None:
    """Train a model on demonstrations, chosen by filters, before RL. The same command resumes."""
    stop = stop_on_signals()  # what follows takes a while to load
    from shoal.cli.sft import WarmStartRequest
    from shoal.run.sources import model_source
    from shoal.trainer.demonstrations.selection import FilterOptions, Interrupted, Schedule

    choice = FilterOptions(max_tokens, tuple(require or ()), verify, min_reward, rank, best, chat)
    request = WarmStartRequest(out, env, choice, Schedule(epochs, steps, batch, seed, validation), stop)
    request.open(data, settings or ())
    with model_source(model) as found:
        try:
            if stop.is_set():
                raise Interrupted
            raise Exit(request.train(found))
        except Interrupted:
            echo("stopped before training; to continue, give the same command again", err=True)
            raise Exit(STOPPED_CODE) from None
