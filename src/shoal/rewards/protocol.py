"""What a scorer is; what one job may take; and the scorer that scores in this process: no limits, nothing to start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.environments import Environment, Score
from shoal.environments.settings import ScoringSettings
from shoal.errors import EnvironmentSetupError, ScoringFailure

MOST_PROCESSES = 8
"""Unless the settings ask for more: every process builds the environment, which takes memory."""


class NotBegun(ScoringFailure):
    """There was no time for it: nothing is known of the job, and nothing is wrong with it. It may be asked again."""


@dataclass(frozen=True)
class Job:
    """One completion to be scored: the task's id, and the text that was generated for it."""

    task: str
    completion: str


Scores = list[Score | ScoringFailure]


@runtime_checkable
class Scorer(Protocol):
    """Scores completions of one environment. A failure of the machinery is returned, not raised; so is `NotBegun`."""

    def scores(self, jobs: Sequence[Job]) -> Scores:
        """One result per job, in order. Equal jobs have equal results."""
        ...

    def close(self) -> None: ...


def settled(ask: Callable[[Sequence[Job]], Scores], jobs: Sequence[Job]) -> Scores:
    """What is said of each job, in order, however long it takes: what was not begun is asked again until it was. It
    comes to an end: a scorer that is asked begins something, and what it has begun it settles."""
    found = ask(jobs)
    while left := [place for place, said in enumerate(found) if isinstance(said, NotBegun)]:
        for place, said in zip(left, ask([jobs[place] for place in left]), strict=True):
            found[place] = said
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
    """How long the parent waits: for a process to be ready once it is asked, for one job, and for all asked at once.

    `job_s` is time on the clock, against jobs that wait for something; processor time has a limit of its own, which a
    busy machine does not use up. None: a minute more than three times that limit. A task whose grader allows more
    (a program in a sandbox) gets that in addition.
    """

    start_s: float = 120.0
    job_s: float | None = None
    all_s: float = 600.0


def process_count(settings: ScoringSettings) -> int:
    """How many processes score: what the settings say, or one for each core that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return settings.processes or min(MOST_PROCESSES, usable)
