"""What anyone may read: the run, its status, figures, and ledger; and whether the run can continue by itself.

`/status` names a standstill (who is missing, why, what to do) at once when the last node of a role is banned or
suspended; after `nodes.HERE_MS` without a sign of it; after `STARTING_MS` if none of a role has come at all.
A validator audits known-bad submissions (canaries) among the real ones, and counts in its heartbeats how many it caught
and missed. If it missed any, or met none, its audits prove nothing: an alarm (`validator_alarms`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as Total
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from shoal import ledger
from shoal.hub.service.context import Context, node_label, node_view, orders_of, shared
from shoal.hub.service.measuring import in_force_of
from shoal.hub.service.upkeep import Posting
from shoal.hub.state import UNDECIDED_SUBMISSIONS, NodeRow, RaiseAlarm, UnitState, calibrations, evaluations, pacing
from shoal.hub.state.nodes import HERE_MS
from shoal.hub.state.orders import Orders
from shoal.hub.storage import Presence, Reader
from shoal.hub.storage.reader import Rank
from shoal.protocol import LedgerHead, NodeState, RunInfo, SignedDocument, sign_document
from shoal.protocol.node import WORKERS
from shoal.protocol.status import LedgerPage, RecentVerdict, RunStatus, Wait

VERDICTS_SHOWN, VERDICTS_SEARCHED, REFUSALS_SHOWN = 20, 500, 100
REPORTS_SHOWN, ALARMS_SHOWN, VERSIONS_SHOWN = 200, 20, 64
MAX_PENDING, MAX_WAITING = 1000, 500
NODES_SHOWN = 200  # of more nodes than this, a status shows those that matter most; `GET /nodes` has all
RANKS: tuple[tuple[Rank, int], ...] = (("trusted", 40), ("sanctioned", 40), ("credit", 60), ("seen", NODES_SHOWN))
SILENT_AFTER_MS = 60_000  # a node that has not been heard of for so long is gone, not waiting
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
METHODS = ("GET", "HEAD", "POST", "PUT")


class Reporting:
    def __init__(self, context: Context, posting: Posting) -> None:
        self._context, self._posting = context, posting
        self._run_info: tuple[Orders, calibrations.InForce, SignedDocument] | None = None

    def run_info(self) -> SignedDocument:
        with self._context.storage.read() as reader:
            orders, in_force = orders_of(reader), in_force_of(reader)
        if self._run_info is None or self._run_info[:2] != (orders, in_force):
            config = self._context.config
            info = RunInfo(
                run=config.run_id, name=config.run.name, root_key=config.root_key,
                certificates=orders.trusted(config.certificates), sources=orders.sources(config.sources),
                last_resort=config.last_resort, environment=config.environment.name,
                environment_digest=config.environment.digest, sampling=config.sampling, proof=config.proof,
                profiles=calibrations.taken(in_force, config.profiles, config.measurable),
                group_size=config.run.group_size, max_staleness=config.run.max_staleness, steps=config.run.steps,
                hubs=config.settings.advertise, revoked=orders.revoked, model=config.model,
                link_mbit=config.settings.link_mbit,
            )  # fmt: skip
            self._run_info = (orders, in_force, sign_document(info, config.key))
        return self._run_info[2]

    def ledger_head(self) -> SignedDocument:
        self._posting.post_for_reader()
        with self._context.storage.read() as reader:
            return sign_document(self._head(reader), self._context.config.key)

    def ledger_page(self, after: int, limit: int) -> LedgerPage:
        self._posting.post_for_reader()
        with self._context.storage.read() as reader:
            return LedgerPage(entries=tuple(reader.ledger_after(after, limit)), head=self._head(reader))

    def status(self) -> RunStatus:
        config, rules, now_ms = self._context.config, self._context.rules, self._context.clock.now_ms()
        self._posting.post_for_reader()
        self._context.storage.flush()
        with self._context.storage.read() as reader:  # where hubs share a database, only its leader sweeps
            overdue = not self._context.storage.is_shared and bool(reader.overdue_holdings(now_ms))
        if overdue:
            with self._context.decision(sweep=True):
                pass  # the sweep is the whole decision
        with self._context.storage.read() as reader:
            progress, counts, units = reader.progress(), reader.node_counts(), reader.unit_counts()
            nodes, orders = _notable(reader, sum(counts.values())), orders_of(reader)
            presences = reader.presences_named([node.node for node in nodes])
            outgoing = reader.outbox(1)
            slices = reader.evaluations_since(0, VERSIONS_SHOWN) if rules.evaluation is not None else []
            drained = orders.conduct == "draining" and not (units[UnitState.LEASED] or units[UnitState.SUBMITTED])
            return RunStatus(
                run=config.run_id, name=config.run.name, now_ms=now_ms,
                finished=pacing.is_finished(rules, progress), steps=config.run.steps,
                step=progress.policy.version if progress.policy else 0, policy=progress.policy,
                max_staleness=config.run.max_staleness, units=units, submissions=reader.submission_counts(),
                nodes=tuple(node_view(node, presences.get(node.node), rules, now_ms) for node in nodes),
                waits=tuple(self._waits(reader, now_ms)), verdicts=tuple(_recent(reader)),
                reports=tuple(reader.reports(REPORTS_SHOWN)), alarms=tuple(reader.alarms(ALARMS_SHOWN)),
                ledger=self._head(reader), standing=orders.standing.model_copy(update={"drained": drained}),
                node_counts=counts, outbox=reader.outbox_length() if outgoing else 0,
                outbox_since_ms=outgoing[0].at_ms if outgoing else None,
                pools=reader.pool_counts() if config.pools is not None else {},
                evaluations=tuple(evaluations.results(slices)), unscored=unscored_groups(nodes, presences),
                standstill=tuple(standstill(self._context, reader, now_ms)),
            )  # fmt: skip

    def _waits(self, reader: Reader, now_ms: int) -> list[Wait]:
        """Polls, what nodes say they wait for, leases, submissions not judged yet; of very many the longest waits. Once
        the last batch is written, only the trainer counts."""
        progress, rules = reader.progress(), self._context.rules
        if pacing.is_finished(rules, progress):
            return []
        last = progress.next_step >= rules.steps
        said = reader.waiting_presences(now_ms - SILENT_AFTER_MS, MAX_WAITING)
        held = [] if last else reader.oldest_holdings(MAX_PENDING)
        pending = [] if last else reader.submissions_in(UNDECIDED_SUBMISSIONS, MAX_PENDING)
        concerned = [each.node for each in said] + [each.lease.node for each in held]
        concerned += [row.validator for row in pending if row.validator]
        rows = reader.nodes_named(list(dict.fromkeys(concerned)))
        names = {node: node_label(row) for node, row in rows.items() if not last or row.role == "trainer"}
        shut_out = {node_label(row) for row in reader.nodes_ranked("sanctioned", MAX_WAITING)}
        polls = [] if last else self._context.waits.current(now_ms)
        waits = [wait for wait in polls if wait.who not in shut_out]
        hidden = shut_out | {wait.who for wait in waits}
        for each in said:
            if each.node in names and names[each.node] not in hidden:
                waits.append(Wait(who=names[each.node], what=each.waiting_for, since_ms=each.waiting_since_ms))
        leased = [(each.unit.unit, names[each.lease.node], each.lease.issued_at_ms) for each in held]
        nobody = "a validator to take them"
        checked = [(row.unit, names.get(row.validator or "", nobody), row.received_at_ms) for row in pending]
        return [*waits, *_folded("unit", leased), *_folded("submission of unit", checked)]

    def _head(self, reader: Reader) -> LedgerHead:
        return ledger.head_of(self._context.config.run_id, reader.ledger_last())


def _notable(reader: Reader, total: int) -> list[NodeRow]:
    if total <= NODES_SHOWN:
        return reader.nodes()
    found = {row.node: row for rank, count in RANKS for row in reader.nodes_ranked(rank, count)}
    return list(found.values())[:NODES_SHOWN]


def _folded(what: str, waiting: list[tuple[int, str, int]]) -> list[Wait]:
    """`units 3–18 (16) wait for worker-0`, since the longest of them."""
    by_whom: dict[str, list[tuple[int, int]]] = {}
    for unit, whom, since_ms in waiting:
        by_whom.setdefault(whom, []).append((unit, since_ms))
    waits = []
    for whom, pairs in by_whom.items():
        units = [unit for unit, _ in pairs]
        several = f"{what}s {min(units)}–{max(units)} ({len(units)})" if len(units) > 1 else f"{what} {units[0]}"  # noqa: RUF001
        waits.append(Wait(who=several, what=whom, since_ms=min(since_ms for _, since_ms in pairs)))
    return waits


def _recent(reader: Reader) -> Iterator[RecentVerdict]:
    """The newest decisions, then recent refusals, which hundreds of acceptances would hide."""
    newest = reader.decided_submissions(VERDICTS_SHOWN)
    shown = {row.submission for row in newest}
    refused = [row for row in reader.refused_submissions(VERDICTS_SEARCHED) if row.submission not in shown]
    for row in (*newest, *refused[:REFUSALS_SHOWN]):
        decision = {"outcome": row.state.value, "decided_at_ms": row.decided_at_ms or 0}
        yield RecentVerdict(**{**shared(row, RecentVerdict), **decision})


class Figure:
    """A number of the run, or several by their labels. Labels are states and roles: strangers cannot add any."""

    def __init__(self, name: str, what: str, value: float | Mapping[tuple[str, ...], float], *labels: str) -> None:
        self.name, self.what, self.labels = name, what, labels
        self.values = dict(value) if isinstance(value, Mapping) else {(): float(value)}


def read_figures(context: Context, late: int = 0, unusable: int = 0) -> list[Figure]:
    now_ms = context.clock.now_ms()
    context.storage.flush()
    with context.storage.read() as reader:
        fleet, progress, last = reader.fleet(now_ms - SILENT_AFTER_MS), reader.progress(), reader.ledger_last()
        units, submissions, outgoing = reader.unit_counts(), reader.submission_counts(), reader.outbox_length()
        halted, alarms = orders_of(reader).conduct != "running", reader.alarm_counts()
        trusted = reader.nodes_ranked("trusted", MAX_TRUSTED)
        unscored = unscored_groups(trusted, reader.presences_named([node.node for node in trusted]))
        pools = reader.pool_counts() if context.config.pools is not None else {}
        slices = reader.evaluations_since(0, VERSIONS_SHOWN) if context.rules.evaluation is not None else []
    nodes: dict[tuple[str, ...], float] = {
        (group.role, group.state, "here" if group.here else "away"): group.count for group in fleet
    }
    waits = context.waits.current(now_ms)
    waited_s = max((now_ms - wait.since_ms for wait in waits), default=0) / 1000
    # what was accepted and fills no unit that was, or will be, trained on or dropped came too late
    accepted = submissions["accepted"]
    stale = max(0, accepted - sum(units[state] for state in ("accepted", "dropped", "trained")))
    figures = [
        Figure("units", "Units, by state.", {(state,): count for state, count in units.items()}, "state"),
        Figure("submissions", "Submissions, by state.", {(s,): n for s, n in submissions.items()}, "state"),
        Figure("nodes", "Registered nodes, by role, sanction and presence.", nodes, "role", "state", "presence"),
        Figure("alarms", "Alarms for the run's owner, by what they are about.", alarms, "about"),
        Figure("tasks", "Tasks that were seen, by difficulty.", {(pool,): n for pool, n in pools.items()}, "pool"),
        Figure("credit", "Credit of all nodes that is final.", sum(group.credit for group in fleet)),
        Figure("credit_pending", "Credit of all nodes that an audit could still take.", sum(c.pending for c in fleet)),
        Figure("policy_version", "The newest policy that was announced.", getattr(progress.policy, "version", 0)),
        Figure("finished", "1 once the run's last version is out.", pacing.is_finished(context.rules, progress)),
        Figure("ledger_rows", "Rows of the ledger.", last.index + 1 if last else 0),
        Figure("outbox_rows", "Rows that wait to be moved into the ledger.", outgoing),
        Figure("leader", "1 if this hub does the background work of the run.", context.leads),
        Figure("waiting", "Nodes whose polls have got nothing yet.", len(waits)),
        Figure("waiting_seconds", "How long the longest of them waits.", waited_s),
        Figure("halted", "1 while the owner has paused the run, or lets it drain.", halted),
        Figure("wasted_groups", "Groups that were accepted too late to be trained on.", stale),
        Figure("late_submissions", "Submissions refused since the start: their unit was gone.", late),
        Figure("lapsed_leases", "Leases that were let lapse.", sum(group.lapsed for group in fleet)),
        Figure("wasted_fraction", "The part of groups that came too late.", (stale + late) / max(1, accepted + late)),
        Figure("unscored", "Groups that the validators known now could not score.", unscored),
        Figure("unusable_tasks", "Tasks passed over since the start: they cannot be used.", unusable),
    ]
    whole = [each for each in evaluations.results(slices) if each.complete and not each.partial]
    measured = [(each.policy.version, each.mean) for each in whole if each.mean is not None]
    for version, mean in measured[-1:]:
        figures.append(Figure("held_out_score", "Mean score of the last version that was measured.", mean))
        figures.append(Figure("held_out_version", "The last version that was measured on held-out tasks.", version))
    return figures


MAX_TRUSTED = 500  # no run has so many
CANARY_WITHIN = 256
CAUGHT, MISSED = "canaries_caught", "canaries_missed"
UNSCORED, ABSTAINED = "unscored", "abstained"
MANY_UNSCORED, UNSCORED_SHARE = 8, 0.05
STARTING_MS, NEWEST = 60_000, 50
MEASURING_MS = 120_000  # a run's first calibration may take so long, and nothing is wrong
DOING = {"trainer": "train", "validator": "check", "worker": "work"}
AUDITED = ("accepted", "rejected", "unsure")


class HubMetrics(Collector):
    """`GET /metrics`: requests, refusals, latencies and bytes as counted here; the run from the storage; the process.
    No label names a node or an address: their number has no bound. Times leave out what a long poll waits. Each hub has
    a registry of its own."""

    def __init__(self, read: Callable[[], Iterable[Figure]], bodies: Callable[[], tuple[int, int]]) -> None:
        own = self.registry = CollectorRegistry()
        ProcessCollector(registry=own)
        labels, refused = ("route", "method", "status"), "Refusals, by code; rate.* are limits."
        took = "Time to answer, without what a long poll waited."
        self._requests = Total("shoal_hub_requests", "Answers, by route, method and status.", labels, registry=own)
        self._seconds = Histogram("shoal_hub_request_seconds", took, labels[:2], buckets=SECONDS, registry=own)
        self._refusals = Total("shoal_hub_refusals", refused, ("code",), registry=own)
        self._counters = cache(  # labels are slow to look up
            lambda route, method, status: (
                self._requests.labels(route, method, str(status)), self._seconds.labels(route, method)
            )
        )  # fmt: skip
        self._read, self._bodies = read, bodies  # bytes of bodies: held now, received so far
        own.register(self)

    def note(self, route: str, method: str, status: int, code: str, took_s: float) -> None:
        method = method if method in METHODS else "other"  # a method that a stranger makes up gets no label
        requests, seconds = self._counters(route, method, status)
        requests.inc()
        seconds.observe(took_s)
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


def _problems(node: NodeRow, presence: Presence) -> dict[str, str]:
    counters, who, found = presence.counters, node_label(node), dict[str, str]()
    audited, failed = sum(counters.get(name, 0) for name in AUDITED), counters.get(UNSCORED, 0)
    if (missed := counters.get(MISSED, 0)) > 0:
        passed = f"{who} let {missed:.0f} known-bad submissions pass"
        found["canary"] = f"{passed}: stop it, and do not rely on what it accepted"
    elif audited >= CANARY_WITHIN and counters.get(CAUGHT, 0) <= 0:
        unmet = f"{who} made {audited:.0f} audits and met no known-bad submission among them"
        found["canary"] = f"{unmet}: its audits are untested"
    if counters.get(ABSTAINED, 0) > 0:
        other = f"{who} has another environment, or other data, than the run"
        found["scoring"] = f"{other}: start it with the run's recipe and data"
    elif failed >= MANY_UNSCORED and failed > UNSCORED_SHARE * audited:
        found["scoring"] = f"{who} could not score {failed:.0f} of {audited:.0f} groups: its log says why"
    return found


def validator_alarms(node: NodeRow, before: Presence | None, now: Presence, step: int) -> list[RaiseAlarm]:
    """An alarm each time a validator accepted further known-bad submissions, and one when another problem begins."""
    earlier = before or Presence(node.node)
    known = _problems(node, earlier)
    if now.counters.get(MISSED, 0) > earlier.counters.get(MISSED, 0):
        known.pop("canary", None)
    begun = [(code, said) for code, said in _problems(node, now).items() if code not in known]
    return [RaiseAlarm(step, f"{code}.{node.node[:8]}", said, now.last_seen_ms) for code, said in begun]


def unscored_groups(nodes: Sequence[NodeRow], presences: Mapping[str, Presence]) -> int:
    validators = [presences[node.node] for node in nodes if node.role == "validator" and node.node in presences]
    return round(sum(presence.counters.get(UNSCORED, 0) for presence in validators))


def standstill(context: Context, reader: Reader, now_ms: int) -> list[str]:
    """Who is missing, a sentence for each role; none before the first policy, after the last step, or while halted."""
    progress = reader.progress()
    over = progress.policy is None or pacing.is_finished(context.rules, progress)
    if over or orders_of(reader).halted(now_ms):
        return []
    fleet, since_start = reader.fleet(now_ms - HERE_MS), reader.fleet(context.started_ms)
    found = []
    for role in DOING:
        roles = WORKERS if role == "worker" else (role,)
        here = any(group.role in roles and group.here and group.state == NodeState.ACTIVE for group in fleet)
        lost = any(group.role in roles and (group.here or group.state != NodeState.ACTIVE) for group in since_start)
        if not here and (lost or now_ms - context.started_ms >= STARTING_MS):
            found.append(_nobody(context, reader, role, now_ms))
    return found or _unjudgeable(context, reader, now_ms)


def _nobody(context: Context, reader: Reader, role: str, now_ms: int) -> str:
    known = [row for rank in ("sanctioned", "seen") for row in reader.nodes_ranked(rank, NEWEST) if row.role == role]
    start = f"start {'one' if not known else 'another'} with `shoal {'join' if role == 'worker' else role}`"
    if role == "worker":
        taken = calibrations.taken(in_force_of(reader), context.config.profiles, context.config.measurable)
        start += f" (the run takes {', '.join(taken)})"
    elif role == "validator":
        start += " (`shoal admin add-validator` certifies one)"
    if not known:
        return f"nobody is here to {DOING[role]}: no {role} has come yet; {start}"
    presences = reader.presences_named([row.node for row in known])
    heard = {row.node: row.registered_at_ms for row in known} | {k: each.last_seen_ms for k, each in presences.items()}
    row = max(known, key=lambda each: (heard[each.node], each.state is not NodeState.ACTIVE))
    who, see = node_label(row), f"`shoal why {row.node[:8]}` says more"
    fate = f"{who} was heard of {(now_ms - heard[row.node]) // 1000} s ago for the last time"
    if row.state is NodeState.BANNED:
        fate = f"{who} was banned for {row.reason} ({see}, `shoal admin pardon` takes it back)"
    elif row.state is NodeState.SUSPENDED:
        left = "" if row.until_ms is None else f" for {max(0, -(-(row.until_ms - now_ms) // 1000))} s more"
        fate = f"{who} is suspended{left}: {row.reason} ({see})"
    return f"nobody is left to {DOING[role]}: {fate}; {start}"


def _unjudgeable(context: Context, reader: Reader, now_ms: int) -> list[str]:
    in_force = in_force_of(reader)
    if not in_force.digest and now_ms - context.started_ms < MEASURING_MS:
        return []
    rows = [row for row in reader.nodes_ranked("seen", NEWEST) if row.role in WORKERS]
    seen = {each.node: each.last_seen_ms for each in reader.presences_named([row.node for row in rows]).values()}
    since_ms = now_ms - HERE_MS
    here = [row for row in rows if row.state is NodeState.ACTIVE and seen.get(row.node, since_ms - 1) >= since_ms]
    kinds = sorted({row.kind for row in here})
    waiting = [calibrations.terms(in_force, kind, context.config.profiles).waiting for kind in kinds if kind]
    if not waiting or not all(waiting) or "" in kinds:
        return []
    return [f"no worker here is of a kind that can be judged now ({', '.join(kinds)}): {waiting[0]}"]
