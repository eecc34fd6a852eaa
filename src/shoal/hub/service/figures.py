"""How the run stands, in numbers: what `GET /metrics` shows of the storage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shoal.hub.service.context import Context
from shoal.hub.service.owner import orders_of
from shoal.hub.service.readiness import MAX_TRUSTED, no_sample
from shoal.hub.state import evaluations, pacing
from shoal.protocol import Conduct, Evaluation

HERE_MS = 60_000
NEWEST_VERSIONS = 64
NO_WASTE = pacing.Waste(0, 0, 0, 0)


@dataclass(frozen=True)
class Figures:
    """Counts of everything, of nothing in particular: units, submissions and nodes by state, and how far the run is.

    `nodes` is by (role, state, here or away); `waiting_s` is how long the longest of those that wait now has waited.
    `pools` are the tasks by difficulty, `measured` the newest evaluation that is complete, and
    of all its tasks. `alarms` are by the first word of their code.
    """

    units: dict[str, int]
    submissions: dict[str, int]
    nodes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    credit: int = 0
    pending: int = 0
    version: int = 0
    finished: bool = False
    ledger_rows: int = 0
    outbox_rows: int = 0
    leads: bool = True
    waiting: int = 0
    waiting_s: float = 0.0
    waste: pacing.Waste = NO_WASTE
    conduct: Conduct = "running"
    pools: dict[str, int] = field(default_factory=dict)
    unusable: int = 0
    measured: Evaluation | None = None
    no_sample: int = 0
    alarms: Counter[tuple[str, ...]] = field(default_factory=Counter)


def read_figures(context: Context, late: int = 0, unusable: int = 0) -> Figures:
    """`late` is how many submissions this hub has refused because their unit had gone to somebody else, `unusable` how
    many tasks it has passed over because they cannot be used."""
    now_ms = context.clock.now_ms()
    with context.storage.read() as reader:
        fleet, progress, last = reader.fleet(now_ms - HERE_MS), reader.progress(), reader.ledger_last()
        units, submissions, outbox_rows = reader.unit_counts(), reader.submission_counts(), reader.outbox_length()
        orders, alarms = orders_of(reader), reader.alarm_counts()
        trusted = reader.nodes_ranked("trusted", MAX_TRUSTED)
        unscored = no_sample(trusted, reader.presences_named([node.node for node in trusted]))
        pools = reader.pool_counts() if context.config.pools is not None else {}
        slices = reader.evaluations_since(0, NEWEST_VERSIONS) if context.rules.evaluation is not None else []
    measured = [
        each for each in evaluations.results(slices) if each.complete and not each.partial and each.mean is not None
    ]
    waits = context.waits.current(now_ms)
    return Figures(
        units=units,
        submissions=submissions,
        nodes=Counter({(crew.role, crew.state, "here" if crew.here else "away"): crew.count for crew in fleet}),
        credit=sum(crew.credit for crew in fleet),
        pending=sum(crew.pending for crew in fleet),
        version=progress.policy.version if progress.policy else 0,
        finished=pacing.is_finished(context.rules, progress),
        ledger_rows=last.index + 1 if last else 0,
        outbox_rows=outbox_rows,
        leads=context.leads,
        waiting=len(waits),
        waiting_s=max((now_ms - wait.since_ms for wait in waits), default=0) / 1000,
        waste=pacing.waste(units, submissions.get("accepted", 0), late, sum(crew.lapsed for crew in fleet)),
        conduct=orders.conduct,
        pools=pools,
        unusable=unusable,
        measured=measured[-1] if measured else None,
        no_sample=unscored,
        alarms=alarms,
    )
