"""The scorer's interface, its time limits, and a scorer without limits that runs in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.environments import Environment, Score
from shoal.environments.settings import ScoringSettings
from shoal.errors import EnvironmentSetupError, ScoringFailure

MOST_PROCESSES = 8  # unless the settings ask for more: each process builds the environment, which takes memory


class NotStarted(ScoringFailure):
    """There was no time to start the job. It may be asked again."""


@dataclass(frozen=True)
class Job:
    """One completion to be scored: the task's id, and the text that was generated for it."""

    task: str
    completion: str


Scores = list[Score | ScoringFailure]


@runtime_checkable
class Scorer(Protocol):
    """Scores completions of one environment. Failures of the machinery, and `NotStarted`, are returned, not raised."""

    def scores(self, jobs: Sequence[Job]) -> Scores:
        """One result per job, in order. Equal jobs have equal results."""
        ...

    def close(self) -> None: ...


def score_all(ask: Callable[[Sequence[Job]], Scores], jobs: Sequence[Job]) -> Scores:
    """All scores, in order. Jobs that were not started are asked again; each round finishes at least one."""
    found = ask(jobs)
    while left := [place for place, result in enumerate(found) if isinstance(result, NotStarted)]:
        for place, result in zip(left, ask([jobs[place] for place in left]), strict=True):
            found[place] = result
    return found


@dataclass(frozen=True)
class DirectScorer:
    environment: Environment

    def scores(self, jobs: Sequence[Job]) -> Scores:
        results: dict[Job, Score | ScoringFailure] = {}
        for job in dict.fromkeys(jobs):
            try:
                results[job] = self.environment.score(self.environment.task(job.task), job.completion)
            except EnvironmentSetupError as error:
                results[job] = ScoringFailure(f"the environment does not know the task: {error}")
            except ScoringFailure as failure:
                results[job] = failure
        return [results[job] for job in jobs]

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class ScoringPatience:
    """How long the parent waits for a process to be ready, for one job, and for all jobs of a call. `job_s` is clock
    time, for jobs that wait instead of computing; None: three times the limit of processor time, and a minute. The time
    that a grader allows (a sandbox) is added."""

    start_s: float = 120.0
    job_s: float | None = None
    all_s: float = 600.0


def process_count(settings: ScoringSettings) -> int:
    """The number in the settings, or one for each core that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return settings.processes or min(MOST_PROCESSES, usable)
