"""The greedy score on held-out tasks: what the run is for. Sampled reward can rise while this stands still."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.engines.torch import TorchEngine
from shoal.environments import Environment
from shoal.errors import ScoringFailure
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import SamplingParameters

Evaluator = Callable[[], float | None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GreedyEvaluator:
    """Scores the model that is being trained, as it is now, on the first `tasks` held-out tasks.

    The tasks are the same every time, and so is the score of the same weights.
    """

    model: Any
    tokenizer: TextTokenizer
    environment: Environment
    sampling: SamplingParameters
    tasks: int
    _engine: TorchEngine = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_engine", TorchEngine.wrap(self.model))

    def __call__(self) -> float | None:
        """The mean score, or None if nothing could be scored. A failure of the machinery is no sample, never 0."""
        split = self.environment.tasks("held_out")
        tasks = [split[index] for index in range(min(self.tasks, len(split)))]
        prompts = [self.tokenizer.encode(task.prompt) for task in tasks]
        completions = self._engine.greedy(prompts, self.sampling.max_new_tokens, self.sampling.eos_token_id)
        scores = []
        failures: list[ScoringFailure] = []
        for task, token_ids in zip(tasks, completions, strict=True):
            try:
                scores.append(self.environment.score(task, self.tokenizer.decode(token_ids.tolist())).value)
            except ScoringFailure as failure:
                failures.append(failure)
        if failures:
            log.warning("%d of %d held-out tasks could not be scored: %s", len(failures), len(tasks), failures[0])
        return float(np.mean(scores)) if scores else None
