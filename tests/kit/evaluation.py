"""A model that needs no torch: it sorts digits rightly or wrongly, as its seed says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.engines import Completion, GenerationRequest
from shoal.environments import Environment, EnvironmentSettings, Score, Task, build
from shoal.errors import ScoringFailure
from shoal.evaluation.job import EvaluationJob, choose
from shoal.evaluation.plan import SamplingPlan
from shoal.evaluation.records import SampleRecord, TaskRecord
from shoal.evaluation.subject import EvaluatedModel
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.rewards import DirectScorer, Job

FILES = read_files(model_folder("tiny"))
TOKENIZER = TextTokenizer(FILES)
SAMPLING = SamplingPlan(samples=4, tasks=10, temperature=1.0, max_new_tokens=16, batch_rows=8)


@dataclass
class SortingEngine:
    """Right in every sample whose seed is a multiple of three; greedy is always right. Remembers what it was asked."""

    kind: str = "stub/cpu/float32"
    asked: list[GenerationRequest] = field(default_factory=list)
    ending: bool = True

    def generate(self, requests: Sequence[GenerationRequest], proof: object = None) -> list[list[Completion]]:
        assert proof is None
        self.asked += requests
        return [[self._completion(request.prompt_ids, seed) for seed in request.seeds] for request in requests]

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_ids: Sequence[int]
    ) -> list[Any]:
        return [np.array(self._answer(prompt, right=True)[:max_new_tokens], dtype=np.int32) for prompt in prompts]

    def _completion(self, prompt: tuple[int, ...], seed: int) -> Completion:
        ids = np.array(self._answer(prompt, right=seed % 3 == 0), dtype=np.int32)
        return Completion(ids, np.zeros(len(ids), dtype=np.float32), "eos" if self.ending else "length")

    def _answer(self, prompt: tuple[int, ...], right: bool) -> list[int]:
        digits = TOKENIZER.decode(prompt).partition("=")[0]
        text = "".join(sorted(digits)) if right else "?"
        return [*TOKENIZER.encode(text), *([TOKENIZER.eos_token_id] if self.ending else [])]


def subject(engine: Any = None, name: str = "stub", digest: str = "ab" * 32) -> EvaluatedModel:
    return EvaluatedModel(name, digest, FILES, engine or SortingEngine())


def sort(**settings: Any) -> Environment:
    return build(EnvironmentSettings(name="sort", **settings))


def evaluation(
    plan: SamplingPlan = SAMPLING, engine: Any = None, environment: Environment | None = None
) -> EvaluationJob:
    return EvaluationJob(subject(engine), choose(environment or sort(), plan), EnvironmentSettings())


@dataclass
class FailingScorer:
    """Cannot score the jobs whose number is in `failing`, counted through."""

    environment: Environment
    failing: frozenset[int] = frozenset()
    seen: int = 0
    closed: bool = False

    def scores(self, jobs: Sequence[Job]) -> list[Score | ScoringFailure]:
        found = DirectScorer(self.environment).scores(jobs)
        numbers = range(self.seen, self.seen + len(jobs))
        self.seen += len(jobs)
        return [ScoringFailure("no") if n in self.failing else s for n, s in zip(numbers, found, strict=True)]

    def close(self) -> None:
        self.closed = True


def record(task: str, *scores: float | None, digest: str = "", **more: Any) -> TaskRecord:
    samples = tuple(SampleRecord(score, 5, "eos", {} if score is None else {"exact": score}) for score in scores)
    return TaskRecord(task, 0, digest, samples=samples, **more)


def one_task(prompt: str, answer: str = "") -> Task:
    return Task(id=prompt, prompt=prompt, answer=answer)
