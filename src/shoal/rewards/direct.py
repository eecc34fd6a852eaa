"""Scoring in this process: no limits, nothing to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.environments import Environment, ObjectingEnvironment, Score, Task
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.rewards.protocol import Job

Result = TypeVar("Result", Score, str)


@dataclass(frozen=True)
class DirectScorer:
    """Implements `Scorer` by calling the environment."""

    environment: Environment

    def scores(self, jobs: Sequence[Job]) -> list[Score | ScoringFailure]:
        results = {job: self._call(self.environment.score, job) for job in dict.fromkeys(jobs)}
        return [results[job] for job in jobs]

    def objections(self, jobs: Sequence[Job]) -> list[str | ScoringFailure]:
        environment = self.environment
        if not isinstance(environment, ObjectingEnvironment):
            return [""] * len(jobs)
        results = {job: self._call(environment.objection, job) for job in dict.fromkeys(jobs)}
        return [results[job] for job in jobs]

    def close(self) -> None:
        """Nothing is open."""

    def _call(self, function: Callable[[Task, str], Result], job: Job) -> Result | ScoringFailure:
        try:
            return function(self.environment.task(job.task), job.completion)
        except EnvironmentSetupError as error:
            return ScoringFailure(f"the environment does not know the task: {error}")
        except ScoringFailure as failure:
            return failure
