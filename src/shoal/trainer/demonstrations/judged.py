"""Filters that ask somebody else: an environment, which holds tasks out and scores answers, and a reward model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shoal.environments import Environment, Score, Task, prompt_settings_of
from shoal.environments.aside import task_digest, task_digests
from shoal.environments.composed import Composed
from shoal.environments.data.prompts import question_digest
from shoal.environments.graders.thinking import after_thinking
from shoal.environments.mix import MixedEnvironment
from shoal.environments.protocol import GeneratingEnvironment
from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure
from shoal.rewards import Job, Scorer
from shoal.rewards.panel import PartJudge, Piece
from shoal.rewards.protocol import settled
from shoal.trainer.demonstrations.filters import Candidate

MOST_TASKS = 1_000_000


def _parts(environment: Environment) -> Iterator[Environment]:
    """The environments that a recipe is made of."""
    inner = environment.inner if isinstance(environment, Composed) else environment
    if isinstance(inner, MixedEnvironment):
        for part in inner.parts:
            yield from _parts(part.environment)
    else:
        yield inner


@dataclass(frozen=True)
class HeldOut:
    """Demonstrations of tasks that the environment holds out would make its evaluations worthless."""

    environment: Environment
    name: str = "held out"

    @cached_property
    def _listed(self) -> frozenset[bytes]:
        listing = (part for part in _parts(self.environment) if not isinstance(part, GeneratingEnvironment))
        return frozenset(digest for part in listing for digest in task_digests(part, "held_out"))

    @cached_property
    def _generating(self) -> list[GeneratingEnvironment]:
        return [part for part in _parts(self.environment) if isinstance(part, GeneratingEnvironment)]

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        return ["the environment holds this task out" if self._is_held_out(each) else "" for each in candidates]

    def _is_held_out(self, candidate: Candidate) -> bool:
        """Every question of a conversation counts, not only the last, with what was said before it and without."""
        messages = candidate.demonstration.messages
        prompts = [(text, messages[:index]) for index, (role, text) in enumerate(messages) if role == "user"]
        asked = {candidate.question, *candidate.turns, *(question_digest(*each) for each in prompts)}
        if not asked.isdisjoint(self._listed):
            return True
        return any(part.holds_out(prompt) for part in self._generating for prompt, _before in prompts)


@dataclass(frozen=True)
class Verified:
    """The environment scores the last words as it scores rollouts; a failure of its machinery is no reward at all."""

    environment: Environment
    scorer: Scorer
    least: float
    has_tasks: bool
    name: str = "verified"

    @cached_property
    def _ids(self) -> dict[bytes, str]:
        """Task of each question, for demonstrations that name none."""
        tasks = self.environment.tasks("train")
        if len(tasks) > MOST_TASKS:
            raise ConfigError(
                f"--verify: the environment has {len(tasks):,} tasks, too many to look for each demonstration's; "
                "name them in a column task (shoal data demos writes it)"
            )
        return {task_digest(task): task.id for task in _usable(tasks)}

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        tasks = [self._task(each) for each in candidates]
        begun = prompt_settings_of(self.environment).thinking
        jobs = {
            index: Job(task, candidate.demonstration.completion.removeprefix(begun))
            for index, (candidate, task) in enumerate(zip(candidates, tasks, strict=True))
            if task
        }
        scores = dict(zip(jobs, settled(self.scorer.scores, list(jobs.values())), strict=True)) if jobs else {}
        return [
            self._reason(each, scores[index]) if index in scores else "no task of the environment asks this"
            for index, each in enumerate(candidates)
        ]

    def _task(self, candidate: Candidate) -> str:
        said = candidate.demonstration
        if not said.task:
            return "" if self.has_tasks else self._ids.get(candidate.question, "")
        try:
            named = self.environment.task(said.task)
        except EnvironmentSetupError:
            return ""
        return said.task if task_digest(named) == candidate.question else ""

    def _reason(self, candidate: Candidate, score: Score | ScoringFailure) -> str:
        if isinstance(score, ScoringFailure):
            return f"could not be scored: {' '.join(str(score).split())[:160]}"
        candidate.reward = score.value
        return "" if candidate.reward >= self.least else f"its reward is below {self.least:g}"


def _usable(tasks: Sequence[Task]) -> Iterator[Task]:
    for index in range(len(tasks)):
        try:
            yield tasks[index]
        except EnvironmentSetupError:
            continue


@dataclass
class Ranked:
    """The best by a reward model: a share of all, or so many of each question. What is best is known at the end."""

    judge: PartJudge
    share: float | None
    per_question: int | None
    name: str = "rank"
    _values: list[tuple[float, int, bytes]] = field(default_factory=list)

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        """Leaves out only what could not be judged."""
        pieces = [_piece(each) for each in candidates]
        return [self._heard(each, value) for each, value in zip(candidates, self.judge.values(pieces), strict=True)]

    def _heard(self, candidate: Candidate, value: float | ScoringFailure) -> str:
        if isinstance(value, ScoringFailure) or not math.isfinite(value):
            return f"could not be judged: {value}"
        candidate.rank = value
        self._values.append((value, candidate.row, candidate.question))
        return ""

    def worst(self) -> Iterator[int]:
        """Rows that are not among the best; of equal ones the earlier row is the better."""
        ordered = sorted(self._values, key=lambda each: (-each[0], each[1]))
        kept = math.ceil((self.share or 1.0) * len(ordered))
        taken: dict[bytes, int] = {}
        for place, (_value, row, question) in enumerate(ordered):
            taken[question] = taken.get(question, 0) + 1
            if place >= kept or (self.per_question is not None and taken[question] > self.per_question):
                yield row


def _piece(candidate: Candidate) -> Piece:
    said = candidate.demonstration
    return Piece(said.prompt, after_thinking(said.completion), history=said.history)


def classifier(folder: Path, device: str) -> PartJudge:
    """The reward model in a folder, loaded: what is wrong with it is said before rows are read."""
    from shoal.rewards.classifier import Classifier

    judge = Classifier(folder, device)
    try:
        judge.prepare()
    except EnvironmentSetupError as error:
        raise ConfigError(f"--rank {folder}: {error}") from error
    return judge
