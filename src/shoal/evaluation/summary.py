"""The numbers of an evaluation, from its records: for programs (summary.json) and for people (a table).

avg@k is the mean over tasks of the mean over a task's samples. pass@k is the chance that one of k samples passes, a
pass being a score of 1. A sample that could not be scored is unscored: it is counted, and in no number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.evaluation.plan import SamplingPlan
from shoal.evaluation.records import UNUSABLE, TaskRecord
from shoal.evaluation.statistics import Estimate, finite, ks_up_to, mean_estimate, pass_at_k
from shoal.runtime.text import count_of

SHOWN_PROBLEMS = 20
NAMED_TASKS = 3
MAX_FAILURES = 0.05
"""The share of samples, or tasks, without a score from which on an evaluation does not count as one."""


@dataclass
class TaskResults:
    """The tasks of an evaluation, or of one part or kind of it: what is needed of each, and no more."""

    means: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    truncated: list[float] = field(default_factory=list)

    def add(self, record: TaskRecord) -> None:
        if record.samples:
            self.truncated.append(record.truncated / len(record.samples))
        if record.mean is not None:
            self.means.append(record.mean)
            self.samples.append(len(record.scores))
            self.passes.append(record.passes)

    def average(self, seed: int) -> Estimate | None:
        return mean_estimate(np.array(self.means), seed) if self.means else None

    def pass_at(self, k: int, seed: int) -> Estimate | None:
        """Over the tasks that have as many samples."""
        pairs = zip(self.samples, self.passes, strict=True)
        values = [pass_at_k(samples, passes, k) for samples, passes in pairs if samples >= k]
        return mean_estimate(np.array(values), seed) if values else None


@dataclass
class SummaryTally:
    """All that a summary says, taken in record by record."""

    plan: SamplingPlan
    whole: TaskResults = field(default_factory=TaskResults)
    by: dict[str, dict[str, TaskResults]] = field(default_factory=lambda: {"part": {}, "kind": {}})
    parts: dict[str, list[float]] = field(default_factory=dict)
    tasks: int = 0
    drawn: int = 0
    unscored: int = 0
    unscored_ids: list[str] = field(default_factory=list)
    tokens: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    problem_ids: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, plan: SamplingPlan, records: Iterable[TaskRecord]) -> SummaryTally:
        tally = cls(plan)
        for record in records:
            tally.add(record)
        return tally

    def add(self, record: TaskRecord) -> None:
        self.tasks += 1
        if record.problem:
            self.problems[record.problem] += 1
            if len(self.problem_ids) < SHOWN_PROBLEMS:
                self.problem_ids.append(record.task)
        if len(record.scores) < len(record.samples) and len(self.unscored_ids) < SHOWN_PROBLEMS:
            self.unscored_ids.append(record.task)
        self.whole.add(record)
        for what, name in (("part", record.part), ("kind", record.kind)):
            if name:
                self.by[what].setdefault(name, TaskResults()).add(record)
        for sample in record.samples:
            self.drawn += 1
            self.unscored += sample.score is None
            self.tokens += sample.tokens
            for name, value in sample.parts.items():
                total = self.parts.setdefault(name, [0.0, 0.0])
                total[0], total[1] = total[0] + value, total[1] + 1

    @property
    def failed_share(self) -> float:
        """Samples that should be there and have no score: not drawn, or not scored. Unusable rows have no samples."""
        wanted = (self.tasks - self.problems[UNUSABLE]) * self.plan.samples
        scored = self.drawn - self.unscored
        return (wanted - scored) / wanted if wanted else 1.0

    def as_json(self) -> dict[str, Any]:
        seed, drawn = self.plan.seed, max(1, self.drawn)
        average = _estimate(self.whole.average(seed))
        return {
            "tasks": self.tasks,
            "scored_tasks": len(self.whole.means),
            "samples": self.drawn,
            "unscored": {"samples": self.unscored, "share": self.failed_share, "tasks": self.unscored_ids},
            "problems": {"reasons": dict(sorted(self.problems.items())), "tasks": self.problem_ids},
            "avg_at_k": None if average is None else {"k": self.plan.samples, **average},
            "pass_at_k": {str(k): _estimate(self.whole.pass_at(k, seed)) for k in ks_up_to(self.plan.samples)},
            "truncated": _estimate(mean_estimate(np.array(self.whole.truncated), seed)) if self.drawn else None,
            "mean_tokens": self.tokens / drawn,
            "parts": {name: total / count for name, (total, count) in sorted(self.parts.items())},
            "by": {
                what: {
                    name: {
                        "tasks": len(group.means), "avg_at_k": _estimate(group.average(seed)),
                        "pass_at_1": _estimate(group.pass_at(1, seed)),
                    }
                    for name, group in sorted(groups.items())
                }
                for what, groups in self.by.items()
            },
        }  # fmt: skip


def _estimate(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else {"value": found.value, "low": finite(found.low), "high": finite(found.high)}


def table_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """`avg@4   0.412 [0.355, 0.470]` and so on, one number a line."""
    counts = f"{count_of(summary['scored_tasks'], 'task')}, {count_of(summary['samples'], 'sample')}"
    yield f"{counts}; 95 % intervals over tasks"
    rows = list(_numbered(summary)) if summary["avg_at_k"] is not None else [("", "nothing could be scored")]
    width = max(len(name) for name, _ in rows)
    yield from (f"  {name:<{width}}  {text}" if name else f"  {text}" for name, text in rows)
    yield from missing_lines(summary)


def _numbered(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    average = summary["avg_at_k"]
    yield f"avg@{average['k']}", shown(average)
    for k, found in sorted(summary["pass_at_k"].items(), key=lambda pair: int(pair[0])):
        if found is not None:
            yield f"pass@{k}", shown(found)
    yield "truncated", shown(summary["truncated"])
    yield "tokens", f"{summary['mean_tokens']:.1f} on average"
    for name, value in summary["parts"].items():
        yield name, f"{value:.3f} on average, a part of the score"
    for what, groups in summary["by"].items():
        for name, group in groups.items() if len(groups) > 1 else ():
            if group["avg_at_k"] is not None:
                yield f"{what} {name}", f"{shown(group['avg_at_k'])} of {count_of(group['tasks'], 'task')}"


def missing_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    unscored = summary["unscored"]
    if unscored["samples"]:
        more = ", …" if len(unscored["tasks"]) > NAMED_TASKS else ""
        tasks = ", ".join(unscored["tasks"][:NAMED_TASKS]) + more
        yield f"  {count_of(unscored['samples'], 'sample')} unscored, counted in no figure: scoring failed ({tasks})"
    for reason, count in summary["problems"]["reasons"].items():
        yield f"  {count_of(count, 'task')} left out: {reason}"


def shown(found: Mapping[str, Any]) -> str:
    low, high = (math.nan if found[end] is None else found[end] for end in ("low", "high"))
    return str(Estimate(found["value"], low, high))
