"""What a monitoring system reads at `GET /metrics`: requests, refusals, latencies and bytes as they are counted here;
units, submissions, nodes and ledger from the storage; and the process.

No label names a node or an address: there is no bound on those. Times leave out what a long poll waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from shoal.hub.limits import Intake
from shoal.hub.service.reporting import Figure

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
METHODS = ("GET", "HEAD", "POST", "PUT")


class HubMetrics:
    """Counters of one hub, in a registry of their own: two hubs in one process do not mix."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        ProcessCollector(registry=own)
        labels, refused = ("route", "method", "status"), "Refusals, by code; rate.* are limits."
        took = "Time to answer, without what a long poll waited."
        self._requests = Counter("shoal_hub_requests", "Answers, by route, method and status.", labels, registry=own)
        self._seconds = Histogram("shoal_hub_request_seconds", took, labels[:2], buckets=SECONDS, registry=own)
        self._refusals = Counter("shoal_hub_refusals", refused, ("code",), registry=own)

    def note(self, route: str, method: str, status: int, code: str, took_s: float) -> None:
        """One request was answered. Whatever a stranger sends as a method is one label value, not a new one each."""
        method = method if method in METHODS else "other"
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route, method).observe(took_s)
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
            family = GaugeMetricFamily(f"shoal_hub_{figure.name}", figure.what, labels=figure.labels)
            for labels, value in sorted(figure.values.items()):
                family.add_metric(labels, value)
            yield family
        received = float(self._intake.received_bytes)
        yield CounterMetricFamily("shoal_hub_bodies_bytes", "Bytes of request bodies received.", value=received)
