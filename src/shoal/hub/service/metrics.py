"""`GET /metrics`: requests, refusals, latencies and bytes as counted here; the run from the storage; the process. No
label names a node or an address: there is no bound on those. Times leave out what a long poll waits."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as Total
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from shoal.hub.service.reporting import Figure

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
METHODS = ("GET", "HEAD", "POST", "PUT")


class HubMetrics(Collector):
    """Counters of one hub, in a registry of their own: two hubs in one process do not mix."""

    def __init__(self, read: Callable[[], Iterable[Figure]], bodies: Callable[[], tuple[int, int]]) -> None:
        own = self.registry = CollectorRegistry()
        ProcessCollector(registry=own)
        labels, refused = ("route", "method", "status"), "Refusals, by code; rate.* are limits."
        took = "Time to answer, without what a long poll waited."
        self._requests = Total("shoal_hub_requests", "Answers, by route, method and status.", labels, registry=own)
        self._seconds = Histogram("shoal_hub_request_seconds", took, labels[:2], buckets=SECONDS, registry=own)
        self._refusals = Total("shoal_hub_refusals", refused, ("code",), registry=own)
        self._known: dict[tuple[str, str, int], tuple[Total, Histogram]] = {}  # labels are slow to look up
        self._read, self._bodies = read, bodies  # bytes of bodies: held now, received so far
        own.register(self)

    def note(self, route: str, method: str, status: int, code: str, took_s: float) -> None:
        method = method if method in METHODS else "other"  # what a stranger sends is no label of its own
        known = self._known.get((route, method, status))
        if known is None:
            known = self._requests.labels(route, method, str(status)), self._seconds.labels(route, method)
            self._known[route, method, status] = known
        known[0].inc()
        known[1].observe(took_s)
        if code:
            self.refused(code)

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        held_bytes, received_bytes = self._bodies()
        held = Figure("bodies_held_bytes", "Bytes of request bodies in memory.", held_bytes)
        for figure in (*self._read(), held):
            family = GaugeMetricFamily(f"shoal_hub_{figure.name}", figure.what, labels=figure.labels)
            for labels, value in sorted(figure.values.items()):
                family.add_metric(labels, value)
            yield family
        what = "Bytes of request bodies received."
        yield CounterMetricFamily("shoal_hub_bodies_bytes", what, value=float(received_bytes))
