"""The plan of an evaluation: tasks, sampling and seeds; and leaks of evaluated tasks into the training set.

A sample's seed follows from the plan's seed, the task's id and the sample's number: sample 3 of a task is the same
whether 4 or 64 are drawn. Leaks are found by the digest of the question, which ignores spaces, case and width.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.environments import Environment, Task, budget_of
from shoal.environments.mix import MixedEnvironment
from shoal.environments.protocol import UNUSABLE, LazyTasks, task_digest, task_digests
from shoal.environments.settings import inner_of
from shoal.errors import ConfigError, LeakFound
from shoal.protocol.lease import stop_problem
from shoal.sampling import uniforms

Part = Literal["held_out", "train", "all"]
PARTS: tuple[Part, ...] = ("held_out", "train", "all")
MAX_SAMPLES = 4096
BATCH_TOKENS = 2**21
SHOWN = 5


@dataclass(frozen=True)
class SamplingPlan:
    """How a model is sampled. `temperature` 0 is greedy; `tasks` 0 is all of the split. `batch_rows` belongs to it
    because rounding, and rarely a token, depends on the batch."""

    samples: int = 1
    tasks: int = 0
    temperature: float = 0.0
    max_new_tokens: int = 1024
    seed: int = 0
    split: Part = "held_out"
    batch_rows: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise ConfigError(f"--samples {self.samples}: give 1 to {MAX_SAMPLES} samples per task")
        if problem := stop_problem(self.stop):
            raise ConfigError(f"--stop: {problem}")
        if not 0 <= self.temperature <= 10:
            raise ConfigError(f"--temperature {self.temperature:g}: give 0 (greedy) to 10")
        if self.temperature == 0 and self.samples > 1:
            same = f"the same completion {self.samples} times"
            raise ConfigError(f"--temperature 0 draws {same}: give --samples 1, or a temperature")
        if self.tasks < 0 or self.max_new_tokens < 1 or self.batch_rows < 1:
            raise ConfigError("--max-new-tokens and --batch-rows must be at least 1, --tasks at least 0 (all)")

    @property
    def tasks_per_batch(self) -> int:
        return max(1, self.rows // self.samples)

    @property
    def rows(self) -> int:
        return max(1, min(self.batch_rows, BATCH_TOKENS // self.max_new_tokens))

    def chosen(self, available: int) -> Sequence[int]:
        """Task numbers, ascending: all, or a random choice by the seed (a data set may be sorted by difficulty)."""
        if self.tasks == 0 or self.tasks >= available:
            return range(available)
        seed, drawn, found = _derived("tasks", self.seed), 0, dict[int, None]()
        while len(found) < self.tasks:
            found |= dict.fromkeys((uniforms(seed, drawn, 4096) * available).astype(int).tolist())
            drawn += 4096
        return sorted(list(found)[: self.tasks])


def tasks_of(environment: Environment, part: Part) -> Sequence[Task]:
    if part != "all":
        return environment.tasks(part)
    first, second = environment.tasks("held_out"), environment.tasks("train")
    size = len(first)
    return LazyTasks(size + len(second), lambda place: first[place] if place < size else second[place - size])


def length_target(environment: Environment, plan: SamplingPlan, number: int) -> int | None:
    budget = budget_of(environment)
    return None if budget is None else budget.target(f"shoal/eval/{plan.seed}", number)


def as_asked(environment: Environment, plan: SamplingPlan, number: int, task: Task) -> Task:
    budget, target = budget_of(environment), length_target(environment, plan, number)
    return task if budget is None or target is None else budget.ask(task, target)


def sample_seed(seed: int, task: str, sample: int) -> int:
    return _derived("sample", seed, task, sample)


def _derived(*names: object) -> int:
    text = "\n".join(map(str, ("shoal/eval/v1", *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Leaks:
    """Ids of evaluated tasks that are in the training set, and of those that were trained on."""

    known: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        some = ", ".join(self.known[:SHOWN]) + (", …" if len(self.known) > SHOWN else "")
        trained = f", {len(self.trained)} of them in batches that were trained on" if self.trained else ""
        return f"{len(self.known)} of the evaluated tasks are in the training set{trained}: {some}"

    def refuse(self) -> None:
        if self.known:
            raise LeakFound(f"{self.sentence}; --allow-leaks leaves them out and evaluates the others")


def find_leaks(tasks: Iterable[Task], training: Environment, trained_ids: Iterable[str] = ()) -> Leaks:
    """Which of `tasks` are in the training environment's train split; `trained_ids` are its tasks in batches."""
    ids_by_digest: dict[bytes, list[str]] = {}
    for task in tasks:
        ids_by_digest.setdefault(task_digest(task), []).append(task.id)
    batches = (task_digest(training.task(task_id)) for task_id in trained_ids)
    known, trained = (
        {task for digest in digests for task in ids_by_digest.get(digest, ())}
        for digests in (train_digests(training), batches)
    )
    return Leaks(tuple(sorted(known | trained)), tuple(sorted(trained)))


def train_digests(environment: Environment) -> Iterator[bytes]:
    inner = inner_of(environment)
    if isinstance(inner, MixedEnvironment):  # all tasks of each part, without those that another part holds out
        for part in inner.parts:
            yield from (found for found in train_digests(part.environment) if found not in inner.aside)
        return
    yield from (found for found in task_digests(inner, "train") if found != UNUSABLE)


def archived_ids(rollouts: Path) -> set[str]:
    import pyarrow.parquet as pq

    found: set[str] = set()
    for path in sorted(rollouts.glob("step-*.parquet")):
        found.update(pq.read_table(path, columns=["task"]).column("task").unique().to_pylist())
    return found
