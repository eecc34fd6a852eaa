"""What one job may take, what is waited for, and what a scoring process has to build."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shoal.environments import Environment, EnvironmentSettings
from shoal.environments.composed import Composed
from shoal.environments.settings import ScoringSettings

MB = 10**6
MOST_PROCESSES = 8
"""Unless the settings ask for more: every process builds the environment, which takes memory."""


@dataclass(frozen=True)
class ScoringPatience:
    """How long the parent waits: for a process to be ready once it is asked, for one job, and for all asked at once.

    `job_s` is time on the clock, against jobs that wait for something; processor time has a limit of its own, which a
    busy machine does not use up. None: `AT_LEAST_S` more than three times that limit. A task whose grader allows more
    (a program in a sandbox) gets that in addition.
    """

    start_s: float = 120.0
    job_s: float | None = None
    all_s: float = 600.0

    AT_LEAST_S = 60.0

    def job_within_s(self, settings: ScoringSettings) -> float:
        return self.AT_LEAST_S + 3 * settings.seconds if self.job_s is None else self.job_s


def process_count(settings: ScoringSettings) -> int:
    """How many processes score: what the settings say, or one for each core that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return settings.processes or min(MOST_PROCESSES, usable)


def child_settings(settings: EnvironmentSettings) -> EnvironmentSettings:
    """What scores a completion: judges and length budgets are added by the parent, and judges may take long to load."""
    return settings.model_copy(update={"judges": (), "length": None, "pools": None})


def core_digest(environment: Environment) -> str:
    """The digest of what `child_settings` leaves: a file that was edited since must not score for this run."""
    return environment.inner.digest if isinstance(environment, Composed) else environment.digest
