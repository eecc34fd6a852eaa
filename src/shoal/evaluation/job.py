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
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
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
from shoal.errors import DeadlineExceeded, EnvironmentSetupError, ModelError, ScoringFailure, UnusableTask
from shoal.evaluation.plan import SamplingPlan, as_asked, length_target, sample_seed, tasks_of
from shoal.evaluation.records import (
    UNUSABLE,
    EvaluationJournal,
    SampleRecord,
    TaskRecord,
    dumped,
    is_kept,
    write_records,
)  # fmt: skip
from shoal.evaluation.subject import EvaluatedModel, memory_errors
from shoal.evaluation.summary import SummaryTally
from shoal.protocol import SamplingParameters
from shoal.rewards import Job, Scorer
from shoal.rewards.protocol import settled
from shoal.runtime.files import resource_error, sync_folder, write_atomically
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

ENVIRONMENT = "environment.json"
TASKS = "tasks.parquet"
SUMMARY = "summary.json"
Report = Callable[[int, int], None]
"""Told how many tasks are done, and of how many."""


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
        return [(index, self._task(index)) for index in self.numbers[number * size : (number + 1) * size]]

    def _task(self, index: int) -> Task | None:
        try:
            return tasks_of(self.environment, self.plan.split)[index]
        except UnusableTask as error:
            log.warning("a task of %s is left out: %s", self.environment.name, error)
            return None

    @property
    def digest(self) -> str:
        """Which numbers these are, in 16 letters."""
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
    """Draws `plan.samples` completions of each task given. Which tasks come together changes no dice."""

    def __init__(self, subject: EvaluatedModel, environment: Environment, plan: SamplingPlan) -> None:
        self._engine = subject.engine
        self._asking = Asking(subject.files, environment, plan.max_new_tokens)
        self._tokenizer = self._asking.encoder.tokenizer
        self._environment = environment
        self._plan = plan
        self._sampling = SamplingParameters(
            temperature=plan.temperature or 1.0,  # greedy decoding does not look at it
            max_new_tokens=plan.max_new_tokens,
            eos_token_id=self._tokenizer.eos_token_id,
        )
        self._talks = Talks(environment, subject.files, self._sampling)

    def draw(self, tasks: Sequence[tuple[int, Task]]) -> list[Drawn]:
        """One result per (number, task), in order."""
        prompts = [self._prompt(number, task) for number, task in tasks]
        usable = [place for place, (_, problem) in enumerate(prompts) if not problem]
        asked = [(tasks[place][1], prompts[place][0], self._talks.of(tasks[place][1])) for place in usable]
        with memory_errors("draw these completions"):
            found = self._greedy(asked) if self._plan.temperature == 0 else self._sample(asked)
        drawn = dict(zip(usable, found, strict=True))
        return [Drawn(task, prompts[place][1], drawn.get(place, ())) for place, (_, task) in enumerate(tasks)]

    def _prompt(self, number: int, task: Task) -> tuple[tuple[int, ...], str]:
        """Token ids, or what is wrong with the prompt."""
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

    def _greedy(self, asked: Sequence[Asked]) -> list[tuple[SampleRecord, ...]]:
        """As validators and the trainer answer held-out tasks."""
        prompts, talks = [ids for _task, ids, _talk in asked], [talk for _task, _ids, talk in asked]
        lines = greedy_lines(self._engine, prompts, talks, self._sampling)
        return [(self._sampled(line.tokens, line.finish, line.given),) for line in lines]

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
        self._environment = environment
        self._plan = plan
        self._scorer = scorer
        self._budget = budget_of(environment)
        self._failed = False

    def scored(self, records: Sequence[TaskRecord]) -> list[TaskRecord]:
        jobs = [Job(record.task, sample.text) for record in records for sample in record.samples]
        scores = iter(settled(self._scorer.scores, jobs))
        return [
            replace(record, samples=tuple(self._sample(record, sample, next(scores)) for sample in record.samples))
            for record in records
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
    """One evaluation under way."""

    def __init__(self, chosen: Chosen, sampler: Sampler, scorer: Scorer, journal: EvaluationJournal) -> None:
        self._chosen = chosen
        self._sampler = sampler
        self._scoring = RecordScoring(chosen.environment, chosen.plan, scorer)
        self._journal = journal

    def run(self, stop: StopToken, report: Report = lambda _done, _total: None) -> bool:
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
        records = [self._record(index, None if task is None else next(drawn)) for index, task in batch]
        self._journal.append_drawn(records)
        return records

    def _record(self, index: int, drawn: Drawn | None) -> TaskRecord:
        if drawn is None:
            return TaskRecord(f"#{index}", index, "", problem=UNUSABLE)
        task, environment = drawn.task, self._chosen.environment
        return TaskRecord(
            task=task.id,
            index=index,
            prompt_digest=prompt_digest(as_asked(environment, self._chosen.plan, index, task).prompt).hex(),
            kind=task.kind,
            part=part_of(environment, task.id),
            problem=drawn.problem,
            samples=drawn.samples,
            prompt=task.prompt,
        )


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
    if not (out.is_dir() and is_kept(out, about) and (out / SUMMARY).exists() and (out / TASKS).exists()):
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
    _write_parquet(journal.folder / TASKS, journal, about)
    summary = {**about, **SummaryTally.of(plan, journal.records()).as_json()}
    write_atomically(journal.folder / SUMMARY, dumped(summary))
    journal.remove()
    return summary


def _write_parquet(path: Path, journal: EvaluationJournal, about: dict[str, Any]) -> None:
    hidden = path.with_name(f".{path.name}.writing")
    try:
        write_records(hidden, journal.records(), about)
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        hidden.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise resource_error("write", path, error) from error
