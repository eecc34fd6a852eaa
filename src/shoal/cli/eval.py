"""`shoal eval`, `compare`, `filter` and `sft`: what they are given; `run.models` does the work."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

from shoal.cli import options
from shoal.errors import ConfigError, UserError
from shoal.runtime import STOPPED_CODE, extras, stop_on_signals

ENV = "The environment whose held-out tasks are left out, and which verifies; as `shoal eval --env`."
SET = "Change a setting of the trainer (rate, clip, memory, …), or environment.KEY. Repeatable."
FORM = "Keep completions whose last message has this: thinking, boxed, answer, or a pattern. Repeatable."
TASKS = "The tasks: a data file or folder, FORMAT:FILE, a recipe, or an environment's name."
SPLIT = "The part of the tasks: held_out, train or all. (default: {}; all of a data file)"
RESULTS = "The folder for results. (default: evals/MODEL-ENV-…)"
RESCORE = "Score the completions that are kept in this folder again; only --env and --set go with it."
TRAINED_ON = "What the model was trained on, to look for leaks: a recipe or a run. (default: of a run, its own)"
ALLOW = "Leave out tasks that are in the training set, instead of refusing to measure."
DATA = "Demonstrations: JSON lines, Parquet, a folder, ORG/NAME; columns messages, prompt and completion, or text."
BAND = "Keep tasks that are solved at rates from LOW to HIGH."
COLUMN = "The new columns are solve_rate_NAME and so on. (default: the model's name)"
A = "The results of one model, written by `shoal eval`: their folder, or tasks.parquet."
VALIDATION = "How many demonstrations to measure on instead. (default: 5 %, at most 256)"
CHAT = "Use the model's chat template for prompts. (default: if it has one)"
LONGEST = "Leave out demonstrations of more tokens. (default: the model's context)"
VERIFY = "Keep only demonstrations that the environment of --env rewards."
BEST = "The share to keep, by rank, for example 0.5."


def evaluate(
    model: options.OptionalModel = None,
    env: Annotated[str | None, options.value("--env", "SPEC", options.SPEC_HELP)] = None,
    samples: options.Samples = 1,
    tasks: options.Tasks = 0,
    temperature: options.Temperature = None,
    max_new_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    seed: options.Seed = 0,
    split: Annotated[str | None, options.value("--split", "PART", SPLIT.format("held_out"))] = None,
    out: Annotated[Path | None, options.value("--out", "FOLDER", RESULTS)] = None,
    rescore: Annotated[Path | None, options.value("--rescore", "FOLDER", RESCORE)] = None,
    trained_on: Annotated[str | None, options.value("--trained-on", "SPEC", TRAINED_ON)] = None,
    allow_leaks: Annotated[bool, Option("--allow-leaks", help=ALLOW)] = False,
    overrides: options.EnvironmentSettings = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_rows: options.BatchRows = 256,
) -> None:
    """Measure a model: avg@k and pass@k with confidence intervals. A Parquet file has the results by task. The same
    command resumes after Ctrl-C."""
    extras.require("trainer", "shoal eval")
    from shoal.cli.printing import CommandTerminal
    from shoal.evaluation.records import refuse_unusable
    from shoal.run.models.measuring import Given, run_eval, run_rescore
    from shoal.run.sources import task_source

    if rescore is not None:
        if model is not None:
            raise UserError(f"--rescore {rescore} needs no model: leave {model} out")
        refused = {
            "--samples": samples != 1, "--tasks": tasks, "--temperature": temperature is not None, "--out": out,
            "--max-new-tokens": max_new_tokens is not None, "--stop": stop, "--seed": seed, "--split": split,
            "--trained-on": trained_on, "--allow-leaks": allow_leaks,
        }  # fmt: skip
        if wrong := [name for name, value in refused.items() if value]:
            raise UserError(f"--rescore {rescore} scores what is kept there: give it without {' and '.join(wrong)}")
        raise Exit(run_rescore(rescore, env, overrides or (), CommandTerminal()))
    if model is None or env is None:
        raise UserError("give a MODEL and --env SPEC, or --rescore FOLDER (see: shoal eval --help)")
    refuse_unusable(out or Path("evals", "results"))
    source, kind, terminal = task_source(env, overrides or ()), (engine, device, dtype), CommandTerminal()
    stops = options.stops(stop)
    sampled = (samples, tasks, temperature, max_new_tokens, stops, seed, split, batch_rows)
    given = Given(model, source, *sampled, kind, terminal)
    raise Exit(run_eval(given, out, trained_on, allow_leaks))


def compare(
    a: Annotated[Path, Argument(metavar="A", help=A)],
    b: Annotated[Path, Argument(metavar="B", help="The results of the other model.")],
    force: Annotated[bool, Option("--force", help="Compare results that differ in tasks or settings.")] = False,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Compare two models task by task, with a confidence interval and a significance test."""
    extras.require("data", "shoal compare")
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
    out: Annotated[Path, options.value("--out", "FILE.parquet", "The data set to write.")],
    samples: options.Samples = 8,
    keep: Annotated[str, options.value("--pass-rate", "LOW:HIGH", BAND)] = "0.125:0.5",
    everything: Annotated[bool, Option("--all", help="Keep all rows, with their rates.")] = False,
    name: Annotated[str | None, options.value("--name", "NAME", COLUMN)] = None,
    tasks: options.Tasks = 0,
    temperature: options.Temperature = None,
    max_new_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    seed: options.Seed = 0,
    split: Annotated[str | None, options.value("--split", "PART", SPLIT.format("train"))] = None,
    overrides: options.EnvironmentSettings = None,
    engine: options.Engine = "torch",
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_rows: options.BatchRows = 256,
) -> None:
    """Measure how often a model solves each task, and write the tasks that are neither too easy nor too hard. The same
    command resumes after Ctrl-C."""
    extras.require("trainer", "shoal filter")
    from shoal.cli.printing import CommandTerminal
    from shoal.evaluation.filter import RateBand, written_before
    from shoal.evaluation.records import refuse_unusable
    from shoal.run.models.measuring import Given, run_filter, work_of
    from shoal.run.sources import task_source

    band, stops = RateBand.parse(keep), options.stops(stop)
    if out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: the result is a Parquet file; let its name end in .parquet")
    written_before(out)  # what is somebody else's, or cannot be written, is refused before a model is loaded
    refuse_unusable(work_of(out))
    source = task_source(data, overrides or ())
    part = split or ("all" if source.whole else "train")  # held-out rows of a recipe must stay out of training
    machine, terminal = (engine, device, dtype), CommandTerminal()
    sampled = (samples, tasks, temperature, max_new_tokens, stops, seed, part, batch_rows)
    given = Given(model, source, *sampled, machine, terminal)
    raise Exit(run_filter(given, out, band, everything, name))


def sft(
    model: options.Model,
    data: Annotated[list[Path], options.value("--data", "FILE", DATA)],
    out: Annotated[Path, options.value("--out", "FOLDER", "The folder of the model to write.")],
    env: Annotated[str | None, options.value("--env", "SPEC", ENV)] = None,
    settings: Annotated[list[str] | None, options.value("--set", "trainer.KEY=VALUE", SET)] = None,
    epochs: Annotated[int, options.whole("--epochs", "How often to train on all demonstrations.", 1, 10_000)] = 1,
    steps: Annotated[int | None, options.whole("--steps", "Train this many steps instead of epochs.", 1)] = None,
    batch: Annotated[int, options.whole("--batch", "Demonstrations per step.", 1)] = 32,
    validation: Annotated[int | None, options.whole("--validation", VALIDATION)] = None,
    seed: options.Seed = 0,
    chat: Annotated[bool | None, Option("--chat/--no-chat", help=CHAT)] = None,
    max_tokens: Annotated[int | None, options.whole("--max-tokens", LONGEST, 2)] = None,
    require: Annotated[list[str] | None, options.value("--require", "FORM", FORM)] = None,
    verify: Annotated[bool, Option("--verify", help=VERIFY)] = False,
    min_reward: Annotated[float, options.value("--min-reward", "REWARD", "With --verify: the least reward.")] = 1.0,
    rank: Annotated[Path | None, options.value("--rank", "FOLDER", "A sequence classifier that ranks them.")] = None,
    best: Annotated[float | None, options.number("--best", "SHARE", BEST, 1e-6, 1)] = None,
) -> None:
    """Train a model on demonstrations that filters choose, before reinforcement learning. After Ctrl-C the same command
    resumes."""
    stop = stop_on_signals()  # what follows takes a while to load
    extras.require("trainer", "shoal sft")
    from shoal.cli.printing import CommandTerminal
    from shoal.run.models.warm_start import WarmStartRequest
    from shoal.run.sources import model_source
    from shoal.trainer.demonstrations.selection import FilterOptions, Schedule, SelectionInterrupted

    choice = FilterOptions(max_tokens, tuple(require or ()), verify, min_reward, rank, best, chat)
    request = WarmStartRequest(
        out, env, choice, Schedule(epochs, steps, batch, seed, validation), stop, CommandTerminal()
    )
    request.open(data, settings or ())
    with model_source(model) as found:
        try:
            if stop.is_set():
                raise SelectionInterrupted
            raise Exit(request.train(found))
        except SelectionInterrupted:
            echo("stopped before training; to continue, give the same command again", err=True)
            raise Exit(STOPPED_CODE) from None
