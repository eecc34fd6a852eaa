"""The loop of an evaluation: draw a batch, keep it, score it, keep the scores.

    tasks, batch by batch ─► Sampler (this thread) ─► journal ─► scorer (one thread beside it) ─► journal ─► results
                                   │ draws batch n+1 while batch n is scored

Batches follow from the plan alone. A batch is kept whole, in order, so that an evaluation that was killed has lost at
most the one that it was drawing, draws it again beside the same neighbours, and ends with the same results to the last
bit.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from msgspec.structs import replace

from shoal.environments import Environment, Score, Task, budget_of
from shoal.environments.mix import part_of
from shoal.environments.questions import prompt_digest
from shoal.errors import DeadlineExceeded, ScoringFailure, UnusableTask
from shoal.evaluation.drawing import Drawn, Sampler
from shoal.evaluation.journal import EvaluationJournal
from shoal.evaluation.plan import SamplingPlan, as_asked, length_target, tasks_of
from shoal.evaluation.records import UNUSABLE, SampleRecord, TaskRecord
from shoal.rewards import Job, Scorer
from shoal.rewards.protocol import settled
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

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


class RecordScoring:
    """Scores completions that were drawn, now or again later: all that it needs is in their records."""

    def __init__(self, environment: Environment, plan: SamplingPlan, scorer: Scorer) -> None:
        self._environment = environment
        self._plan = plan
        self._scorer = scorer
        self._budget = budget_of(environment)
        self._failures = 0

    def scored(self, records: Sequence[TaskRecord]) -> list[TaskRecord]:
        jobs = [Job(record.task, sample.text) for record in records for sample in record.samples]
        scores = iter(settled(self._scorer.scores, jobs))
        return [
            replace(record, samples=tuple(self._sample(record, sample, next(scores)) for sample in record.samples))
            for record in records
        ]

    def _sample(self, record: TaskRecord, sample: SampleRecord, score: Score | ScoringFailure) -> SampleRecord:
        if isinstance(score, ScoringFailure) or not math.isfinite(score.value):
            self._failed(record.task, score if isinstance(score, ScoringFailure) else f"the score is {score.value}")
            return replace(sample, score=None, parts={})
        parts = {str(k): float(v) for k, v in score.parts.items() if math.isfinite(v)}
        target = length_target(self._environment, self._plan, record.index)
        if self._budget is not None and target is not None:
            ended = self._budget.settings.count_eos and sample.finish == "eos"
            worth = self._budget.worth(score, target, sample.tokens + ended)
            parts |= {"reward": worth.value, "target": float(target)}
        return replace(sample, score=score.value, parts=parts)

    def _failed(self, task: str, why: object) -> None:
        """Say it once: the rest is counted."""
        self._failures += 1
        if self._failures == 1:
            log.warning("a completion of task %s is unscored: %s", task, why)


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
