"""The loop of an evaluation: draw a batch, score it, write it down.

    tasks, batch by batch ─► Sampler (this thread) ─► scorer (one thread beside it) ─► journal ─► results
                                   │ draws batch n+1 while batch n is scored

Batches follow from the plan alone. A batch is written down whole, in order, so that an evaluation that was killed has
lost at most two of them, draws those again beside the same neighbours, and ends with the same results to the last bit.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from shoal.environments import Environment, Score, Task, budget_of
from shoal.environments.data.prompts import prompt_digest
from shoal.environments.mix import part_of
from shoal.errors import DeadlineExceeded, ScoringFailure, UnusableTask
from shoal.evaluation.drawing import Drawn, Sampled, Sampler
from shoal.evaluation.journal import Journal
from shoal.evaluation.plan import Plan, tasks_of
from shoal.evaluation.records import SampleRecord, TaskRecord
from shoal.rewards import Job, Scorer
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

Report = Callable[[int, int], None]
"""Told how many tasks are done, and of how many."""


@dataclass(frozen=True)
class Chosen:
    """The tasks that an evaluation is of: an environment's split, and their numbers in it."""

    environment: Environment
    plan: Plan
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


class Measurement:
    """One evaluation under way."""

    def __init__(self, chosen: Chosen, sampler: Sampler, scorer: Scorer, journal: Journal) -> None:
        self._chosen = chosen
        self._sampler = sampler
        self._scorer = scorer
        self._journal = journal
        self._budget = budget_of(chosen.environment)
        self._failures = 0

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
                    pending = executor.submit(self._scored, drawn)
                self._keep(pending, report)
            except DeadlineExceeded:
                if not stop.is_set():
                    raise
                log.info("told to stop while a batch was scored: it is drawn again when this goes on")
        return self._journal.batches == self._chosen.batches

    def _keep(self, pending: Future[list[TaskRecord]] | None, report: Report) -> None:
        if pending is not None:
            self._journal.append(pending.result())
            size = self._chosen.plan.tasks_per_batch
            report(min(self._journal.batches * size, len(self._chosen.numbers)), len(self._chosen.numbers))

    def _drawn(self, number: int) -> list[tuple[int, Drawn | None]]:
        batch = self._chosen.batch(number)
        drawn = iter(self._sampler.draw([(index, task) for index, task in batch if task is not None]))
        return [(index, None if task is None else next(drawn)) for index, task in batch]

    def _scored(self, batch: Sequence[tuple[int, Drawn | None]]) -> list[TaskRecord]:
        jobs = [Job(d.task.id, s.text) for _, d in batch if d is not None for s in d.samples]
        scores = iter(self._scorer.scores(jobs))
        return [self._record(index, drawn, scores) for index, drawn in batch]

    def _record(self, index: int, drawn: Drawn | None, scores: Iterator[object]) -> TaskRecord:
        if drawn is None:
            return TaskRecord(f"#{index}", index, "", problem="its row cannot be used")
        task = drawn.task
        return TaskRecord(
            task=task.id,
            index=index,
            prompt_digest=prompt_digest(self._asked(drawn)).hex(),
            kind=task.kind,
            part=part_of(self._chosen.environment, task.id),
            problem=drawn.problem,
            samples=tuple(self._sample(drawn, sampled, next(scores)) for sampled in drawn.samples),
            prompt=task.prompt if self._chosen.plan.keep_text else "",
        )

    def _asked(self, drawn: Drawn) -> str:
        """The prompt as it was asked: with another seed a task may be asked for another length."""
        if self._budget is None or drawn.target is None:
            return drawn.task.prompt
        return self._budget.ask(drawn.task, drawn.target).prompt

    def _sample(self, drawn: Drawn, sampled: Sampled, score: object) -> SampleRecord:
        text = sampled.text if self._chosen.plan.keep_text else ""
        nothing = SampleRecord(None, sampled.tokens, sampled.finish, text=text)
        if not isinstance(score, Score):
            self._failed(drawn.task, score)
            return nothing
        if not math.isfinite(score.value):
            self._failed(drawn.task, ScoringFailure(f"the score is {score.value}"))
            return nothing
        value, parts = score.value, {str(k): float(v) for k, v in score.parts.items() if math.isfinite(v)}
        if self._budget is not None and drawn.target is not None:
            ended = self._budget.settings.count_eos and sampled.finish == "eos"
            worth = self._budget.worth(score, drawn.target, sampled.tokens + ended)
            parts |= {"reward": worth.value, "target": float(drawn.target)}
        return SampleRecord(value, sampled.tokens, sampled.finish, parts, text)

    def _failed(self, task: Task, why: object) -> None:
        """Say it once: the rest is counted."""
        self._failures += 1
        if self._failures == 1:
            log.warning("a completion of task %s could not be scored, which is no sample: %s", task.id, why)
