"""The greedy score on held-out tasks, who measures it, and how it reaches the metrics.

    trainer      due ─► training pauses ─► score ─► the row of that version
    validators   due ─► the hub offers it ─► slices between audits ─► complete ─┬─► before its row: into it
                                                   (training continues)         └─► later: into the row that is there
                 the last version: waited for, `LAST_WAIT_S` at most; then the trainer measures it itself

A score that comes twice, or again after a resume, changes nothing. One of a part of the tasks (`Evaluation.partial`)
is none: beside those of other versions it would be read as a rise or a fall.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.engines.dialogue import Talks, greedy_answers
from shoal.engines.torch import TorchEngine
from shoal.environments import Environment, Task, budget_of
from shoal.errors import EnvironmentSetupError, ModelError, ScoringFailure, UnusableTask
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import Evaluation, EvaluationPage, SamplingParameters
from shoal.rewards import DirectScorer, Job, Scorer
from shoal.rewards.protocol import settled
from shoal.runtime.clock import Clock
from shoal.runtime.stop import StopToken
from shoal.trainer.step import Stopped

log = logging.getLogger(__name__)

Evaluator = Callable[[], float | None]


@dataclass(frozen=True)
class GreedyEvaluator:
    """Scores the model that is being trained, as it is now, on the first `tasks` held-out tasks.

    The tasks are the same every time, and so is the score of the same weights. `encode` is how tasks are asked; their
    text by the tokenizer if it is left out. `talks` says who answers the model's turns, if anybody does; `scorer`
    scores, or if it is left out the environment itself does. What counts is the task's own score: a length budget is
    asked for, not scored.
    """

    model: Any
    tokenizer: TextTokenizer
    environment: Environment
    sampling: SamplingParameters
    tasks: int
    encode: Callable[[Task], Sequence[int]] | None = None
    talks: Talks | None = None
    scorer: Scorer | None = None
    _engine: TorchEngine = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_engine", TorchEngine.wrap(self.model))

    def __call__(self) -> float | None:
        """The mean score, or None if nothing could be scored. A failure of the machinery is no sample, never 0.

        Nor is a task that cannot be used: it is left out, as the hub leaves it out of what validators measure.
        """
        asked = list(self._asked())
        if not asked:
            return None
        tasks, prompts = [task for task, _ids in asked], [ids for _task, ids in asked]
        talks = [None if self.talks is None else self.talks.of(task) for task in tasks]
        answers = greedy_answers(self._engine, prompts, talks, self.sampling)
        jobs = [Job(task.id, self.tokenizer.decode(ids)) for task, ids in zip(tasks, answers, strict=True)]
        results = settled((self.scorer or DirectScorer(self.environment)).scores, jobs)
        scores = [result.value for result in results if not isinstance(result, ScoringFailure)]
        failures = [result for result in results if isinstance(result, ScoringFailure)]
        if failures:
            log.warning("%d of %d held-out tasks could not be scored: %s", len(failures), len(tasks), failures[0])
        return float(np.mean(scores)) if scores else None

    def _asked(self) -> Iterator[tuple[Task, tuple[int, ...]]]:
        """The tasks that can be used, with their prompts."""
        split, unusable = self.environment.tasks("held_out"), []
        count = min(self.tasks, len(split))
        for index in range(count):
            try:
                task = split[index]
                prompt = self._prompt(task, index)
            except (EnvironmentSetupError, ModelError) as error:
                unusable.append(error)
            else:
                yield task, prompt
        if unusable:
            log.warning("%d of %d held-out tasks cannot be used (left out): %s", len(unusable), count, unusable[0])

    def _prompt(self, task: Task, index: int) -> tuple[int, ...]:
        budget = budget_of(self.environment)
        asked = task if budget is None else budget.ask(task, budget.target("held_out", index))
        ids = tuple(self.tokenizer.encode(asked.prompt) if self.encode is None else self.encode(asked))
        if not ids:
            raise UnusableTask(f"the prompt of task {task.id} has no tokens")
        return ids


LAST_WAIT_S = 120.0
LOOK_S = 0.5


@dataclass
class HeldOut:
    """Every so many versions the trainer stops and looks. Each answer is the score of a version, if known by then."""

    evaluate: Evaluator
    every: int

    def before(self, version: int) -> float | None:
        """Training from this version is about to begin."""
        return self.evaluate() if self.every and version % self.every == 0 else None

    def known(self, version: int) -> dict[int, float]:  # noqa: ARG002  nobody else measures
        """The row of this version is about to be written: its score, and those of earlier ones that came since."""
        return {}

    def last(self, version: int) -> float | None:  # noqa: ARG002  the model is at its last version
        """The run is over: the score of its last version."""
        return self.evaluate() if self.every else None


@dataclass
class ByValidators(HeldOut):
    """The hub has validators measure; `evaluate` is for the last version, should none do it."""

    page: Callable[[int], EvaluationPage]
    clock: Clock
    stop: StopToken
    _told: dict[int, float] = field(default_factory=dict)
    _since: int = 0

    def before(self, version: int) -> float | None:  # noqa: ARG002  training waits for nobody
        return None

    def known(self, version: int) -> dict[int, float]:
        if not self.every:
            return {}
        listed = self.page(self._since).evaluations
        found = {each.policy.version: None if each.partial else each.mean for each in listed if each.complete}
        # What a replay has not come to yet is known already; it is told with its own row.
        later = [number for number in found if number > version]
        awaited = [each.policy.version for each in listed if not each.complete]
        self._since = min([*awaited, *later], default=max(found, default=self._since - 1) + 1)
        news = {
            number: mean
            for number, mean in found.items()
            if mean is not None and number <= version and self._told.get(number) != mean
        }
        self._told.update(news)
        return news

    def last(self, version: int) -> float | None:
        if not self.every:
            return None
        until_s = self.clock.monotonic_s() + LAST_WAIT_S
        while self.clock.monotonic_s() < until_s:
            found = self._of(version)
            if found is None or found.partial:
                break
            if found.complete:
                return found.mean
            if self.stop.wait(LOOK_S):
                raise Stopped
        log.info("validators have not measured all of version %d: the trainer does it itself", version)
        return self.evaluate()

    def _of(self, version: int) -> Evaluation | None:
        return next((each for each in self.page(version).evaluations if each.policy.version == version), None)
