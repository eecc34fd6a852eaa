"""Runs an evaluation: draws completions, scores them, writes the results.

    tasks, batch by batch ─► Sampler (this thread) ─► journal ─► scorer (a second thread) ─► journal ─► results
                                   │ draws batch n+1 while batch n is scored

    out/environment.json   the settings of the environment, for scoring again; `records` has the journal's files
    out/tasks.parquet      every task, with text, score, parts, tokens and end of each sample
    out/summary.json       the figures

Batches follow from the plan alone and are stored in order. An evaluation that was killed loses at most one batch, draws
it again in the same composition, and ends with the same results bit for bit.
"""

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
from shoal.engines.dialogue import Talks, greedy_lines
from shoal.environments import Environment, EnvironmentSettings, Score, Task, budget_of, identity_of
from shoal.environments.mix import part_of
from shoal.environments.protocol import prompt_digest, reads_tokens
from shoal.errors import ConfigError, DeadlineExceeded, EnvironmentSetupError, ModelError, ScoringFailure, UnusableTask
from shoal.evaluation import records as kept
from shoal.evaluation.plan import SamplingPlan, as_asked, length_target, sample_seed, tasks_of
from shoal.evaluation.records import EvaluationJournal, SampleRecord, TaskRecord, dumped, write_records
from shoal.evaluation.subject import EvaluatedModel, memory_errors
from shoal.evaluation.summary import summary_of
from shoal.protocol import SamplingParameters
from shoal.rewards import Job, Scorer
from shoal.rewards.pool import score_all
from shoal.runtime import StopToken, sync_folder, write_atomically

log = logging.getLogger(__name__)
ENVIRONMENT, TASKS, SUMMARY = "environment.json", "tasks.parquet", "summary.json"
Report = Callable[[int, int], None]  # tasks done, tasks in all


@dataclass(frozen=True)
class ChosenTasks:
    environment: Environment
    plan: SamplingPlan
    numbers: Sequence[int]

    @property
    def batches(self) -> int:
        return -(-len(self.numbers) // self.plan.tasks_per_batch)

    def batch(self, number: int) -> list[tuple[int, Task | None]]:
        """The tasks of a batch with their numbers; None for a task that cannot be used."""
        size = self.plan.tasks_per_batch
        return list(self._found(self.numbers[number * size : (number + 1) * size], logging.WARNING))

    def tasks(self) -> list[tuple[int, Task]]:
        return [(index, task) for index, task in self._found(self.numbers, logging.DEBUG) if task is not None]

    def _found(self, numbers: Sequence[int], level: int) -> Iterator[tuple[int, Task | None]]:
        tasks = tasks_of(self.environment, self.plan.split)
        for index in numbers:
            try:
                yield index, tasks[index]
            except UnusableTask as error:
                log.log(level, "a task of %s is left out: %s", self.environment.name, error)
                yield index, None


def choose(environment: Environment, plan: SamplingPlan) -> ChosenTasks:
    if (available := len(tasks_of(environment, plan.split))) == 0:
        other = "train" if plan.split == "held_out" else "held_out"
        raise EnvironmentSetupError(f"environment {environment.name} has no {plan.split} tasks; try --split {other}")
    return ChosenTasks(environment, plan, plan.chosen(available))


def without(chosen: ChosenTasks, ids: Sequence[str]) -> ChosenTasks:
    leaked = {index for index, task in chosen.tasks() if task.id in ids} if ids else set[int]()
    if not (left := [index for index in chosen.numbers if index not in leaked]):
        name = chosen.environment.name
        raise EnvironmentSetupError(f"nothing of environment {name} is left: all of it is in the training set")
    return ChosenTasks(chosen.environment, chosen.plan, left)


class Sampler:
    def __init__(self, subject: EvaluatedModel, environment: Environment, plan: SamplingPlan) -> None:
        self._engine, self._environment, self._plan = subject.engine, environment, plan
        self._asking = Asking(subject.files, environment, plan.max_new_tokens)
        self._tokenizer = self._asking.encoder.tokenizer
        self._sampling = SamplingParameters(
            temperature=plan.temperature or 1.0,  # greedy decoding ignores it
            max_new_tokens=plan.max_new_tokens, eos_token_ids=self._tokenizer.eos_token_ids, stop=plan.stop,
        )  # fmt: skip
        self._talks = Talks(environment, subject.files, self._sampling)

    def draw(self, tasks: Sequence[tuple[int, Task | None]]) -> list[TaskRecord]:
        """Records without scores, in order; a task that cannot be asked has a problem instead of samples."""
        records: list[TaskRecord] = []
        asked: dict[int, tuple[Task, tuple[int, ...]]] = {}
        for place, (index, task) in enumerate(tasks):
            if task is None:
                records.append(TaskRecord(f"#{index}", index, "", problem=kept.UNUSABLE))
                continue
            wanted, problem = as_asked(self._environment, self._plan, index, task), ""
            try:
                asked[place] = task, self._asking.ids(wanted)
            except CannotBeAsked as error:
                problem = error.reason
            except ModelError:
                problem = "the model's chat template refuses the prompt"
            digest, part = prompt_digest(wanted.prompt).hex(), part_of(self._environment, task.id)
            records.append(TaskRecord(task.id, index, digest, task.kind, part, problem, prompt=task.prompt))
        with memory_errors("draw these completions"):
            if self._plan.temperature:
                drawn = self._sample(list(asked.values()))
            else:  # as validators and the trainer answer held-out tasks
                talks = [self._talks.of(task) for task, _ in asked.values()]
                prompts, sampling, decode = [ids for _, ids in asked.values()], self._sampling, self._talks.decode
                lines = greedy_lines(self._engine, prompts, talks, sampling, decode)
                drawn = [[self._record(line.tokens, line.finish, line.given)] for line in lines]
        for place, samples in zip(asked, drawn, strict=True):
            records[place] = replace(records[place], samples=tuple(samples))
        return records

    def _sample(self, asked: Sequence[tuple[Task, tuple[int, ...]]]) -> list[list[SampleRecord]]:
        plan, requests, owners = self._plan, list[GenerationRequest](), list[int]()
        for owner, (task, ids) in enumerate(asked):
            talk = self._talks.of(task)
            seeds = tuple(sample_seed(plan.seed, task.id, sample) for sample in range(plan.samples))
            for start in range(0, len(seeds), plan.rows):  # an engine decodes all rows of a request at once
                some, respond = seeds[start : start + plan.rows], None if talk is None else talk.respond
                requests.append(
                    GenerationRequest(ids, some, self._sampling, respond=respond, decode=self._talks.decode)
                )
                owners.append(owner)
        found: list[list[SampleRecord]] = [[] for _ in asked]
        for owner, group in zip(owners, self._engine.generate(requests), strict=True):
            found[owner] += [self._record(one.token_ids.tolist(), one.finish, one.given) for one in group]
        return found

    def _record(self, ids: list[int], finish: str, given: Sequence[tuple[int, int]]) -> SampleRecord:
        """A sample without a score: its text (of a dialogue, the last turn), and its tokens without end-of-sequence."""
        ended = len(ids) > 0 and ids[-1] in self._tokenizer.eos_token_ids
        drawn = len(ids) - sum(length for _, length in given) - ended
        last = sum(given[-1]) if given else 0
        said = tuple(ids[last : len(ids) - ended]) if reads_tokens(self._environment) else None
        return SampleRecord(None, drawn, finish, text=self._tokenizer.decode(ids[last:]), token_ids=said)


def scored(chosen: ChosenTasks, scorer: Scorer, drawn: Sequence[TaskRecord]) -> list[TaskRecord]:
    budget, failures = budget_of(chosen.environment), list[str]()
    jobs = [Job(record.task, sample.text, sample.token_ids) for record in drawn for sample in record.samples]
    scores = iter(score_all(scorer.scores, jobs))

    def sample_of(record: TaskRecord, sample: SampleRecord, score: Score | ScoringFailure) -> SampleRecord:
        if isinstance(score, ScoringFailure) or not math.isfinite(score.value):
            why = score if isinstance(score, ScoringFailure) else f"the score is {score.value}"
            failures.append(f"a completion of task {record.task} is unscored: {why}")
            return sample
        parts = {str(name): float(value) for name, value in score.parts.items() if math.isfinite(value)}
        target = length_target(chosen.environment, chosen.plan, record.index)
        if budget is not None and target is not None:
            ended = budget.count_eos and sample.finish == "eos"
            parts |= {"reward": budget.worth(score, target, sample.tokens + ended).value, "target": float(target)}
        return replace(sample, score=score.value, parts=parts)

    records = [
        replace(record, samples=tuple(sample_of(record, sample, next(scores)) for sample in record.samples))
        for record in drawn
    ]
    if failures:
        log.warning("%s", failures[0])  # the others are only counted
    return records


@dataclass(frozen=True)
class EvaluationJob:
    """`settings` are the environment's, stored for scoring again; `left_out` are ids of leaked tasks."""

    subject: EvaluatedModel
    chosen: ChosenTasks
    settings: EnvironmentSettings
    left_out: tuple[str, ...] = ()

    @property
    def about(self) -> dict[str, Any]:
        digest = hashlib.sha256(",".join(map(str, self.chosen.numbers)).encode()).hexdigest()
        return {
            "shoal": __version__,
            "model": {"name": self.subject.name, "digest": self.subject.digest, "engine": self.subject.engine.kind},
            "environment": asdict(identity_of(self.chosen.environment)), "plan": asdict(self.chosen.plan),
            "left_out": list(self.left_out), "chosen": {"tasks": len(self.chosen.numbers), "digest": digest[:16]},
        }  # fmt: skip


def measure(
    evaluation: EvaluationJob, scorer: Callable[[], Scorer], out: Path, stop: StopToken, report: Report
) -> EvaluationJournal | None:
    """Draw and score what `out` does not have yet; None if it was stopped."""
    journal, chosen = EvaluationJournal(out), evaluation.chosen
    journal.open(evaluation.about)
    write_atomically(out / ENVIRONMENT, evaluation.settings.model_dump_json().encode())

    def keep(pending: Future[list[TaskRecord]] | None) -> None:
        if pending is not None:
            journal.keep_scores(pending.result())
        report(min(journal.scores.batches * chosen.plan.tasks_per_batch, len(chosen.numbers)), len(chosen.numbers))

    keep(None)
    if journal.scores.batches == chosen.batches:
        return journal
    sampler = Sampler(evaluation.subject, chosen.environment, chosen.plan)
    unscored = islice(journal.completions, journal.scores.batches, None)
    try:
        with closing(scorer()) as processes, ThreadPoolExecutor(1, "scoring") as executor:
            pending: Future[list[TaskRecord]] | None = None
            for number in range(journal.scores.batches, chosen.batches):
                if stop.is_set():
                    break
                if (drawn := next(unscored, None)) is None:
                    drawn = sampler.draw(chosen.batch(number))
                    journal.completions.append(drawn)
                keep(pending)
                pending = executor.submit(scored, chosen, processes, drawn)
            keep(pending)
    except DeadlineExceeded:
        if not stop.is_set():
            raise
    return journal if journal.scores.batches == chosen.batches else None


def evaluate(
    evaluation: EvaluationJob, scorer: Callable[[], Scorer], out: Path, stop: StopToken,
    report: Report = lambda _done, _total: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Run an evaluation, or the rest of it; the summary, or None if it was stopped."""
    journal = measure(evaluation, scorer, out, stop, report)
    return None if journal is None else _write_results(evaluation.about, evaluation.chosen.plan, journal)


def _write_results(about: dict[str, Any], plan: SamplingPlan, journal: EvaluationJournal) -> dict[str, Any]:
    """Write the Parquet file, then the summary, then remove the scores: a crash in between loses nothing."""
    with kept.whole(journal.folder / TASKS) as hidden:
        write_records(hidden, journal.records(), about)
    summary = {**about, **summary_of(plan, journal.records())}
    write_atomically(journal.folder / SUMMARY, dumped(summary))
    journal.scores.path.unlink(missing_ok=True)
    return summary


def rescore(
    settings: EnvironmentSettings, environment: Environment, scorer: Callable[[], Scorer], out: Path, stop: StopToken,
    report: Report = lambda _done, _total: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Score stored completions again; None if it was stopped. Nothing is replaced before all are scored. An unfinished
    evaluation, or a filter, is continued by its own command."""
    stored = kept.read_identity(out)
    try:
        plan, total = SamplingPlan(**stored["plan"]), stored["chosen"]["tasks"]
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{out} was written by another version of shoal: evaluate again") from error
    chosen = ChosenTasks(environment, plan, range(total))
    journal, fresh = EvaluationJournal(out), EvaluationJournal(out, ".rescored.jsonl")
    journal.completions.open(chosen.batches)
    if not journal.completions.batches:
        raise ConfigError(f"{out} keeps no completions: run the evaluation again")
    report(0, total)
    try:
        fresh.scores.open(0)
        with closing(scorer()) as processes:
            for drawn in journal.completions:
                _refuse_other_prompts(chosen, drawn)
                fresh.keep_scores(scored(chosen, processes, drawn))
                report(min(fresh.scores.batches * plan.tasks_per_batch, total), total)
        # After a crash from here on, the same command finds scores of this environment, or none
        for old in (journal.scores.path, out / SUMMARY):
            old.unlink(missing_ok=True)
        about = {**stored, "environment": asdict(identity_of(environment))}
        write_atomically(out / kept.IDENTITY, dumped(about))
        write_atomically(out / ENVIRONMENT, settings.model_dump_json().encode())
        fresh.scores.path.replace(journal.scores.path)
        sync_folder(out)
    except DeadlineExceeded:
        if not stop.is_set():
            raise
        return None
    finally:
        fresh.scores.path.unlink(missing_ok=True)
    if (out / TASKS).exists() and fresh.scores.batches == chosen.batches:
        return _write_results(about, plan, journal)
    return {**about, **summary_of(plan, journal.records())}


def _refuse_other_prompts(chosen: ChosenTasks, drawn: Sequence[TaskRecord]) -> None:
    for record in drawn:
        if reads_tokens(chosen.environment) and any(sample.token_ids is None for sample in record.samples):
            why = "a reward function asks for completion_ids now, and these completions were stored without"
            raise ConfigError(f"{why}: evaluate again")
        try:
            task = chosen.environment.task(record.task) if record.samples else None
        except EnvironmentSetupError as error:
            raise ConfigError(f"the environment has no task {record.task} now ({error}): evaluate again") from error
        if task is not None:
            asked = as_asked(chosen.environment, chosen.plan, record.index, task).prompt
            if prompt_digest(asked).hex() != record.prompt_digest:
                raise ConfigError(f"task {record.task} has another prompt now: undo that change, or evaluate again")


def finished(out: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of this evaluation, if it is finished; results of another one are a `ConfigError`."""
    if not (out.is_dir() and kept.is_kept(out, about) and (out / SUMMARY).exists() and (out / TASKS).exists()):
        return None
    summary: dict[str, Any] = json.loads((out / SUMMARY).read_bytes())
    return summary
