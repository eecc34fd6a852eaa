"""What anyone may read: the run, its status with who waits for whom, the ledger."""

from __future__ import annotations

from shoal import ledger
from shoal.hub.service.context import Context, node_label, node_view
from shoal.hub.state import pacing
from shoal.hub.state.machines import SubmissionState
from shoal.hub.state.rows import NodeRow, SubmissionRow
from shoal.hub.storage import Presence, Reader
from shoal.protocol import (
    LedgerHead,
    LedgerPage,
    NodeState,
    RecentVerdict,
    RunInfo,
    RunStatus,
    SignedDocument,
    Wait,
    sign_document,
)

VERDICTS_SHOWN = 20
VERDICTS_SEARCHED = 500
REFUSALS_SHOWN = 100
REPORTS_SHOWN = 200
ALARMS_SHOWN = 20
MAX_PENDING = 1000
SILENT_AFTER_MS = 60_000
"""A node that has not been heard of for so long is gone, not waiting."""


class Reporting:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._run_info = self._sign_run_info()

    def run_info(self) -> SignedDocument:
        return self._run_info

    def ledger_head(self) -> SignedDocument:
        with self._context.storage.read() as reader:
            return sign_document(self._head(reader), self._context.config.key)

    def ledger_page(self, after: int, limit: int) -> LedgerPage:
        with self._context.storage.read() as reader:
            return LedgerPage(entries=tuple(reader.ledger_after(after, limit)), head=self._head(reader))

    def status(self) -> RunStatus:
        config, now_ms = self._context.config, self._context.clock.now_ms()
        with self._context.storage.read() as reader:
            overdue = bool(reader.overdue_holdings(now_ms))
        if overdue:
            with self._context.decision(sweep=True):
                pass  # the sweep is the whole decision
        with self._context.storage.read() as reader:
            progress, presences, nodes = reader.progress(), reader.presences(), reader.nodes()
            return RunStatus(
                run=config.run_id,
                name=config.run.name,
                now_ms=now_ms,
                finished=pacing.is_finished(self._context.rules, progress),
                steps=config.run.steps,
                step=progress.policy.version if progress.policy else 0,
                policy=progress.policy,
                max_staleness=config.run.max_staleness,
                units=reader.unit_counts(),
                submissions=reader.submission_counts(),
                nodes=tuple(node_view(node, presences.get(node.node)) for node in nodes),
                waits=tuple(self._waits(reader, nodes, presences, now_ms)),
                verdicts=tuple(_recent(row) for row in _telling(reader)),
                reports=tuple(reader.reports(REPORTS_SHOWN)),
                alarms=tuple(reader.alarms(ALARMS_SHOWN)),
                ledger=self._head(reader),
            )

    def _waits(self, reader: Reader, nodes: list[NodeRow], presences: dict[str, Presence], now_ms: int) -> list[Wait]:
        """Who polls for something, what nodes say they wait for, leases that are out, submissions not judged yet."""
        if pacing.is_finished(self._context.rules, reader.progress()):
            return []
        names = {node.node: node_label(node) for node in nodes}
        shut_out = {node_label(node) for node in nodes if node.state is not NodeState.ACTIVE}
        waits = [wait for wait in self._context.waits.current(now_ms) if wait.who not in shut_out]
        polling = {wait.who for wait in waits}
        for presence in presences.values():
            who = names.get(presence.node, presence.node)
            is_here = now_ms - presence.last_seen_ms <= SILENT_AFTER_MS and who not in shut_out
            if presence.waiting_for and is_here and who not in polling:
                waits.append(Wait(who=who, what=presence.waiting_for, since_ms=presence.waiting_since_ms))
        held = [
            (holding.unit.unit, names[holding.lease.node], holding.lease.issued_at_ms) for holding in reader.holdings()
        ]
        pending = reader.submissions_in([SubmissionState.RECEIVED, SubmissionState.AUDITING], MAX_PENDING)
        checked = [
            (row.unit, names.get(row.validator or "", "a validator to take them"), row.received_at_ms)
            for row in pending
        ]
        return [*waits, *_folded("unit", held), *_folded("submission of unit", checked)]

    def _head(self, reader: Reader) -> LedgerHead:
        return ledger.head_of(self._context.config.run_id, reader.ledger_last())

    def _sign_run_info(self) -> SignedDocument:
        config = self._context.config
        info = RunInfo(
            run=config.run_id,
            name=config.run.name,
            root_key=config.root_key,
            certificates=config.certificates,
            sources=config.sources,
            last_resort=config.last_resort,
            environment=config.environment.name,
            environment_digest=config.environment.digest,
            sampling=config.sampling,
            proof=config.proof,
            profiles=config.profiles,
            group_size=config.run.group_size,
            max_staleness=config.run.max_staleness,
            steps=config.run.steps,
        )
        return sign_document(info, config.key)


def _folded(what: str, waiting: list[tuple[int, str, int]]) -> list[Wait]:
    """Units by whom they wait for, one line each: `units 3–18 (16) wait for worker-0`, since the longest of them."""
    by_whom: dict[str, list[tuple[int, int]]] = {}
    for unit, whom, since_ms in waiting:
        by_whom.setdefault(whom, []).append((unit, since_ms))
    waits = []
    for whom, pairs in by_whom.items():
        units = [unit for unit, _ in pairs]
        several = f"{what}s {min(units)}–{max(units)} ({len(units)})" if len(units) > 1 else f"{what} {units[0]}"  # noqa: RUF001
        waits.append(Wait(who=several, what=whom, since_ms=min(since_ms for _, since_ms in pairs)))
    return waits


def _telling(reader: Reader) -> list[SubmissionRow]:
    """The newest decisions, and behind them those refused lately: acceptances come in hundreds and hide them."""
    newest = reader.decided_submissions(VERDICTS_SHOWN)
    shown = {row.submission for row in newest}
    refused = [row for row in reader.refused_submissions(VERDICTS_SEARCHED) if row.submission not in shown]
    return [*newest, *refused[:REFUSALS_SHOWN]]


def _recent(row: SubmissionRow) -> RecentVerdict:
    return RecentVerdict(
        unit=row.unit,
        node=row.node,
        outcome=row.state.value,
        reason=row.reason,
        message=row.message,
        decided_at_ms=row.decided_at_ms or 0,
    )
