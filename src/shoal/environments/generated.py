"""Environments whose tasks are computed from their index: nothing stored, nothing drawn, the same everywhere.

Train and held-out tasks are disjoint by content: an eighth of all prompts, chosen by their hash, is held out, and a
task of a split is the first candidate of its index that falls on the right side.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from shoal.environments.protocol import SPLITS, LazyTasks, Score, Split, Task
from shoal.errors import EnvironmentSetupError

HELD_OUT_PER_256 = 32
CANDIDATES_PER_TASK = 4096


class Numbers:
    """An endless source of integers that depends on its label alone (SHA-256 in counter mode)."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._calls = 0

    def below(self, bound: int) -> int:
        """A number in [0, bound); the bias of the remainder is below bound / 2**64."""
        digest = hashlib.sha256(f"{self._label}/{self._calls}".encode()).digest()
        self._calls += 1
        return int.from_bytes(digest[:8], "big") % bound


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out eighth, decided by its content."""
    return hashlib.sha256(b"shoal/split\n" + prompt.encode()).digest()[0] < HELD_OUT_PER_256


def numbered_task(name: str, task_id: str, sizes: Mapping[Split, int]) -> tuple[Split, int]:
    """Split and index of the id `name/split/index`; any other id, or an index too large, is no task."""
    said, _, rest = task_id.partition("/")
    split, _, index = rest.partition("/")
    canonical = index.isdecimal() and len(index) < 20 and str(int(index)) == index
    for known in SPLITS:
        if said == name and split == known and canonical and int(index) < sizes[known]:
            return known, int(index)
    raise EnvironmentSetupError(f"environment {name} has no task {task_id!r:.200}")


class Options(BaseModel):
    """Base of an environment's own options: frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GeneratedEnvironment(ABC):
    """Base of generated environments: a subclass says how one question is made from numbers.

    `version` is part of the digest; raise it when `question` or `score` changes meaning.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1

    def __init__(self, options: Options, sizes: dict[Split, int]) -> None:
        self.options = options
        self._sizes = dict(sizes)
        content = {
            "name": self.name, "version": self.version, "options": options.model_dump(mode="json"), "sizes": sizes,
        }  # fmt: skip
        self.digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def holds_out(self, prompt: str) -> bool:
        return is_held_out(prompt)

    @abstractmethod
    def question(self, numbers: Numbers) -> tuple[str, str]:
        """A prompt and its answer, made from nothing but `numbers`."""

    def score(self, task: Task, completion: str) -> Score:
        """1 for the exact answer, 0 for anything else."""
        exact = float(completion == task.answer)
        return Score(value=exact, parts={"exact": exact})

    def tasks(self, split: Split) -> Sequence[Task]:
        return LazyTasks(self._sizes[split], lambda index: self.make(split, index))

    def task(self, task_id: str) -> Task:
        return self.make(*numbered_task(self.name, task_id, self._sizes))

    def make(self, split: Split, index: int) -> Task:
        """The task at `index` of `split`: the first candidate whose content belongs to the split."""
        for attempt in range(CANDIDATES_PER_TASK):
            prompt, answer = self.question(Numbers(f"shoal/{self.name}/{split}/{index}/{attempt}"))
            if is_held_out(prompt) == (split == "held_out"):
                return Task(id=f"{self.name}/{split}/{index}", prompt=prompt, answer=answer)
        raise EnvironmentSetupError(
            f"environment {self.name}: its options {self.options!r} leave no {split} task; allow more digits"
        )
