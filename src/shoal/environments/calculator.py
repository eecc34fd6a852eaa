"""Arithmetic with a calculator: the model may have expressions computed before it says what the value is.

12*(3+4)=  ─►  model: 12*(3+4)  ─►  calculator: 84  ─►  model: 84
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shoal.environments.dialogue import DEFAULT_TURNS, MAX_TURNS, DialogueRule
from shoal.environments.generated import GeneratedEnvironment, Numbers, Options
from shoal.environments.protocol import Score, Task
from shoal.environments.tools.calculator import evaluate, is_number, shown

PAIR_PER_8 = 3  # of two neighbours, this many eighths are in parentheses


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
    """Expressions of whole numbers; 1 for the value as the last turn says it, 0 for what is no number."""

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
