"""Kept completions, scored again by the environment as it is now: no model is needed.

    out/progress.jsonl, else out/tasks.parquet ─► records ─► scorer ─► a journal beside them ─► takes their place
                                                    │
                         a task that is asked in other words now: its completions answer something else

Nothing is replaced before everything is scored. An evaluation that is not finished, or a filter's, has its scores
replaced as far as it is, and its own command continues from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shoal.environments import Environment, EnvironmentSettings, identity_of
from shoal.environments.mix import part_of
from shoal.environments.questions import prompt_digest
from shoal.errors import ConfigError, DeadlineExceeded, EnvironmentSetupError
from shoal.evaluation.job import ENVIRONMENT, SUMMARY, TASKS, RecordScoring, Report, write_results
from shoal.evaluation.plan import SamplingPlan, as_asked
from shoal.evaluation.records import IDENTITY, EvaluationJournal, TaskRecord, dumped, read_identity, read_records
from shoal.evaluation.summary import SummaryTally
from shoal.rewards import Scorer
from shoal.runtime.files import write_atomically
from shoal.runtime.stop import StopToken

RESCORED = ".rescored.jsonl"


def kept_settings(out: Path) -> EnvironmentSettings:
    """The environment that the completions in `out` were scored by."""
    try:
        return EnvironmentSettings.model_validate_json((out / ENVIRONMENT).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / ENVIRONMENT} cannot be read: say with --env what the tasks are") from error


def rescore(
    out: Path, settings: EnvironmentSettings, environment: Environment, scorer: Callable[[], Scorer], stop: StopToken,
    report: Report = lambda _done, _total: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Score everything that `out` keeps; the summary, or None if it was told to stop: then nothing has changed."""
    stored, plan = _stored(out)
    journal, fresh = EvaluationJournal(out), EvaluationJournal(out, RESCORED)
    journal.open(stored)
    fresh.remove()
    total = stored["chosen"]["tasks"]
    report(0, total)
    try:
        with closing(scorer()) as started:
            scoring = RecordScoring(environment, plan, started)
            for batch in _batches(out, journal, plan):
                fresh.append_drawn(records := [_as_now(environment, plan, record) for record in batch])
                fresh.append_scored(scoring.scored(records))
                report(min(fresh.batches * plan.tasks_per_batch, total), total)
    except BaseException as error:
        fresh.remove()
        if isinstance(error, DeadlineExceeded) and stop.is_set():
            return None
        raise
    return _replaced(journal, fresh, {**stored, "environment": asdict(identity_of(environment))}, plan, settings)


def _stored(out: Path) -> tuple[dict[str, Any], SamplingPlan]:
    stored = read_identity(out)
    if stored is None:
        raise ConfigError(f"{out} holds no evaluation: give the folder that shoal eval wrote, or FILE.work of a filter")
    try:
        return stored, SamplingPlan(**stored["plan"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{out} was written by another version of shoal: evaluate again") from error


def _batches(out: Path, journal: EvaluationJournal, plan: SamplingPlan) -> Iterator[Sequence[TaskRecord]]:
    """What was drawn, in the batches that it was drawn in."""
    if journal.drawn:
        yield from journal.kept()
        return
    if not (out / TASKS).exists():
        raise ConfigError(f"{out} keeps no completions: nothing was drawn before this evaluation ended; run it again")
    records = read_records(out / TASKS)
    while batch := tuple(islice(records, plan.tasks_per_batch)):
        yield batch


def _as_now(environment: Environment, plan: SamplingPlan, record: TaskRecord) -> TaskRecord:
    """The record with what the environment says of its task now; a task with another prompt is a `ConfigError`."""
    if not record.samples:
        return record
    try:
        task = environment.task(record.task)
        asked = prompt_digest(as_asked(environment, plan, record.index, task).prompt).hex()
    except EnvironmentSetupError as error:
        raise ConfigError(f"the environment has no task {record.task} any more ({error}): evaluate again") from error
    if asked != record.prompt_digest:
        raise ConfigError(
            f"task {record.task} has another prompt now than its completions were drawn for: undo that change, or "
            "evaluate again"
        )
    return replace(record, kind=task.kind, part=part_of(environment, task.id))


def _replaced(
    journal: EvaluationJournal,
    fresh: EvaluationJournal,
    about: dict[str, Any],
    plan: SamplingPlan,
    settings: EnvironmentSettings,
) -> dict[str, Any]:
    """The new scores in the place of the old ones. Killed in between, the same command continues from the new ones."""
    out = journal.folder
    is_whole = fresh.batches == -(-about["chosen"]["tasks"] // plan.tasks_per_batch)
    journal.replace(fresh)
    (out / SUMMARY).unlink(missing_ok=True)
    write_atomically(out / IDENTITY, dumped(about))
    write_atomically(out / ENVIRONMENT, settings.model_dump_json().encode())
    if is_whole and (out / TASKS).exists():
        return write_results(about, plan, journal)
    summary: dict[str, Any] = json.loads(dumped({**about, **SummaryTally.of(plan, journal.records()).as_json()}))
    return summary
