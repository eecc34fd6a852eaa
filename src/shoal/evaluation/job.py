"""One evaluation from beginning to end: what it is of, its folder, its results.

    tasks, batch by batch ─► Sampler (this thread) ─► journal ─► scorer (one thread beside it) ─► journal ─► results
                                   │ draws batch n+1 while batch n is scored

    out/evaluation.json   model, environment, plan: what the results are of
    out/environment.json  the settings of the environment, to score again by
    out/progress.jsonl    while it runs
    out/tasks.parquet     every task, with the text, score, parts, tokens and end of each of its samples
    out/summary.json      the numbers

Batches follow from the plan alone. A batch is kept whole, in order, so that an evaluation that was killed has lost at
most the one that it was drawing, draws it again beside the same neighbours, and ends with the same results to the last
bit. A prompt that the model cannot take (too long, characters that it does not know) is a problem of that task only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shoal import __version__
from shoal.engines import GenerationRequest
from shoal.engines.asking import Asking, CannotBeAsked
from shoal.engines.dialogue import Dialogue, Talks, greedy_lines
from shoal.environments import Environment, EnvironmentSettings, Score, Task, budget_of, identity_of
from shoal.environments.mix import part_of
from shoal.environments.questions import prompt_digest
from shoal.errors import ConfigError, DeadlineExceeded, EnvironmentSetupError, ModelError, ScoringFailure, UnusableTask
from shoal.evaluation import records
from shoal.evaluation.plan import SamplingPlan, as_asked, length_target, sample_seed, tasks_of
from shoal.evaluation.records import UNUSABLE, EvaluationJournal, SampleRecord, TaskRecord, dumped
from shoal.evaluation.subject import EvaluatedModel, memory_errors
from shoal.evaluation.summary import SummaryTally
from shoal.protocol import SamplingParameters
from shoal.rewards import Job, Scorer
from shoal.rewards.protocol import settled
from shoal.runtime.files import write_atomically
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

ENVIRONMENT = "environment.json"
TASKS = "tasks.parquet"
SUMMARY = "summary.json"
Report = Callable[[int, int], None]
"""Told how many tasks are done, and of how many."""


def unreported(_done: int, _total: int) -> None:
    """Nobody wants to know how far it is."""


@dataclass(frozen=True)
class Chosen:
    """The tasks that an evaluation is of: an environment's split, and their numbers in it."""

    environment: Environment
    plan: SamplingPlan
    numbers: Sequence[int]

    @property
    def batches(self) -> int:
        return -(-len(self.numbers) // self.plan.tasks_per_batch)

    def batch(self, number: int) -> list[tuple[int, Task | None]]:
        """The tasks of one batch by their numbers; None for one that cannot be used."""
        size = self.plan.tasks_per_batch
        return list(self._found(self.numbers[number * size : (number + 1) * size]))

    def tasks(self) -> list[tuple[int, Task]]:
        return [(index, task) for index, task in self._found(self.numbers, logging.DEBUG) if task is not None]

    def _found(self, numbers: Sequence[int], level: int = logging.WARNING) -> Iterator[tuple[int, Task | None]]:
        tasks = tasks_of(self.environment, self.plan.split)
        for index in numbers:
            try:
                yield index, tasks[index]
            except UnusableTask as error:
                log.log(level, "a task of %s is left out: %s", self.environment.name, error)
                yield index, None

    @property
    def digest(self) -> str:
        return hashlib.sha256(",".join(map(str, self.numbers)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Drawn:
    """What was drawn for a task; nothing, and why, where `problem` says so."""

    task: Task
    problem: str = ""
    samples: tuple[SampleRecord, ...] = ()


Asked = tuple[Task, tuple[int, ...], Dialogue | None]
"""A task, its token ids, and what answers its turns."""


class Sampler:
    """Draws `plan.samples` completions of each task given. Which tasks come together changes no seed."""

    def __init__(self, subject: EvaluatedModel, environment: Environment, plan: SamplingPlan) -> None:
        self._engine = subject.engine
        self._asking = Asking(subject.files, environment, plan.max_new_tokens)
        self._tokenizer = self._asking.encoder.tokenizer
        self._environment, self._plan = environment, plan
        temperature, eos = plan.temperature or 1.0, self._tokenizer.eos_token_id  # greedy decoding ignores it
        self._sampling = SamplingParameters(
            temperature=temperature, max_new_tokens=plan.max_new_tokens, eos_token_id=eos
        )
        self._talks = Talks(environment, subject.files, self._sampling)

    def draw(self, tasks: Sequence[tuple[int, Task]]) -> list[Drawn]:
        prompts = [self._prompt(number, task) for number, task in tasks]
        usable = [place for place, (_, problem) in enumerate(prompts) if not problem]
        asked = [(tasks[place][1], prompts[place][0], self._talks.of(tasks[place][1])) for place in usable]
        found: list[tuple[SampleRecord, ...]]
        with memory_errors("draw these completions"):
            if self._plan.temperature:
                found = self._sample(asked)
            else:  # as validators and the trainer answer held-out tasks
                prompt_ids, talks = [ids for _task, ids, _talk in asked], [talk for _task, _ids, talk in asked]
                lines = greedy_lines(self._engine, prompt_ids, talks, self._sampling)
                found = [(self._sampled(line.tokens, line.finish, line.given),) for line in lines]
        drawn = dict(zip(usable, found, strict=True))
        return [Drawn(task, prompts[place][1], drawn.get(place, ())) for place, (_, task) in enumerate(tasks)]

    def _prompt(self, number: int, task: Task) -> tuple[tuple[int, ...], str]:
        try:
            return self._asking.ids(as_asked(self._environment, self._plan, number, task)), ""
        except CannotBeAsked as error:
            return (), error.reason
        except ModelError:
            return (), "the model's chat template refuses the prompt"

    def _sample(self, asked: Sequence[Asked]) -> list[tuple[SampleRecord, ...]]:
        plan, requests, owners = self._plan, [], []
        for owner, (task, ids, talk) in enumerate(asked):
            seeds = tuple(sample_seed(plan.seed, task.id, sample) for sample in range(plan.samples))
            for start in range(0, len(seeds), plan.rows):  # an engine decodes a request whole, whatever memory it takes
                some, respond = seeds[start : start + plan.rows], None if talk is None else talk.respond
                requests.append(GenerationRequest(ids, some, self._sampling, respond=respond))
                owners.append(owner)
        found: list[list[SampleRecord]] = [[] for _ in asked]
        for owner, group in zip(owners, self._engine.generate(requests), strict=True):
            found[owner] += [self._sampled(one.token_ids.tolist(), one.finish, one.given) for one in group]
        return [tuple(samples) for samples in found]

    def _sampled(self, ids: list[int], finish: str, given: Sequence[tuple[int, int]]) -> SampleRecord:
        """Not scored yet: the text that is scored (of a dialogue, the model's last turn), and how many tokens the model
        drew but for the one that ended it."""
        ended = ids[-1:] == [self._tokenizer.eos_token_id]
        last = sum(given[-1]) if given else 0
        drawn = len(ids) - sum(length for _, length in given) - ended
        return SampleRecord(None, drawn, finish, text=self._tokenizer.decode(ids[last:]))


class RecordScoring:
    """Scores completions that were drawn, now or again later: all that it needs is in their records."""

    def __init__(self, environment: Environment, plan: SamplingPlan, scorer: Scorer) -> None:
        self._environment, self._plan, self._scorer = environment, plan, scorer
        self._budget, self._failed = budget_of(environment), False

    def scored(self, drawn: Sequence[TaskRecord]) -> list[TaskRecord]:
        jobs = [Job(record.task, sample.text) for record in drawn for sample in record.samples]
        scores = iter(settled(self._scorer.scores, jobs))
        return [
            replace(record, samples=tuple(self._sample(record, sample, next(scores)) for sample in record.samples))
            for record in drawn
        ]

    def _sample(self, record: TaskRecord, sample: SampleRecord, score: Score | ScoringFailure) -> SampleRecord:
        if isinstance(score, ScoringFailure) or not math.isfinite(score.value):
            if not self._failed:  # say it once: the rest is counted
                why = score if isinstance(score, ScoringFailure) else f"the score is {score.value}"
                log.warning("a completion of task %s is unscored: %s", record.task, why)
            self._failed = True
            return replace(sample, score=None, parts={})
        parts = {str(k): float(v) for k, v in score.parts.items() if math.isfinite(v)}
        target = length_target(self._environment, self._plan, record.index)
        if self._budget is not None and target is not None:
            ended = self._budget.settings.count_eos and sample.finish == "eos"
            worth = self._budget.worth(score, target, sample.tokens + ended)
            parts |= {"reward": worth.value, "target": float(target)}
        return replace(sample, score=score.value, parts=parts)


class RunningEvaluation:
    def __init__(self, chosen: Chosen, sampler: Sampler, scorer: Scorer, journal: EvaluationJournal) -> None:
        self._chosen, self._sampler, self._journal = chosen, sampler, journal
        self._scoring = RecordScoring(chosen.environment, chosen.plan, scorer)

    def run(self, stop: StopToken, report: Report = unreported) -> bool:
        """Draw and score what is not done yet; false if it was told to stop before the end."""
        with ThreadPoolExecutor(1, "scoring") as executor:
            pending: Future[list[TaskRecord]] | None = None
            try:
                for number in range(self._journal.batches, self._chosen.batches):
                    if stop.is_set():
                        break
                    drawn = self._drawn(number)
                    scored, pending = pending, None
                    self._keep(scored, report)
                    pending = executor.submit(self._scoring.scored, drawn)
                self._keep(pending, report)
            except DeadlineExceeded:
                if not stop.is_set():
                    raise
                log.info("told to stop while a batch was scored: its completions are kept")
        return self._journal.batches == self._chosen.batches

    def _keep(self, pending: Future[list[TaskRecord]] | None, report: Report) -> None:
        if pending is not None:
            self._journal.append_scored(pending.result())
            size = self._chosen.plan.tasks_per_batch
            report(min(self._journal.batches * size, len(self._chosen.numbers)), len(self._chosen.numbers))

    def _drawn(self, number: int) -> Sequence[TaskRecord]:
        """The completions of a batch: those that are kept, or new ones, which are kept now."""
        if number < self._journal.drawn:
            return self._journal.waiting(number)
        batch = self._chosen.batch(number)
        drawn = iter(self._sampler.draw([(index, task) for index, task in batch if task is not None]))
        found = [self._record(index, None if task is None else next(drawn)) for index, task in batch]
        self._journal.append_drawn(found)
        return found

    def _record(self, index: int, drawn: Drawn | None) -> TaskRecord:
        if drawn is None:
            return TaskRecord(f"#{index}", index, "", problem=UNUSABLE)
        task, environment = drawn.task, self._chosen.environment
        digest = prompt_digest(as_asked(environment, self._chosen.plan, index, task).prompt).hex()
        part, found = part_of(environment, task.id), drawn.samples
        return TaskRecord(task.id, index, digest, task.kind, part, drawn.problem, found, task.prompt)


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


def without(chosen: Chosen, ids: Sequence[str]) -> Chosen:
    leaked = {index for index, task in chosen.tasks() if task.id in set(ids)} if ids else set[int]()
    kept = [index for index in chosen.numbers if index not in leaked]
    if not kept:
        raise EnvironmentSetupError(
            f"nothing of environment {chosen.environment.name} is left to evaluate: all of it is in the training set; "
            "evaluate other tasks"
        )
    return Chosen(chosen.environment, chosen.plan, kept)


def finished(out: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of this very evaluation, if it is done; results of another one are a `ConfigError`."""
    if not (out.is_dir() and records.is_kept(out, about) and (out / SUMMARY).exists() and (out / TASKS).exists()):
        return None
    summary: dict[str, Any] = json.loads((out / SUMMARY).read_bytes())
    return summary


def evaluate(
    evaluation: EvaluationJob, scorer: Callable[[], Scorer], out: Path, stop: StopToken, report: Report = unreported
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
    with records.whole(journal.folder / TASKS) as hidden:
        records.write_records(hidden, journal.records(), about)
    summary = {**about, **SummaryTally.of(plan, journal.records()).as_json()}
    write_atomically(journal.folder / SUMMARY, dumped(summary))
    journal.remove()
    return summary


# Kept completions, scored again by the environment as it is now: no model is needed
#
#   out/progress.jsonl, else out/tasks.parquet ─► records ─► scorer ─► a journal beside them ─► takes their place
#                                                   │
#                        a task that is asked in other words now: its completions answer something else
#
# Nothing is replaced before everything is scored. An evaluation that is not finished, or a filter's, has its scores
# replaced as far as it is, and its own command continues from there.

RESCORED = ".rescored.jsonl"


def kept_settings(out: Path) -> EnvironmentSettings:
    try:
        return EnvironmentSettings.model_validate_json((out / ENVIRONMENT).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / ENVIRONMENT} cannot be read: say with --env what the tasks are") from error


def rescore(
    out: Path, settings: EnvironmentSettings, environment: Environment, scorer: Callable[[], Scorer], stop: StopToken,
    report: Report = unreported,
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
                fresh.append_drawn(drawn := [_as_now(environment, plan, record) for record in batch])
                fresh.append_scored(scoring.scored(drawn))
                report(min(fresh.batches * plan.tasks_per_batch, total), total)
    except BaseException as error:
        fresh.remove()
        if isinstance(error, DeadlineExceeded) and stop.is_set():
            return None
        raise
    # The new scores in the place of the old ones. Killed in between, the same command continues from the new ones.
    about = {**stored, "environment": asdict(identity_of(environment))}
    is_whole = fresh.batches == -(-about["chosen"]["tasks"] // plan.tasks_per_batch)
    journal.replace(fresh)
    (out / SUMMARY).unlink(missing_ok=True)
    write_atomically(out / records.IDENTITY, dumped(about))
    write_atomically(out / ENVIRONMENT, settings.model_dump_json().encode())
    if is_whole and (out / TASKS).exists():
        return write_results(about, plan, journal)
    summary: dict[str, Any] = json.loads(dumped({**about, **SummaryTally.of(plan, journal.records()).as_json()}))
    return summary


def _stored(out: Path) -> tuple[dict[str, Any], SamplingPlan]:
    stored = records.read_identity(out)
    if stored is None:
        raise ConfigError(f"{out} holds no evaluation: give the folder that shoal eval wrote, or FILE.work of a filter")
    try:
        return stored, SamplingPlan(**stored["plan"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{out} was written by another version of shoal: evaluate again") from error


def _batches(out: Path, journal: EvaluationJournal, plan: SamplingPlan) -> Iterator[Sequence[TaskRecord]]:
    if journal.drawn:
        yield from journal.kept()
        return
    if not (out / TASKS).exists():
        raise ConfigError(f"{out} keeps no completions: nothing was drawn before this evaluation ended; run it again")
    kept = records.read_records(out / TASKS)
    while batch := tuple(islice(kept, plan.tasks_per_batch)):
        yield batch


def _as_now(environment: Environment, plan: SamplingPlan, record: TaskRecord) -> TaskRecord:
    """The record with what the environment says of its task now; a task with another prompt is a `ConfigError`."""
    if not record.samples:
        return record
    try:
        task = environment.task(record.task)
        asked = prompt_digest(as_asked(environment, plan, record.index, task).prompt).hex()
    except EnvironmentSetupError as error:
        raise ConfigError(
            f"the environment has no task {record.task} ({error}): give --env what it was drawn from, or evaluate again"
        ) from error
    if asked != record.prompt_digest:
        raise ConfigError(
            f"task {record.task} has another prompt now than its completions were drawn for: undo that change, or "
            "evaluate again"
        )
    return replace(record, kind=task.kind, part=part_of(environment, task.id))
