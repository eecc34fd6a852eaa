"""Add two numbers: `17+25=` wants `42`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shoal.environments.generated import GeneratedEnvironment, Numbers, Options


class AdditionOptions(Options):
    """How large the two numbers may be."""

    max_digits: int = Field(default=2, ge=1, le=64)


class AdditionEnvironment(GeneratedEnvironment):
    """Pairs of numbers below 10**max_digits, uniformly."""

    name: ClassVar[str] = "addition"
    options: AdditionOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        bound: int = 10**self.options.max_digits
        left, right = numbers.below(bound), numbers.below(bound)
        return f"{left}+{right}=", str(left + right)
