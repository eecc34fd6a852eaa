"""What a monitoring system reads at `GET /metrics`: how the hub answers, and how the run stands.

    requests, refusals, latencies, bytes ─ counted as they happen ─┐
    units, submissions, nodes, ledger ─── read from the storage ───┼─► one text for Prometheus
    memory, CPU, open files ─ the process ─────────────────────────┘

No label names a node or an address: there is no bound on those. Times do not count what a long poll waits for something
to happen. Who wants to know about one node asks `/nodes/{node}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from shoal.hub.limits import Intake
from shoal.hub.service.reporting import Figure

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "shoal_hub"
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
METHODS = ("GET", "HEAD", "POST", "PUT")


class HubMetrics:
    """Counters of one hub, in a registry of their own: two hubs in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            f"{PREFIX}_requests", "Answers, by route, method and status.", ("route", "method", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            f"{PREFIX}_request_seconds", "Time to answer, without what a long poll waited.", ("route", "method"),
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._refusals = Counter(
            f"{PREFIX}_refusals", "Refusals, by code; rate.* are limits.", ("code",), registry=self.registry
        )

    def note(self, route: str, method: str, status: int, code: str, took_s: float) -> None:
        """One request was answered. Whatever a stranger sends as a method is one label value, not a new one each."""
        known = method if method in METHODS else "other"
        self._requests.labels(route, known, str(status)).inc()
        self._seconds.labels(route, known).observe(took_s)
        if code:
            self.refused(code)

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class StateMetrics(Collector):
    """How the run stands, read when it is asked for."""

    def __init__(self, read: Callable[[], Iterable[Figure]], intake: Intake) -> None:
        self._read, self._intake = read, intake

    def collect(self) -> Iterable[Metric]:
        held = Figure("bodies_held_bytes", "Bytes of request bodies in memory.", self._intake.held_bytes)
        for figure in (*self._read(), held):
            family = GaugeMetricFamily(f"{PREFIX}_{figure.name}", figure.what, labels=figure.labels)
            for labels, value in sorted(figure.values.items()):
                family.add_metric(labels, value)
            yield family
        received, what = float(self._intake.received_bytes), "Bytes of request bodies received."
        yield CounterMetricFamily(f"{PREFIX}_bodies_bytes", what, value=received)
