"""The table of pairs, and a grader whose symbolic algebra is cut off early."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parents[2] / "data" / "math_pairs.txt"


@dataclass(frozen=True)
class Pair:
    category: str
    right: bool
    gold: str
    completion: str

    def __str__(self) -> str:
        return f"{self.category}: {self.gold} {'=' if self.right else '!='} {self.completion}"


def pairs() -> list[Pair]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [_pair(line) for line in lines if line and not line.startswith("# ")]


def _pair(line: str) -> Pair:
    category, right, gold, answer = f"{line} ".split(" | ", 3)
    answer = answer.removesuffix(" ")
    completion = answer[1:].replace("⏎", "\n") if answer.startswith(">") else f"So it is \\boxed{{{answer}}}."
    return Pair(category, right == "1", gold, completion)
