"""Numbers for a monitoring system, as text that Prometheus and its relatives read.

# HELP shoal_cast_sent_bytes_total Bytes of bodies sent.
# TYPE shoal_cast_sent_bytes_total counter
shoal_cast_sent_bytes_total 1048576
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "shoal_cast_"


@dataclass(frozen=True)
class Metric:
    """One number, or one per value of a label. A counter only grows (and its name ends in `_total`)."""

    name: str
    type: Literal["counter", "gauge"]
    what: str
    value: float | None = None
    by: Mapping[str, float] = field(default_factory=dict)
    label: str = "source"


def render(metrics: Iterable[Metric]) -> str:
    """The text of a whole answer."""
    return "".join(_render_one(metric) for metric in metrics)


def _render_one(metric: Metric) -> str:
    name = PREFIX + metric.name
    lines = [f"# HELP {name} {metric.what}", f"# TYPE {name} {metric.type}"]
    if metric.value is not None:
        lines.append(f"{name} {_number(metric.value)}")
    lines += [f'{name}{{{metric.label}="{_escaped(key)}"}} {_number(value)}' for key, value in metric.by.items()]
    return "\n".join([*lines, ""])


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
