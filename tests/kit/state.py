"""Hand-made rows for tests of the decision core."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from shoal.hub.state import Command, Save, leases, rows
from shoal.protocol import Outcome, PolicyRef, RolloutReward, Verdict

T = TypeVar("T")
NOW_MS = 1_000_000


def rules(**changes: Any) -> rows.Rules:
    fields = {
        "steps": 10, "groups_per_step": 4, "group_size": 2, "max_staleness": 0, "max_new_tokens": 16, "refill_cap": 2,
        "leases_per_node": 8, "lease_ms": 60_000, "audit_ms": 30_000,
    }  # fmt: skip
    return rows.Rules(**{**fields, **changes})


def policy(version: int = 0, incarnation: int = 0, digest: str = "d" * 64) -> PolicyRef:
    return PolicyRef(incarnation=incarnation, version=version, digest=digest)


def moment(now_ms: int = NOW_MS, progress: rows.RunProgress | None = None, **changes: Any) -> rows.Moment:
    return rows.Moment(rules(**changes), progress or rows.RunProgress(policy=policy()), now_ms)


def node(number: int = 1, **changes: Any) -> rows.NodeRow:
    fields = {"role": "worker", "name": f"n{number}", "registered_at_ms": 0, "passed": 1}
    return rows.NodeRow(f"{number:032x}", f"{number:064x}", **{**fields, **changes})


def unit(number: int = 0, state: rows.UnitState = rows.UnitState.OPEN, **changes: Any) -> rows.UnitRow:
    return rows.UnitRow(number, f"task-{number}", state, **changes)


def lease(number: int = 0, who: int = 1, **changes: Any) -> rows.LeaseRow:
    fields = {
        "attempt": 0, "request": "request-1", "incarnation": 0, "version": 0, "digest": "d" * 64,
        "issued_at_ms": NOW_MS, "deadline_ms": NOW_MS + 60_000,
    }  # fmt: skip
    return rows.LeaseRow(f"u{number}a0", number, node(who).node, **{**fields, **changes})


def held(number: int = 0, who: int = 1, state: rows.UnitState = rows.UnitState.LEASED, **changes: Any) -> rows.Holding:
    return rows.Holding(lease(number, who, **changes), unit(number, state, attempt=1))


@dataclass(frozen=True)
class Granted:
    """What came of a request: the leases as they are signed and written, or why there are none."""

    leases: tuple[rows.LeaseRow, ...]
    commands: tuple[Command, ...]
    plan: leases.LeasePlan


def grant(
    now: rows.Moment, open_units: Sequence[rows.UnitRow], ask: leases.Demand, taskless: Container[int] = ()
) -> Granted:
    """As the service does it: plan, draw, issue, sign. Units in `taskless` have no task that can be used."""
    plan, fresh = leases.plan(now, open_units, ask), list[rows.UnitRow]()
    for number in range(now.progress.next_unit, now.progress.next_unit + plan.fresh):
        if number in taskless:
            break
        fresh.append(rows.UnitRow(number, f"drawn-{number}"))
    issued = leases.issue(now, ask, plan, fresh)
    signed = [(replace(row, document=f"signed {row.lease}"), of) for row, of in issued]
    commands = leases.issued(signed, fresh)
    return Granted(tuple(row for row, _ in signed), tuple(commands), plan)


def submission(number: int = 0, who: int = 1, **changes: Any) -> rows.SubmissionRow:
    row = lease(number, who)
    fields = {
        "incarnation": 0, "version": 0, "digest": row.digest, "size_bytes": 9, "received_at_ms": NOW_MS,
        "state": rows.SubmissionState.AUDITING, "receipt": '{"kind": "receipt"}',
    }  # fmt: skip
    return rows.SubmissionRow(f"{number:064x}", row.lease, number, row.node, **{**fields, **changes})


def verdict(row: rows.SubmissionRow, rewards: Iterable[float] = (0, 1), **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "run": "demo", "submission": row.submission, "unit": row.unit, "node": row.node, "outcome": Outcome.ACCEPTED,
        "rewards": tuple(RolloutReward(value=value) for value in rewards), "generated_tokens": 7,
        "decided_at_ms": NOW_MS,
    }  # fmt: skip
    return Verdict(**{**fields, **changes})


def rows_in(commands: Iterable[Command], kind: type[T]) -> list[T]:
    return [command.row for command in commands if isinstance(command, Save) and isinstance(command.row, kind)]


def units_in(commands: Iterable[Command]) -> dict[int, rows.UnitRow]:
    return {row.unit: row for row in rows_in(commands, rows.UnitRow)}


def leases_in(commands: Iterable[Command]) -> dict[str, rows.LeaseState]:
    return {row.lease: row.state for row in rows_in(commands, rows.LeaseRow)}


def submissions_in(commands: Iterable[Command]) -> list[rows.SubmissionRow]:
    return rows_in(commands, rows.SubmissionRow)


def nodes_in(commands: Iterable[Command]) -> list[rows.NodeRow]:
    return rows_in(commands, rows.NodeRow)


def of_type(commands: Iterable[Command], kind: type) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]
