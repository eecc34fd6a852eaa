"""What `shoal eval` and `shoal filter` do: open model and tasks, measure, say what came out, write what is kept."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.environments import Environment, EnvironmentSettings, build
from shoal.environments.data.locating import locate
from shoal.environments.data.readers import DataTable
from shoal.errors import ConfigError, ScoringFailure, UserError
from shoal.evaluation import filter as filtering
from shoal.evaluation import job
from shoal.evaluation.filter import RateBand
from shoal.evaluation.plan import PARTS, Leaks, SamplingPlan, archived_ids, find_leaks
from shoal.evaluation.records import UNUSABLE, dumped
from shoal.evaluation.subject import EngineChoice, open_subject, plain_name
from shoal.evaluation.summary import MAX_FAILURES, missing_lines, summary_of, table_lines
from shoal.models import BUILTIN, model_folder, read_config, read_files
from shoal.run.sources import CommandTasks, ModelSource, model_source, scorable, task_source
from shoal.runtime import STOPPED_CODE, FolderLock, count_of, stop_on_signals
from shoal.shardcast.cast import Terminal

RESCORE = "score them again: shoal eval --rescore {}"
DEFAULT_TOKENS = 1024


@dataclass(frozen=True)
class Given:
    model: str
    source: CommandTasks
    samples: int
    tasks: int
    temperature: float | None
    max_new_tokens: int | None
    stop: tuple[str, ...] | None
    seed: int
    split: str | None
    batch_rows: int
    machine: tuple[str, str, str]
    terminal: Terminal
    environment: Environment = field(init=False)

    def __post_init__(self) -> None:
        """Mistakes on the command line, and tasks that cannot be scored here, are told before a model is loaded."""
        self.plan(None)
        object.__setattr__(self, "environment", scorable(self.source))

    def plan(self, positions: int | None) -> SamplingPlan:
        """What was left open is taken from the recipe, or from what the model has room for."""
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
            stop=self.stop if self.stop is not None else recipe.run.stop if recipe else (),
        )  # fmt: skip

    def opened(
        self, look: Callable[[job.ChosenTasks, ModelSource], Leaks], allow_leaks: bool = False
    ) -> tuple[job.EvaluationJob, Leaks]:
        """Model and tasks, without the tasks that leaked; refused if there are some and `allow_leaks` is not set."""
        with model_source(self.model) as model:
            positions = read_config(read_files(model_folder(model.where))).get("max_position_embeddings")
            plan = self.plan(positions if isinstance(positions, int) and positions > 0 else None)
            chosen = job.choose(self.environment, plan)
            leaks = look(chosen, model)
            if not allow_leaks:
                leaks.refuse()
            chosen = job.without(chosen, leaks.known) if leaks.known else chosen
            subject = open_subject(model.name, model.where, EngineChoice(*self.machine), plan.rows)
        return job.EvaluationJob(subject, chosen, self.source.settings, leaks.known), leaks


def worked(
    terminal: Terminal, what: str, folder: Path, source: CommandTasks, environment: Environment,
    work: Callable[..., Any], kept: str = "what is done is kept in {}, and the same command continues",
) -> Any:  # fmt: skip
    """The result of `work(processes, folder, stop, report)`; None if it was stopped."""
    stop = stop_on_signals()
    with FolderLock(folder).acquire(stop), terminal.metered(what, "tasks") as report:
        terminal.note(f"{what}, in {folder}")  # the first batch may take minutes
        found = work(partial(source.scoring, environment, stop), folder, stop, report)
    if found is None:
        terminal.note(f"stopped; {kept.format(folder)}")
    return found


def run_eval(given: Given, out: Path | None, trained_on: str | None, allow_leaks: bool) -> int:
    source, terminal, untold = given.source, given.terminal, [given.model not in BUILTIN]

    def look(chosen: job.ChosenTasks, model: ModelSource) -> Leaks:
        untold.append(model.run is None and trained_on is None and chosen.plan.split != "train")
        if trained_on is not None:
            training = task_source(trained_on)
        elif model.run is not None and chosen.plan.split != "train":
            training = CommandTasks(model.run.recipe.environment, run=model.run)
        else:
            return Leaks()
        ids = archived_ids(training.run.path / "trainer" / "rollouts") if training.run else set[str]()
        return find_leaks((task for _, task in chosen.tasks()), build(training.settings), sorted(ids))

    evaluation, leaks = given.opened(look, allow_leaks)
    if out is None:  # a folder that follows from what is evaluated: the same command finds it again
        digest = hashlib.sha256(dumped(evaluation.about)).hexdigest()
        out = Path("evals") / f"{plain_name(evaluation.subject.name)}-{plain_name(source.label)}-{digest[:8]}"
    if is_done := (summary := job.finished(out, evaluation.about)) is not None:
        terminal.note(f"this evaluation is done already: {out}")
    else:
        work = partial(job.evaluate, evaluation)
        summary = worked(terminal, "evaluating", out, source, evaluation.chosen.environment, work)
        if summary is None:
            return STOPPED_CODE
    terminal.say(about_results(summary, source.label, leaks, out))
    if all(untold):
        terminal.say("  leaks were not looked for: --trained-on names the run or recipe that the model was trained by")
    if not is_done:
        terminal.say(f"wrote {out}")
    refuse_if_hollow(summary, source, RESCORE.format(out), f"remove {out} and evaluate again")
    return 0


def run_rescore(out: Path, env: str | None, overrides: Sequence[str], terminal: Terminal) -> int:
    if not out.is_dir():
        raise UserError(f"--rescore {out}: there is no such folder")
    if env is not None:
        source = task_source(env, overrides)
    elif overrides:
        raise UserError(f"--set {overrides[0]}: say with --env what it changes")
    else:
        try:
            source = CommandTasks(EnvironmentSettings.model_validate_json((out / job.ENVIRONMENT).read_bytes()))
        except (OSError, ValueError) as error:
            raise UserError(f"{out / job.ENVIRONMENT} cannot be read: say with --env what the tasks are") from error
    environment = scorable(source)
    rescoring = partial(job.rescore, source.settings, environment)
    summary = worked(terminal, "scoring", out, source, environment, rescoring, "{} is as it was")
    if summary is None:
        return STOPPED_CODE
    terminal.say(about_results(summary, source.label, Leaks(tuple(summary["left_out"])), out))
    if not summary["left_out"] and summary["model"]["name"] not in BUILTIN and summary["plan"]["split"] != "train":
        terminal.say("  leaks were not looked for by scoring again: shoal eval --trained-on looks for them")
    scored = f"{summary['scored_tasks']:,} of {summary['chosen']['tasks']:,} tasks"
    continues = f"{out} has new scores of {scored}; the command that drew these continues from there"
    terminal.say(f"wrote {out}" if (out / job.SUMMARY).exists() else continues)
    refuse_if_hollow(summary, source, RESCORE.format(out), f"remove {out} and evaluate again")
    return 0


def about_results(summary: dict[str, Any], tasks: str, leaks: Leaks, out: Path) -> str:
    model, environment, plan = summary["model"], summary["environment"], summary["plan"]
    heat = "greedy" if plan["temperature"] == 0 else f"temperature {plan['temperature']:g}, seed {plan['seed']}"
    subject = f"{model['name']} ({model['digest'][:12]}) on {tasks} ({environment['digest'][:12]}, {plan['split']})"
    lines = [f"{subject}, {heat}, at most {plan['max_new_tokens']} tokens", *table_lines(summary)]
    lines += [f"  {RESCORE.format(out)}"] if summary["unscored"]["samples"] else []
    lines += [f"  left out: {leaks.sentence}"] if leaks.known else []
    if plan["split"] == "train":
        lines.append("  these are training tasks: the numbers say nothing about unseen ones")
    return "\n".join(lines)


def refuse_if_hollow(summary: dict[str, Any], source: CommandTasks, rescore: str, again: str) -> None:
    """Results of which much is missing are no success. Unusable rows are no failure where bad_rows = "skip"."""
    share, unusable = summary["unscored"]["share"], summary["problems"].get(UNUSABLE, 0)
    if share > MAX_FAILURES:
        remedy = rescore if summary["unscored"]["samples"] else again
        why = f"{share:.1%} of the samples have no score, more than {MAX_FAILURES:.0%}"
        mislead = "these numbers are of what is left and may mislead"
        raise ScoringFailure(f"{why}: {mislead}; fix what the lines above name, then {remedy}")
    if unusable > MAX_FAILURES * summary["tasks"] and not source.skips_rows:
        why = f"{unusable:,} of {summary['tasks']:,} rows cannot be used, more than {MAX_FAILURES:.0%}"
        skip = "to leave them out: --set environment.options.bad_rows=skip"
        raise ScoringFailure(f"{why}: shoal data check lists them; {skip}")


def work_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.work")


def run_filter(given: Given, out: Path, band: RateBand, everything: bool, name: str | None) -> int:
    source, terminal, data = given.source, given.terminal, filtering.data_of(given.environment)
    if data is not None and data.options.held_out is not None and given.split != "train":
        raise ConfigError("the held-out tasks are in a file of their own: filter that file, or give --split train")
    evaluation, _ = given.opened(lambda *_: Leaks())
    name, path = plain_name(name or evaluation.subject.name), source.settings.data
    column = filtering.rate_columns(name)[0]
    about = {**evaluation.about, "band": str(band), "all": everything, "column": column}
    if filtering.written_before(out, about):
        terminal.note(f"this is done already: {out}")
        return 0
    table = None if data is None or path is None else DataTable(locate(path, data.options.split))
    if table is not None:
        filtering.refuse_taken(table.columns, name)
    work = work_of(out)
    environment, plan = evaluation.chosen.environment, evaluation.chosen.plan
    journal = worked(terminal, "filtering", work, source, environment, partial(job.measure, evaluation))
    if journal is None:
        return STOPPED_CODE
    rates = filtering.rates_by_row(environment, plan.split, journal.records())
    terminal.say(f"pass rates of {len(rates):,} tasks, {plan.samples} samples each:")
    summary = summary_of(plan, journal.records())
    terminal.say("\n".join([*filtering.histogram_lines(rates, plan.samples, band), *missing_lines(summary)]))
    if not rates:
        raise ConfigError("no task could be measured: nothing was written; fix what the lines above name")
    kept = None if everything else band
    if table is None:
        rows = filtering.task_rows(environment, plan.split, rates, kept, name)
    else:
        rows = filtering.original_rows(table, rates, kept, name)
    count, inside = filtering.write_rows(out, rows, about), sum(band.holds(rate.value) for rate in rates.values())
    terminal.say(f"{inside:,} of {len(rates):,} tasks are solved in {band.low:.1%} to {band.high:.1%}")
    if count == 0:
        again = "the same command with another band needs no new samples"
        raise ConfigError(f"no task is within --pass-rate {band}: nothing was written; {again}")
    again = f"remove {out} and filter again"
    if summary["unscored"]["samples"]:
        again = f"{RESCORE.format(work)}, then {again}: no new samples are drawn"
        terminal.say(f"  {again}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    terminal.say(f"wrote {out}: {count_of(count, 'row')}; the rate is the column {column}")
    refuse_if_hollow(summary, source, again, again)
    return 0
