"""The greedy score on held-out tasks: what the run is for. Sampled reward can rise while this stands still."""

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
from shoal.protocol import SamplingParameters
from shoal.rewards import DirectScorer, Job, Scorer
from shoal.rewards.protocol import settled

Evaluator = Callable[[], float | None]

log = logging.getLogger(__name__)


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
