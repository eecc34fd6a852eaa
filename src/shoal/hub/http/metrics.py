"""What a monitoring system reads at `GET /metrics`: how the hub answers, and how the run stands.

    requests, refusals, latencies, bytes ─ counted as they happen ─┐
    units, submissions, nodes, ledger ─── read from the storage ───┼─► one text for Prometheus
    memory, CPU, open files ─ the process ─────────────────────────┘   (the storage is read every five seconds at most)

No label names a node or an address: there is no bound on those. Times do not count what a long poll waits for something
to happen. Who wants to know about one node asks `/nodes/{node}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from shoal.hub.limits import Intake
from shoal.hub.service.reporting import Figures
from shoal.protocol import Evaluation
from shoal.runtime.clock import Clock, SystemClock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "shoal_hub"
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
FRESH_S = 5.0
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
    """Numbers that are read when they are asked for, and kept for a moment: anyone may ask, as often as they like."""

    def __init__(self, read: Callable[[], Sequence[Metric]], clock: Clock = SystemClock()) -> None:
        self._read = read
        self._clock = clock
        self._kept: Sequence[Metric] = ()
        self._read_at_s = float("-inf")

    def collect(self) -> Iterable[Metric]:
        now_s = self._clock.monotonic_s()
        if now_s - self._read_at_s >= FRESH_S:
            self._kept, self._read_at_s = self._read(), now_s
        return self._kept


def run_metrics(figures: Figures, intake: Intake) -> Sequence[Metric]:
    """How the run stands, for Prometheus."""
    return [
        _by("units", "Units, by state.", ("state",), {(state,): count for state, count in figures.units.items()}),
        _by("submissions", "Submissions, by state.", ("state",), {(s,): n for s, n in figures.submissions.items()}),
        _by("nodes", "Registered nodes, by role, sanction and presence.", ("role", "state", "presence"), figures.nodes),
        _by("alarms", "Alarms for the run's owner, by what they are about.", ("about",), figures.alarms),
        _gauge("credit", "Credit of all nodes that is final.", figures.credit),
        _gauge("credit_pending", "Credit of all nodes that an audit could still take.", figures.pending),
        _gauge("policy_version", "The newest policy that was announced.", figures.version),
        _gauge("finished", "1 once the run's last version is out.", figures.finished),
        _gauge("ledger_rows", "Rows of the ledger.", figures.ledger_rows),
        _gauge("outbox_rows", "Rows that wait to be moved into the ledger.", figures.outbox_rows),
        _gauge("leader", "1 if this hub does the background work of the run.", figures.leads),
        _gauge("waiting", "Nodes whose polls have got nothing yet.", figures.waiting),
        _gauge("waiting_seconds", "How long the longest of them waits.", figures.waiting_s),
        _gauge("halted", "1 while the owner has paused the run, or lets it drain.", figures.conduct != "running"),
        _gauge("wasted_groups", "Groups that were accepted too late to be trained on.", figures.waste.stale),
        _gauge("late_submissions", "Submissions refused since the start: their unit was gone.", figures.waste.late),
        _gauge("lapsed_leases", "Leases that were let lapse.", figures.waste.lapsed),
        _gauge("wasted_fraction", "Of all groups handed in, those that were too late.", figures.waste.fraction),
        _gauge("bodies_held_bytes", "Bytes of request bodies in memory.", intake.held_bytes),
        CounterMetricFamily(f"{PREFIX}_bodies_bytes", "Bytes of request bodies received.", value=intake.received_bytes),
        _by("tasks", "Tasks that were seen, by difficulty.", ("pool",), {(p,): n for p, n in figures.pools.items()}),
        _gauge("no_sample", "Groups that the validators known now could not score.", figures.no_sample),
        _gauge("unusable_tasks", "Tasks passed over since the start: they cannot be used.", figures.unusable),
        *_measured(figures.measured),
    ]


def _measured(newest: Evaluation | None) -> list[Metric]:
    """The newest evaluation that is complete; nothing before there is one."""
    if newest is None or newest.mean is None:
        return []
    return [
        _gauge("held_out_score", "Mean score of the last version that was measured.", newest.mean),
        _gauge("held_out_version", "The last version that was measured on held-out tasks.", newest.policy.version),
    ]


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", what, value=float(value))


def _by(name: str, what: str, labels: Sequence[str], counts: Mapping[tuple[str, ...], int]) -> Metric:
    """One value for each combination of labels. They are states and roles: few, whoever comes."""
    family = GaugeMetricFamily(f"{PREFIX}_{name}", what, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family
