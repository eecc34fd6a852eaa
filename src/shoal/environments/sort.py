"""Put digits in ascending order: `3142=` wants `1234`.

The smallest task on which a policy visibly learns something. The built-in tiny policy was shown lists of up to five
digits; the default tasks have six to eight, longer than any demonstration, and nobody shows it an answer.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from shoal.environments.generated import GeneratedEnvironment, Numbers, Options


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
    """Lists of `min_digits` to `max_digits` digits, every length equally often."""

    name: ClassVar[str] = "sort"
    options: SortOptions

    def question(self, numbers: Numbers) -> tuple[str, str]:
        low, high = self.options.min_digits, self.options.max_digits
        length = low + numbers.below(high - low + 1)
        digits = [str(numbers.below(10)) for _ in range(length)]
        return "".join(digits) + "=", "".join(sorted(digits))
