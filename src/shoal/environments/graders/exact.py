"""The very text: what the completion says after thinking, spaces around it aside."""

from __future__ import annotations

from typing import ClassVar

from shoal.environments.graders.thinking import after_thinking
from shoal.environments.protocol import Score


class ExactGrader:
    name: ClassVar[str] = "exact"
    version: ClassVar[int] = 2

    def problem(self, answer: str) -> str:
        return "" if answer.strip() else "the answer is empty"

    def score(self, answer: str, completion: str) -> Score:
        exact = float(after_thinking(completion).strip() == answer.strip())
        return Score(value=exact, parts={"exact": exact})
