"""Environments whose tasks are computed from their index. An eighth of all prompts, chosen by hash, is held out. A task
is the first of its candidates whose prompt belongs to the wanted split."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from shoal.environments.protocol import DEFAULT_TURNS, MAX_TURNS, SPLITS, DialogueRule, LazyTasks, Score, Split, Task
from shoal.environments.settings import Table
from shoal.environments.tools import evaluate, is_number, shown
from shoal.errors import EnvironmentSetupError

HELD_OUT_PER_256, CANDIDATES_PER_TASK = 32, 4096
PAIR_PER_8 = 3  # this many eighths of sums of two neighbours are in parentheses


class Numbers:
    """An endless source of integers that depends on its label alone (SHA-256 in counter mode)."""

    def __init__(self, label: str) -> None:
        self._digests = (hashlib.sha256(f"{label}/{call}".encode()).digest() for call in count())

    def below(self, bound: int) -> int:
        """A number in [0, bound); the bias of the remainder is below bound / 2**64."""
        return int.from_bytes(next(self._digests)[:8], "big") % bound


def is_held_out(prompt: str) -> bool:
    return hashlib.sha256(b"shoal/split\n" + prompt.encode()).digest()[0] < HELD_OUT_PER_256


class IndexedEnvironment(ABC):
    """Base of environments whose tasks are made from their index; `version` is part of the digest."""

    name: ClassVar[str]
    version: ClassVar[int] = 1

    def __init__(self, options: Table, sizes: dict[Split, int], **more: Any) -> None:
        """`more`: other values that determine the tasks."""
        self.options, self._sizes = options, dict(sizes)
        values = options.model_dump(mode="json")
        content = {"name": self.name, "version": self.version, "options": values, "sizes": sizes, **more}
        self.digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def holds_out(self, prompt: str) -> bool:
        return is_held_out(prompt)

    def tasks(self, split: Split) -> Sequence[Task]:
        return LazyTasks(self._sizes[split], partial(self.make, split))

    def task(self, task_id: str) -> Task:
        return self.make(*self._place(task_id))

    def _place(self, task_id: str) -> tuple[Split, int]:
        """Split and index of the id `name/split/index`; any other id is an `EnvironmentSetupError`."""
        for split in SPLITS:
            index = task_id.removeprefix(f"{self.name}/{split}/")
            canonical = index.isdecimal() and len(index) < 20 and str(int(index)) == index
            if canonical and index != task_id and int(index) < self._sizes[split]:
                return split, int(index)
        raise EnvironmentSetupError(f"environment {self.name} has no task {task_id!r:.200}")

    @abstractmethod
    def make(self, split: Split, index: int) -> Task:
        """The task at `index` of `split`."""


class GeneratedEnvironment(IndexedEnvironment):
    """Base of generated environments: a subclass makes a question from numbers."""

    @abstractmethod
    def question(self, numbers: Numbers) -> tuple[str, str]:
        """A prompt and its answer, from `numbers` alone."""

    def score(self, task: Task, completion: str) -> Score:
        exact = float(completion == task.answer)
        return Score(value=exact, parts={"exact": exact})

    def make(self, split: Split, index: int) -> Task:
        for attempt in range(CANDIDATES_PER_TASK):
            prompt, answer = self.question(Numbers(f"shoal/{self.name}/{split}/{index}/{attempt}"))
            if is_held_out(prompt) == (split == "held_out"):
                return Task(id=f"{self.name}/{split}/{index}", prompt=prompt, answer=answer)
        raise EnvironmentSetupError(f"environment {self.name}: {self.options!r} leaves no {split} task")


class SortOptions(Table):
    min_digits: int = Field(default=6, ge=1, le=64)
    max_digits: int = Field(default=8, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits ({self.min_digits}) is above max_digits ({self.max_digits})")
        return self


class SortEnvironment(GeneratedEnvironment):
    """Put digits in ascending order (`3142=` wants `1234`), `min_digits` to `max_digits`, each length equally often.
    The built-in tiny policy was trained on up to five digits; the default tasks have six to eight."""

    name: ClassVar[str] = "sort"
    options: SortOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        low, high = self.options.min_digits, self.options.max_digits
        length = low + numbers.below(high - low + 1)
        digits = [str(numbers.below(10)) for _ in range(length)]
        return "".join(digits) + "=", "".join(sorted(digits))


class AdditionOptions(Table):
    max_digits: int = Field(default=2, ge=1, le=64)


class AdditionEnvironment(GeneratedEnvironment):
    """Add two numbers below 10**max_digits, drawn uniformly: `17+25=` wants `42`."""

    name: ClassVar[str] = "addition"
    options: AdditionOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        bound: int = 10**self.options.max_digits
        left, right = numbers.below(bound), numbers.below(bound)
        return f"{left}+{right}=", str(left + right)


class CalculatorOptions(Table):
    terms: int = Field(default=3, ge=2, le=16, description="numbers in an expression")
    max_digits: int = Field(default=2, ge=1, le=9, description="digits of a number, at most")
    operators: str = Field(default="+-*", pattern=r"^[-+*]{1,16}$", description="signs that stand between the numbers")
    max_turns: int = Field(default=DEFAULT_TURNS, ge=2, le=MAX_TURNS, description="turns, with the answer")
    number_credit: float = Field(default=0.0, ge=0, le=1, description="what a number is worth that is not right")


class CalculatorEnvironment(GeneratedEnvironment):
    """Expressions of whole numbers, which the model may let a calculator compute before it answers.

    12*(3+4)=  ─►  model: 12*(3+4)  ─►  calculator: 84  ─►  model: 84
    """

    name: ClassVar[str] = "calculator"
    options: CalculatorOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        bound: int = 10**self.options.max_digits
        expression = str(numbers.below(bound))
        for _ in range(self.options.terms - 1):
            operator = self.options.operators[numbers.below(len(self.options.operators))]
            pair = "(" not in expression and operator != "*" and numbers.below(8) < PAIR_PER_8
            longer = f"{expression}{operator}{numbers.below(bound)}"
            expression = f"({longer})" if pair else longer
        return f"{expression}=", shown(evaluate(expression))

    def score(self, task: Task, completion: str) -> Score:
        answer = completion.strip(" \t\n\r")
        exact, number = float(answer == task.answer), float(is_number(answer))
        return Score(value=max(exact, self.options.number_credit * number), parts={"exact": exact, "number": number})

    def dialogue(self, _task: Task) -> DialogueRule:
        return DialogueRule("calculator", self.options.max_turns)
