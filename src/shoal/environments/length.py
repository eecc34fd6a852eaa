"""Length budgets: which target a unit has, how its prompt says so, and what the length does to the reward.

The target follows from the run and the unit alone: the hub draws it, and any validator draws the same one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from shoal.environments.protocol import Score, Task
from shoal.environments.settings import LengthSettings


@dataclass(frozen=True)
class LengthBudget:
    """The rule of a run; see `LengthSettings` for the forms."""

    settings: LengthSettings

    def target(self, run: str, unit: int) -> int:
        """The target of a unit; every one of `targets` equally often."""
        digest = hashlib.sha256(f"shoal/length/v1\n{run}\n{unit}".encode()).digest()
        return self.settings.targets[int.from_bytes(digest[:8], "big") % len(self.settings.targets)]

    def ask(self, task: Task, target: int) -> Task:
        """The task with its target in the prompt."""
        said = self.settings.text.replace("{target}", str(target))
        return replace(task, prompt=f"{task.prompt} {said}")

    def worth(self, score: Score, target: int, tokens: int) -> Score:
        """What a completion of so many tokens is worth; parts `task`, `length` and `target` say how it came about."""
        settings, task = self.settings, score.value
        if settings.form == "exact":
            value = task - settings.alpha * abs(target - tokens)
        elif settings.form == "max":
            value = task * min(1.0, max(0.0, settings.alpha * (target - tokens) + settings.delta))
        else:
            value = task if tokens <= target else 0.0
        parts = {**score.parts, "task": task, "length": value - task, "target": float(target)}
        return replace(score, value=value, parts=parts)
