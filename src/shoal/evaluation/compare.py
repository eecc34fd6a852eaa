"""Two evaluations of the same tasks: is one model better, and how sure is that?

Task by task: a difference of means says little while tasks differ more than models do, a difference on each task says
much. Only tasks that both have, with the same prompt, are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.evaluation.records import Results, TaskResult
from shoal.evaluation.statistics import Estimate, bootstrap_means, detectable_difference, finite, sign_flip_p
from shoal.evaluation.summary import MAX_FAILURES

SIGNIFICANT = 0.05
MOVERS = 5
LEFT_ALONE = ("tasks", "samples", "batch_rows", "seed")
"""What two evaluations may differ in and still be about the same: how much of it was drawn, and with which seed."""


@dataclass(frozen=True)
class Pair:
    first: TaskResult
    second: TaskResult

    @property
    def difference(self) -> float:
        return self.second.mean - self.first.mean


@dataclass(frozen=True)
class PairedComparison:
    """B against A over the tasks of both."""

    pairs: tuple[Pair, ...]
    only_a: int
    only_b: int
    other_prompt: int
    difference: Estimate
    p_value: float
    detectable: float

    @property
    def verdict(self) -> str:
        """ "better", "worse" or "none": told apart only where the test and the interval both say so."""
        low, high = self.difference.low, self.difference.high
        if self.p_value >= SIGNIFICANT or math.isnan(low) or low <= 0 <= high:
            return "none"
        return "better" if self.difference.value > 0 else "worse"

    @property
    def sentence(self) -> str:
        d = self.difference
        interval = "" if math.isnan(d.low) else f" [{d.low:+.3f}, {d.high:+.3f}]"
        numbers = f"{d.value:+.3f}{interval}, p = {self.p_value:.3g}"
        if self.verdict != "none":
            return f"B is {self.verdict}: {numbers}"
        if all(pair.difference == 0 for pair in self.pairs):
            return f"no difference can be told: A and B scored the same on every one of {len(self.pairs)} tasks"
        if math.isnan(self.detectable):
            return f"no difference can be told: {numbers}; one task says nothing"
        return (
            f"no difference can be told: {numbers}; with these {len(self.pairs)} tasks a difference of "
            f"{self.detectable:.3f} would be, four times in five"
        )

    def movers(self) -> tuple[list[Pair], list[Pair]]:
        ranked = sorted(self.pairs, key=lambda pair: (pair.difference, pair.first.task))
        lost = [pair for pair in ranked[:MOVERS] if pair.difference < 0]
        return [pair for pair in reversed(ranked[-MOVERS:]) if pair.difference > 0], lost

    def as_json(self) -> dict[str, Any]:
        gained, lost = (
            [{"task": pair.first.task, "a": pair.first.mean, "b": pair.second.mean} for pair in moved]
            for moved in self.movers()
        )
        d, count = self.difference, len(self.pairs)
        return {
            "tasks": count, "only_in_a": self.only_a, "only_in_b": self.only_b, "other_prompt": self.other_prompt,
            "mean_a": math.fsum(pair.first.mean for pair in self.pairs) / count,
            "mean_b": math.fsum(pair.second.mean for pair in self.pairs) / count,
            "difference": {"value": d.value, "low": finite(d.low), "high": finite(d.high)},
            "p_value": self.p_value, "detectable_difference": finite(self.detectable),
            "verdict": self.verdict, "sentence": self.sentence, "gained": gained, "lost": lost,
        }  # fmt: skip


def compare(a: Results, b: Results, force: bool = False, seed: int = 0) -> PairedComparison:
    """Pair the tasks and test the difference; results of other tasks or scoring are a `ConfigError` unless forced."""
    hollow = (
        f"{each.missing_share:.1%} of the samples of {each.path} have no score, so what is left may be the easy part"
        for each in (a, b) if each.missing_share > MAX_FAILURES
    )  # fmt: skip
    problem = _incomparable(a.about, b.about) or next(hollow, "")
    if problem and not force:
        raise ConfigError(f"{a.path} and {b.path} cannot be compared: {problem}; --force compares them all the same")
    ours = {result.task: result for result in a.tasks}
    theirs = {result.task: result for result in b.tasks}
    shared = [Pair(ours[task], theirs[task]) for task in sorted(ours.keys() & theirs.keys())]
    pairs = tuple(pair for pair in shared if pair.first.prompt_digest == pair.second.prompt_digest)
    if not pairs:
        same = "--env and --seed, which decides the lengths asked for" if shared else "--env"
        raise ConfigError(f"{a.path} and {b.path} have no task in common: evaluate both models with the same {same}")
    differences = np.array([pair.difference for pair in pairs])
    return PairedComparison(
        pairs,
        only_a=len(ours) - len(shared),
        only_b=len(theirs) - len(shared),
        other_prompt=len(shared) - len(pairs),
        difference=bootstrap_means(differences[:, None], seed)[0],
        p_value=sign_flip_p(differences, seed),
        detectable=detectable_difference(differences),
    )


def _incomparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Why two evaluations are not about the same, in words; empty if they are."""
    first, second = a.get("environment", {}), b.get("environment", {})
    if first.get("digest") != second.get("digest"):
        return (
            f"their environments are not the same ({first.get('name')} {str(first.get('digest'))[:12]} and "
            f"{second.get('name')} {str(second.get('digest'))[:12]})"
        )
    plans = a.get("plan", {}), b.get("plan", {})
    for key in sorted(plans[0].keys() | plans[1].keys()):
        if key not in LEFT_ALONE and plans[0].get(key) != plans[1].get(key):
            return f"{key} is {plans[0].get(key)} in one and {plans[1].get(key)} in the other"
    return ""


def comparison_lines(a: Results, b: Results, found: PairedComparison) -> Iterator[str]:
    """The report for people; its last line is what may be concluded."""
    numbers = found.as_json()
    for name, results, mean in (("A", a, numbers["mean_a"]), ("B", b, numbers["mean_b"])):
        model = results.about.get("model", {})
        yield f"{name}  {model.get('name', '?')} ({str(model.get('digest', ''))[:12]}, {results.path}): {mean:.3f}"
    unpaired = {
        "only in A": found.only_a, "only in B": found.only_b, "with another prompt in each": found.other_prompt
    }  # fmt: skip
    left = ", ".join(f"{count} {what}" for what, count in unpaired.items() if count)
    yield f"{len(found.pairs)} tasks in both" + (f" ({left})" if left else "")
    for word in ("gained", "lost"):
        for mover in numbers[word]:
            yield f"  {word}  {mover['task']}: {mover['a']:.3f} → {mover['b']:.3f}"
    yield found.sentence
