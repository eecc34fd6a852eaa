"""The figures of an evaluation, from its records: for programs (summary.json) and for people (a table).

avg@k is the mean over tasks of the mean over a task's samples. pass@k is the probability that one of k samples passes
(has a score of 1). Unscored samples are counted, but are part of no other figure.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shoal.evaluation.plan import SamplingPlan
from shoal.evaluation.records import UNUSABLE, TaskRecord
from shoal.evaluation.statistics import Estimate, finite, mean_estimate, pass_at_k
from shoal.runtime.text import count_of

NAMED_TASKS = 3
MAX_FAILURES = 0.05  # share of samples, or tasks, without a score; with more an evaluation is not valid


class TaskResults:
    """The scored tasks of an evaluation, or of one part or kind; `counts` are samples and passes of each task."""

    def __init__(self) -> None:
        self.means, self.counts = list[float](), list[tuple[int, int]]()

    def add(self, record: TaskRecord) -> None:
        if record.mean is not None:
            self.means.append(record.mean)
            self.counts.append((len(record.scores), record.passes))

    def pass_at(self, k: int, seed: int) -> dict[str, Any] | None:
        return _estimate([pass_at_k(samples, passes, k) for samples, passes in self.counts if samples >= k], seed)

    def as_json(self, seed: int) -> dict[str, Any]:
        average = _estimate(self.means, seed)
        return {"tasks": len(self.means), "avg_at_k": average, "pass_at_1": self.pass_at(1, seed)}


def _estimate(values: list[float], seed: int) -> dict[str, Any] | None:
    if not values:
        return None
    found = mean_estimate(np.array(values), seed)
    return {"value": found.value, "low": finite(found.low), "high": finite(found.high)}


def summary_of(plan: SamplingPlan, records: Iterable[TaskRecord]) -> dict[str, Any]:
    everything, problems, unscored, truncated = TaskResults(), Counter[str](), Counter[str](), list[float]()
    by: dict[str, dict[str, TaskResults]] = {"part": defaultdict(TaskResults), "kind": defaultdict(TaskResults)}
    parts: dict[str, list[float]] = defaultdict(list)
    tasks = drawn = tokens = 0
    for record in records:
        tasks += 1
        drawn += len(record.samples)
        tokens += sum(sample.tokens for sample in record.samples)
        everything.add(record)
        for what, name in (("part", record.part), ("kind", record.kind)):
            if name:
                by[what][name].add(record)
        if record.problem:
            problems[record.problem] += 1
        if record.samples:
            truncated.append(record.truncated / len(record.samples))
        if missing := len(record.samples) - len(record.scores):
            unscored[record.task] += missing
        for name, value in (part for sample in record.samples for part in sample.parts.items()):
            parts[name].append(value)
    seed, k = plan.seed, plan.samples
    wanted, lost = (tasks - problems[UNUSABLE]) * k, unscored.total()  # unusable rows are not sampled
    average = _estimate(everything.means, seed)
    share, counts = (wanted - drawn + lost) / wanted if wanted else 1.0, {*(2**i for i in range(k.bit_length())), k}
    return {
        "tasks": tasks, "scored_tasks": len(everything.means), "samples": drawn,
        "unscored": {"samples": lost, "share": share, "tasks": list(unscored)[:20]},
        "problems": {reason: count for reason, count in sorted(problems.items()) if count},
        "avg_at_k": None if average is None else {"k": k, **average},
        "pass_at_k": {str(count): everything.pass_at(count, seed) for count in sorted(counts)},
        "truncated": _estimate(truncated, seed), "mean_tokens": tokens / max(1, drawn),
        "parts": {name: math.fsum(values) / len(values) for name, values in sorted(parts.items())},
        "by": {
            what: {name: found.as_json(seed) for name, found in sorted(groups.items())} for what, groups in by.items()
        },
    }  # fmt: skip


def table_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """`avg@4   0.412 [0.355, 0.470]` and so on, one number a line."""
    counts = f"{count_of(summary['scored_tasks'], 'task')}, {count_of(summary['samples'], 'sample')}"
    yield f"{counts}; 95 % intervals over tasks"
    rows: dict[str, str] = {}
    if summary["avg_at_k"] is not None:
        rows[f"avg@{summary['avg_at_k']['k']}"] = _shown(summary["avg_at_k"])
        passed = sorted(summary["pass_at_k"].items(), key=lambda pair: int(pair[0]))
        rows |= {f"pass@{k}": _shown(found) for k, found in passed if found is not None}
        rows["truncated"] = _shown(summary["truncated"])
        rows["tokens"] = f"{summary['mean_tokens']:.1f} on average"
        rows |= {name: f"{value:.3f} on average, a part of the score" for name, value in summary["parts"].items()}
        for what, groups in summary["by"].items():
            for name, group in groups.items() if len(groups) > 1 else ():
                if group["avg_at_k"] is not None:
                    of = f"of {count_of(group['tasks'], 'task')}"
                    rows[f"{what} {name}"] = f"{_shown(group['avg_at_k'])} {of}"
    width = max(map(len, rows), default=0)
    yield from (f"  {name:<{width}}  {text}" for name, text in rows.items())
    if not rows:
        yield "  nothing could be scored"
    yield from missing_lines(summary)


def missing_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    unscored = summary["unscored"]
    if unscored["samples"]:
        more = ", …" if len(unscored["tasks"]) > NAMED_TASKS else ""
        tasks = ", ".join(unscored["tasks"][:NAMED_TASKS]) + more
        yield f"  {count_of(unscored['samples'], 'sample')} unscored, counted in no figure: scoring failed ({tasks})"
    for reason, count in summary["problems"].items():
        yield f"  {count_of(count, 'task')} left out: {reason}"


def _shown(found: Mapping[str, Any]) -> str:
    ends = {} if found["low"] is None else {end: found[end] for end in ("low", "high")}
    return str(Estimate(found["value"], **ends))
