"""What a scorer is; and the one that scores in this process: no limits, nothing to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from shoal.environments import Environment, ObjectingEnvironment, Score, Task
from shoal.errors import EnvironmentSetupError, ScoringFailure


class NotBegun(ScoringFailure):
    """There was no time for it: nothing is known of the job, and nothing is wrong with it. It may be asked again."""


@dataclass(frozen=True)
class Job:
    """One completion to be scored: the task's id, and the text that was generated for it."""

    task: str
    completion: str


@runtime_checkable
class Scorer(Protocol):
    """Scores completions of one environment. A failure of the machinery is returned, not raised; so is `NotBegun`."""

    def scores(self, jobs: Sequence[Job]) -> list[Score | ScoringFailure]:
        """One result per job, in order. Equal jobs have equal results."""
        ...

    def objections(self, jobs: Sequence[Job]) -> list[str | ScoringFailure]:
        """What the environment objects to in each, in order; empty where it does not."""
        ...

    def close(self) -> None: ...


Said = TypeVar("Said")


def settled(
    ask: Callable[[Sequence[Job]], list[Said | ScoringFailure]], jobs: Sequence[Job]
) -> list[Said | ScoringFailure]:
    """What is said of each job, in order, however long it takes: what was not begun is asked again until it was.

    It comes to an end: a scorer that is asked begins something, and what it has begun it settles.
    """
    found = ask(jobs)
    while left := [place for place, said in enumerate(found) if isinstance(said, NotBegun)]:
        for place, said in zip(left, ask([jobs[place] for place in left]), strict=True):
            found[place] = said
    return found


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
