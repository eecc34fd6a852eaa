"""The tables of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Pair:
    category: str
    right: bool
    gold: str
    completion: str

    def __str__(self) -> str:
        return f"{self.category}: {self.gold} {'=' if self.right else '!='} {self.completion}"


def pairs(name: str = "math_pairs.txt") -> list[Pair]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [_pair(line) for line in lines if line and not line.startswith("# ")]


def _pair(line: str) -> Pair:
    category, right, gold, answer = f"{line} ".split(" | ", 3)
    answer = answer.removesuffix(" ")
    completion = answer[1:].replace("⏎", "\n") if answer.startswith(">") else f"So it is \\boxed{{{answer}}}."
    return Pair(category, right == "1", gold, completion)
