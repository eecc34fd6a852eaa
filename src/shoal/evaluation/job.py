"""One evaluation from beginning to end: what it is of, its folder, its results.

out/evaluation.json   model, environment, plan: what the results are of
out/environment.json  the settings of the environment, to score again by
out/progress.jsonl    while it runs
out/tasks.parquet     every task, with the text, score, parts, tokens and end of each of its samples
out/summary.json      the numbers
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.environments import Environment, EnvironmentSettings, Task, identity_of
from shoal.errors import ConfigError, DeadlineExceeded, EnvironmentSetupError, UnusableTask
from shoal.evaluation.drawing import Sampler
from shoal.evaluation.journal import EvaluationJournal, difference, dumped, read_identity, refuse_foreign
from shoal.evaluation.measuring import Chosen, Report, RunningEvaluation
from shoal.evaluation.plan import SamplingPlan, tasks_of
from shoal.evaluation.records import write_records
from shoal.evaluation.subject import EvaluatedModel
from shoal.evaluation.summary import SummaryTally
from shoal.rewards import Scorer
from shoal.runtime.files import resource_error, sync_folder, write_atomically
from shoal.runtime.stop import StopToken

ENVIRONMENT = "environment.json"
TASKS = "tasks.parquet"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class EvaluationJob:
    """What is evaluated: a model on tasks of an environment, by a plan. `left_out` are ids of leaked tasks.

    `settings` are those of the environment, kept for whoever scores again.
    """

    subject: EvaluatedModel
    chosen: Chosen
    left_out: tuple[str, ...] = ()
    settings: EnvironmentSettings | None = None

    @property
    def about(self) -> dict[str, Any]:
        """All that the results depend on: two evaluations with the same one have the same results."""
        return {
            "shoal": __version__,
            "model": {"name": self.subject.name, "digest": self.subject.digest, "engine": self.subject.engine.kind},
            "environment": asdict(identity_of(self.chosen.environment)),
            "plan": self.chosen.plan.as_json(),
            "left_out": list(self.left_out),
            "chosen": {"tasks": len(self.chosen.numbers), "digest": self.chosen.digest},
        }


def choose(environment: Environment, plan: SamplingPlan) -> Chosen:
    """The tasks that the plan asks for; a split without any is an `EnvironmentSetupError`."""
    available = len(tasks_of(environment, plan.split))
    if available == 0:
        other = "train" if plan.split == "held_out" else "held_out"
        raise EnvironmentSetupError(
            f"environment {environment.name} has no {plan.split} tasks; evaluate the others with --split {other}"
        )
    return Chosen(environment, plan, plan.chosen(available))


def chosen_tasks(chosen: Chosen) -> Sequence[tuple[int, Task]]:
    """The tasks themselves, those that cannot be used left out."""
    found = []
    split = tasks_of(chosen.environment, chosen.plan.split)
    for index in chosen.numbers:
        try:
            found.append((index, split[index]))
        except UnusableTask:
            continue
    return found


def without(chosen: Chosen, ids: Sequence[str]) -> Chosen:
    """The same tasks but those of the given ids."""
    leaked = {index for index, task in chosen_tasks(chosen) if task.id in set(ids)} if ids else set[int]()
    kept = [index for index in chosen.numbers if index not in leaked]
    if not kept:
        raise EnvironmentSetupError(
            f"nothing of environment {chosen.environment.name} is left to evaluate: all of it is in the training set; "
            "evaluate other tasks"
        )
    return Chosen(chosen.environment, chosen.plan, kept)


def finished(out: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of this very evaluation, if it is done; results of another one are a `ConfigError`."""
    stored = read_identity(out) if out.is_dir() else None
    if stored is None:
        if out.is_dir():
            refuse_foreign(out)
        return None
    if stored != json.loads(dumped(about)):
        raise ConfigError(f"{out} holds another evaluation: {difference(stored, about)}")
    if not ((out / SUMMARY).exists() and (out / TASKS).exists()):
        return None
    summary: dict[str, Any] = json.loads((out / SUMMARY).read_bytes())
    return summary


def evaluate(
    evaluation: EvaluationJob,
    scorer: Callable[[], Scorer],
    out: Path,
    stop: StopToken,
    report: Report = lambda _done, _total: None,
) -> dict[str, Any] | None:
    """Run it, or the rest of it; the summary, or None if it was told to stop before the end."""
    journal = measure(evaluation, scorer, out, stop, report)
    return None if journal is None else write_results(evaluation.about, evaluation.chosen.plan, journal)


def measure(
    evaluation: EvaluationJob, scorer: Callable[[], Scorer], out: Path, stop: StopToken, report: Report
) -> EvaluationJournal | None:
    """Draw and score what `out` does not have yet; None if it was told to stop before the end."""
    journal = EvaluationJournal(out)
    journal.open(evaluation.about)
    if evaluation.settings is not None:
        write_atomically(out / ENVIRONMENT, evaluation.settings.model_dump_json().encode())
    chosen = evaluation.chosen
    report(min(journal.batches * chosen.plan.tasks_per_batch, len(chosen.numbers)), len(chosen.numbers))
    if journal.batches == chosen.batches:
        return journal
    sampler = Sampler(evaluation.subject, chosen.environment, chosen.plan)
    try:
        processes = scorer()
    except DeadlineExceeded:
        if stop.is_set():
            return None
        raise
    with closing(processes) as started:
        done = RunningEvaluation(chosen, sampler, started, journal).run(stop, report)
    return journal if done else None


def write_results(about: dict[str, Any], plan: SamplingPlan, journal: EvaluationJournal) -> dict[str, Any]:
    """The Parquet file, then the summary, then the journal goes: a crash in between loses nothing."""
    write_parquet(journal.folder / TASKS, journal, about)
    summary = {**about, **SummaryTally.of(plan, journal.records()).as_json()}
    write_atomically(journal.folder / SUMMARY, dumped(summary))
    journal.remove()
    return summary


def write_parquet(path: Path, journal: EvaluationJournal, about: dict[str, Any]) -> None:
    hidden = path.with_name(f".{path.name}.writing")
    try:
        write_records(hidden, journal.records(), about)
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        hidden.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise resource_error("write", path, error) from error
