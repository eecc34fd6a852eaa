"""Small tasks that are made of digits: sort them, add numbers, compute an expression with a calculator."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from shoal.environments.generated import GeneratedEnvironment, Numbers, Options
from shoal.environments.protocol import DEFAULT_TURNS, MAX_TURNS, DialogueRule, Score, Task
from shoal.environments.tools.calculator import evaluate, is_number, shown

PAIR_PER_8 = 3  # of two neighbours, this many eighths are in parentheses


class SortOptions(Options):
    """How many digits a list has."""

    min_digits: int = Field(default=6, ge=1, le=64)
    max_digits: int = Field(default=8, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits ({self.min_digits}) is above max_digits ({self.max_digits})")
        return self


class SortEnvironment(GeneratedEnvironment):
    """Put digits in ascending order, `3142=` wants `1234`: `min_digits` to `max_digits`, every length equally often.

    The smallest task on which a policy visibly learns something. The built-in tiny policy was shown lists of up to five
    digits; the default tasks have six to eight, longer than any demonstration, and nobody shows it an answer.
    """

    name: ClassVar[str] = "sort"
    options: SortOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        low, high = self.options.min_digits, self.options.max_digits
        length = low + numbers.below(high - low + 1)
        digits = [str(numbers.below(10)) for _ in range(length)]
        return "".join(digits) + "=", "".join(sorted(digits))


class AdditionOptions(Options):
    """How large the two numbers may be."""

    max_digits: int = Field(default=2, ge=1, le=64)


class AdditionEnvironment(GeneratedEnvironment):
    """Add two numbers below 10**max_digits, drawn uniformly: `17+25=` wants `42`."""

    name: ClassVar[str] = "addition"
    options: AdditionOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        bound: int = 10**self.options.max_digits
        left, right = numbers.below(bound), numbers.below(bound)
        return f"{left}+{right}=", str(left + right)


class CalculatorOptions(Options):
    """How long the expressions are, what is in them, and how many turns the model has."""

    terms: int = Field(default=3, ge=2, le=16, description="numbers in an expression")
    max_digits: int = Field(default=2, ge=1, le=9, description="digits of a number, at most")
    operators: str = Field(default="+-*", pattern=r"^[-+*]{1,16}$", description="signs that stand between the numbers")
    max_turns: int = Field(
        default=DEFAULT_TURNS, ge=2, le=MAX_TURNS, description="turns of the model, the answer included"
    )
    number_credit: float = Field(
        default=0.0, ge=0, le=1, description="what an answer is worth that is a number, but not the right one"
    )


class CalculatorEnvironment(GeneratedEnvironment):
    """Expressions of whole numbers, which the model may have computed before it says what the value is.

    12*(3+4)=  ─►  model: 12*(3+4)  ─►  calculator: 84  ─►  model: 84

    1 for the value as the last turn says it, 0 for what is no number.
    """

    name: ClassVar[str] = "calculator"
    options: CalculatorOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        expression = self._term(numbers)
        for _ in range(self.options.terms - 1):
            operator = self.options.operators[numbers.below(len(self.options.operators))]
            if "(" not in expression and operator != "*" and numbers.below(8) < PAIR_PER_8:
                expression = f"({expression}{operator}{self._term(numbers)})"
            else:
                expression = f"{expression}{operator}{self._term(numbers)}"
        return f"{expression}=", shown(evaluate(expression))

    def _term(self, numbers: Numbers) -> str:
        bound: int = 10**self.options.max_digits
        return str(numbers.below(bound))

    def score(self, task: Task, completion: str) -> Score:
        answer = completion.strip(" \t\n\r")
        exact, number = float(answer == task.answer), float(is_number(answer))
        return Score(value=max(exact, self.options.number_credit * number), parts={"exact": exact, "number": number})

    def dialogue(self, _task: Task) -> DialogueRule:
        return DialogueRule("calculator", self.options.max_turns)
