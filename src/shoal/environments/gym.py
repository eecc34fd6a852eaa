"""reasoning-gym: a hundred generators of reasoning tasks by name, alone or mixed, each with its own scorer.

    index ─► candidate numbers (a hash) ─► generator ─► entry ─► the first whose prompt is of the right split ─► task
                                                                 and that can be answered

The answer is what stands between <answer> and </answer> after the thinking; all that follows the thinking, if there are
no such tags. Nothing is stored: a task is made again when it is scored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from shoal.environments.generated import Options, is_held_out, numbered_task
from shoal.environments.graders.thinking import after_thinking
from shoal.environments.gym_source import VERSION, Generator, example_answer
from shoal.environments.mix import Schedule
from shoal.environments.protocol import LazyTasks, Score, Split, Task
from shoal.errors import EnvironmentSetupError

CANDIDATES_PER_TASK = 512
ENTRIES_KEPT = 1024
OPENING, CLOSING = "<answer>", "</answer>"
FULL = 1.0 - 1e-9


class GeneratorChoice(Options):
    """One generator of a mixture."""

    generator: str = Field(description="a generator of reasoning-gym, by its name")
    weight: float = Field(default=1.0, gt=0, le=1e6, description="how often, relative to the others")
    settings: dict[str, Any] = Field(default_factory=dict, description="fields of the generator's configuration")
    level: int | None = Field(default=None, ge=0, le=1000, description="level of its own curriculum, from 0")


class GymOptions(Options):
    """Which generators, how difficult, and how the answer is asked for."""

    generator: str = Field(default="chain_sum", description="a generator of reasoning-gym, by its name")
    settings: dict[str, Any] = Field(default_factory=dict, description="fields of the generator's configuration")
    level: int | None = Field(default=None, ge=0, le=1000, description="level of its own curriculum, from 0")
    mix: tuple[GeneratorChoice, ...] = Field(
        default=(), max_length=256, description="several generators with weights, instead of one"
    )
    seed: int = Field(default=0, ge=0, description="another seed gives other tasks")
    ask: str = Field(
        default="Give your final answer between <answer> and </answer>.",
        description="added to every question, in a line of its own; may be empty",
    )
    partial: bool = Field(
        default=False, description="take the generator's credit for a part of the answer; else it is 1 or 0"
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if self.mix and ("generator" in self.model_fields_set or self.settings or self.level is not None):
            raise ValueError("give a generator with settings and level, or a mix of them, not both")
        return self

    @property
    def choices(self) -> tuple[GeneratorChoice, ...]:
        return self.mix or (GeneratorChoice(generator=self.generator, settings=self.settings, level=self.level),)


class GymEnvironment:
    """Implements `Environment`. A task's `kind` is its generator; `answer` is one right answer, if one is known."""

    name: ClassVar[str] = "reasoning-gym"
    version: ClassVar[int] = 2

    def __init__(self, options: GymOptions, sizes: dict[Split, int]) -> None:
        self.options, self._sizes = options, dict(sizes)
        self._generators = [Generator(one.generator, one.settings, one.level) for one in options.choices]
        self._schedule = Schedule([one.weight for one in options.choices])
        content = {
            "name": self.name, "version": self.version, "library": VERSION, "sizes": sizes,
            "options": options.model_dump(mode="json"),
        }  # fmt: skip
        self.digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        self._found = lru_cache(maxsize=ENTRIES_KEPT)(self._find)

    def tasks(self, split: Split) -> Sequence[Task]:
        return LazyTasks(self._sizes[split], lambda index: self.make(split, index))

    def task(self, task_id: str) -> Task:
        return self.make(*numbered_task(self.name, task_id, self._sizes))

    def make(self, split: Split, index: int) -> Task:
        generator, entry = self._found(split, index)
        return Task(f"{self.name}/{split}/{index}", self._prompt(entry), example_answer(entry), generator.name)

    def holds_out(self, prompt: str) -> bool:
        return is_held_out(prompt)

    def score(self, task: Task, completion: str) -> Score:
        generator, entry = self._found(*numbered_task(self.name, task.id, self._sizes))
        given, notes = generator.score(entry, final_answer(completion))
        value = given if self.options.partial else float(given >= FULL)
        return Score(value=value, parts={"generator": given}, notes=notes)

    def _find(self, split: Split, index: int) -> tuple[Generator, Mapping[str, Any]]:
        """The first candidate of the index whose prompt belongs to the split and that has an answer."""
        generator = self._generators[self._schedule.turn(index).part]
        for attempt in range(CANDIDATES_PER_TASK):
            label = f"shoal/gym/v1\n{self.options.seed}/{split}/{index}/{attempt}"
            number = int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "big") >> 1
            entry = generator.entry(number)
            if is_held_out(self._prompt(entry)) == (split == "held_out") and generator.is_answerable(entry):
                return generator, entry
        raise EnvironmentSetupError(
            f"reasoning-gym's {generator.name} has too few different tasks with these settings: among "
            f"{CANDIDATES_PER_TASK} there was none for the {split} split; allow more of them"
        )

    def _prompt(self, entry: Mapping[str, Any]) -> str:
        question = str(entry["question"])
        return f"{question.rstrip()}\n{self.options.ask}" if self.options.ask else question


def final_answer(completion: str) -> str:
    """The answer within a completion: after the thinking, in the last pair of tags if there is one."""
    said = after_thinking(completion)
    before, closing, _rest = said.rpartition(CLOSING)
    if closing and OPENING in before:
        return before.rpartition(OPENING)[2].strip()
    return said.strip()
