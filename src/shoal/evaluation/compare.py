"""Compares two evaluations of the same tasks: is one model better, and how certain is that?

Models are compared task by task, because tasks differ more than models. Only common tasks with equal prompts count.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.evaluation.records import Results
from shoal.evaluation.statistics import Estimate, bootstrap_mean, detectable_difference, finite, sign_flip_p
from shoal.evaluation.summary import MAX_FAILURES

SIGNIFICANT = 0.05
MOVERS = 5
MAY_DIFFER = ("tasks", "samples", "batch_rows", "seed")  # fields of the plan


@dataclass(frozen=True)
class PairedComparison:
    """B against A: `means` of both by task. `unpaired` counts the other tasks, by reason."""

    means: Mapping[str, tuple[float, float]]
    unpaired: Mapping[str, int]
    difference: Estimate
    p_value: float
    detectable: float

    @property
    def verdict(self) -> str:
        """ "better" or "worse" if both the test and the interval show it, else "none"."""
        low, high = self.difference.low, self.difference.high
        if self.p_value >= SIGNIFICANT or math.isnan(low) or low <= 0 <= high:
            return "none"
        return "better" if self.difference.value > 0 else "worse"

    @property
    def sentence(self) -> str:
        d, count = self.difference, len(self.means)
        interval = "" if math.isnan(d.low) else f" [{d.low:+.3f}, {d.high:+.3f}]"
        numbers = f"{d.value:+.3f}{interval}, p = {self.p_value:.3g}"
        if self.verdict != "none":
            return f"B is {self.verdict}: {numbers}"
        if all(a == b for a, b in self.means.values()):
            return f"no difference was found: A and B scored the same on every one of {count} tasks"
        if math.isnan(self.detectable):
            return f"no difference was found: {numbers}; one task is too few"
        detail = f"with these {count} tasks a difference of {self.detectable:.3f} is found in four of five comparisons"
        return f"no difference was found: {numbers}; {detail}"

    def as_json(self) -> dict[str, Any]:
        d, count = self.difference, len(self.means)
        moved = sorted((b - a, task, {"task": task, "a": a, "b": b}) for task, (a, b) in self.means.items())
        return {
            "tasks": count, **self.unpaired,
            "mean_a": math.fsum(a for a, _ in self.means.values()) / count,
            "mean_b": math.fsum(b for _, b in self.means.values()) / count,
            "difference": {"value": d.value, "low": finite(d.low), "high": finite(d.high)},
            "p_value": self.p_value, "detectable_difference": finite(self.detectable),
            "verdict": self.verdict, "sentence": self.sentence,
            "gained": [shown for change, _, shown in reversed(moved[-MOVERS:]) if change > 0],
            "lost": [shown for change, _, shown in moved[:MOVERS] if change < 0],
        }  # fmt: skip


def compare(a: Results, b: Results, force: bool = False, seed: int = 0) -> PairedComparison:
    """Pair the tasks and test the difference; results of other tasks or scoring are a `ConfigError` unless forced."""
    problem = _difference(a.about, b.about)
    for each in (each for each in (a, b) if each.missing_share > MAX_FAILURES):
        unscored = f"{each.missing_share:.1%} of the samples of {each.path} have no score"
        problem = problem or f"{unscored}, and the others may be easier"
    if problem and not force:
        raise ConfigError(f"{a.path} and {b.path} cannot be compared: {problem}; --force compares them anyway")
    shared = sorted(a.tasks.keys() & b.tasks.keys())
    if not (same := [task for task in shared if a.tasks[task][0] == b.tasks[task][0]]):
        which = "--env and --seed (it decides the length targets)" if shared else "--env"
        raise ConfigError(f"{a.path} and {b.path} have no task in common: evaluate both models with the same {which}")
    means = {task: (a.tasks[task][1], b.tasks[task][1]) for task in same}
    differences = np.array([after - before for before, after in means.values()])
    unpaired = {"only_in_a": len(a.tasks) - len(shared), "only_in_b": len(b.tasks) - len(shared)}
    unpaired |= {"other_prompt": len(shared) - len(same)}
    difference, p_value = bootstrap_mean(differences, seed), sign_flip_p(differences, seed)
    return PairedComparison(means, unpaired, difference, p_value, detectable_difference(differences))


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    first, second = a.get("environment", {}), b.get("environment", {})
    if first.get("digest") != second.get("digest"):
        names = " and ".join(f"{each.get('name')} {str(each.get('digest'))[:12]}" for each in (first, second))
        return f"their environments are not the same ({names})"
    first, second = a.get("plan", {}), b.get("plan", {})
    for key in sorted((first.keys() | second.keys()) - set(MAY_DIFFER)):
        if first.get(key) != second.get(key):
            return f"{key} is {first.get(key)} in one and {second.get(key)} in the other"
    return ""


def comparison_lines(a: Results, b: Results, found: PairedComparison) -> Iterator[str]:
    numbers = found.as_json()
    for name, results, mean in (("A", a, numbers["mean_a"]), ("B", b, numbers["mean_b"])):
        model = results.about.get("model", {})
        yield f"{name}  {model.get('name', '?')} ({str(model.get('digest', ''))[:12]}, {results.path}): {mean:.3f}"
    left = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in found.unpaired.items() if count)
    yield f"{len(found.means)} tasks in both" + (f" ({left})" if left else "")
    for word in ("gained", "lost"):
        for mover in numbers[word]:
            yield f"  {word}  {mover['task']}: {mover['a']:.3f} → {mover['b']:.3f}"
    yield found.sentence
