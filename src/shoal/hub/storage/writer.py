"""Applying commands inside one write transaction; and what every storage of rows has."""

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shoal import ledger
from shoal.errors import ShoalError
from shoal.hub.state import Command, commands, rows
from shoal.hub.storage import tables
from shoal.hub.storage.arrivals import Arrived, Noted
from shoal.hub.storage.reader import UNJUDGED, Reader
from shoal.hub.storage.tables import PRESENCE, TASKS, Mapped, Presence, insert
from shoal.protocol import LedgerEntry, StepReport

_SAVED: dict[type, Mapped[Any]] = {
    rows.UnitRow: tables.UNITS, rows.LeaseRow: tables.LEASES, rows.NodeRow: tables.NODES,
    rows.SubmissionRow: tables.SUBMISSIONS, rows.EvaluationRow: tables.EVALUATIONS,
}  # fmt: skip
_SEEN = """last_seen_ms = CASE WHEN excluded.last_seen_ms > presence.last_seen_ms
    THEN excluded.last_seen_ms ELSE presence.last_seen_ms END"""  # databases do not agree on a name for the greater one
_HEARD = f"{PRESENCE.insert} ON CONFLICT (node) DO UPDATE SET {_SEEN}"
_SAID = "".join(f", {name} = excluded.{name}" for name in ("doing", "waiting_for", "waiting_since_ms", "counters"))
_INSERT_POLICY, _INSERT_BATCH = insert(tables.policies), insert(tables.batches)
_INSERT_OUTGOING = insert(tables.ledger_outbox, but="id")
INSERT_NONCE = f"{insert(tables.nonces)} ON CONFLICT DO NOTHING"
_PUT_SETTING = f"{insert(tables.meta)} ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_PUT_REPORT = f"""{insert(tables.reports)}
    ON CONFLICT (step) DO UPDATE SET metrics = excluded.metrics, at_ms = excluded.at_ms"""
_OVERTAKEN = frozenset(
    {"23505", "23503", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_FOREIGNKEY"}
)  # a row that is there already, or one that is not there: by PostgreSQL's codes and by SQLite's names


class StaleRow(ShoalError):
    """A row is not as the decision saw it, or a constraint forbids the change. The transaction is undone."""


class Writer(Reader):
    def apply(self, wanted: Iterable[Command]) -> None:
        """In order. A row that is not in the state it `was` in is an error."""
        for command in wanted:
            try:
                self._apply(command)
            except Exception as error:
                if not is_overtaken(error):
                    raise
                raise StaleRow(f"{type(command).__name__} contradicts what is stored: {error}") from error

    def _apply(self, command: Command) -> None:
        match command:
            case commands.Save(row, was):
                mapped = _SAVED[type(row)]
                values = mapped.write(row)
                if was is None:
                    self._execute(mapped.insert, values)
                else:
                    named = " ".join(str(values[key]) for key in mapped.keys)
                    sentence = f"{mapped.name} {named} is no longer {was.value}"
                    self._require_one(self._execute(mapped.update, {**values, "was": was.value}), sentence)
            case rows.TaskRow():
                self._execute(TASKS.upsert, TASKS.write(command))
            case commands.AddPolicy(policy, announced_at_ms):
                self._execute(_INSERT_POLICY, {**policy.model_dump(), "announced_at_ms": announced_at_ms})
            case commands.AddBatch(batch):
                self._execute(_INSERT_BATCH, {"step": batch.step, "document": batch.model_dump_json()})
            case commands.AddVerdict():
                self._execute(tables.VERDICTS.insert, vars(command))
            case rows.ShownRow():
                self._execute(tables.SHOWN.insert, tables.SHOWN.write(command))
            case rows.TraceRow():
                self._execute(tables.TRACES.insert, tables.TRACES.write(command))
            case commands.RaiseAlarm():
                self._execute(tables.ALARMS.upsert, vars(command))
            case commands.Record(kind, body, at_ms):
                ledger.append(None, kind, body, at_ms)  # what cannot be chained fails here
                self._execute(_INSERT_OUTGOING, {**vars(command), "body": json.dumps(body)})

    def _require_one(self, changed: Any, sentence: str) -> None:
        if changed.rowcount != 1:
            raise StaleRow(sentence)

    def lock_nodes(self, nodes: Iterable[str]) -> None:
        """Until the end no other transaction decides about these nodes. To decide about several, lock them together."""

    def frontier(self) -> rows.RunProgress:
        """Until the end no other transaction makes units. To be called last: after that, no lock is waited for."""
        return self.progress()

    def post(self, entries: Sequence[LedgerEntry], up_to: int) -> None:
        values = [{**entry.model_dump(), "body": json.dumps(entry.body)} for entry in entries]
        self._connection.execute(tables.ledger.insert(), values)
        about = [{"subject": name, "index": entry.index} for entry in entries for name in ledger.subjects(entry)]
        if about:
            self._connection.execute(tables.ledger_subjects.insert(), about)
        self._execute("DELETE FROM ledger_outbox WHERE id <= :up_to", {"up_to": up_to})

    def put_setting(self, key: str, value: str) -> None:
        self._execute(_PUT_SETTING, {"key": key, "value": value})

    def put_presence(self, presence: Presence) -> None:
        self._execute(_HEARD + _SAID, PRESENCE.write(presence))

    def touch_presence(self, node: str, now_ms: int) -> None:
        """The time of a node never decreases, although two hubs' clocks may differ a little."""
        self._execute(_HEARD, PRESENCE.write(Presence(node, last_seen_ms=now_ms)))

    def note(self, noted: Noted) -> None:
        """In order of nodes: two hubs that write the same rows cannot deadlock."""
        for nonce in noted.nonces:
            self.take_nonce(*nonce)
        for _, presence in sorted(noted.said.items()):
            self.put_presence(presence)
        for node, now_ms in sorted(noted.heard.items()):
            self.touch_presence(node, now_ms)

    def put_report(self, report: StepReport, at_ms: int) -> None:
        self._execute(_PUT_REPORT, {"step": report.step, "metrics": json.dumps(report.metrics), "at_ms": at_ms})

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:
        values = {"node": node, "nonce": nonce, "expires_at_ms": expires_at_ms}
        return bool(self._execute(INSERT_NONCE, values).rowcount == 1)

    def forget_nonces(self, before_ms: int, limit: int) -> int:
        expired = "SELECT node, nonce FROM nonces WHERE expires_at_ms < :before_ms LIMIT :most"
        values = {"before_ms": before_ms, "most": limit}
        return int(self._execute(f"DELETE FROM nonces WHERE (node, nonce) IN ({expired})", values).rowcount)

    def forget_traces(self, submissions: Sequence[str]) -> None:
        for submission in submissions:
            self._execute("DELETE FROM traces WHERE submission = :submission", {"submission": submission})

    def forget_shown(self, before_ms: int) -> int:
        """Of leases that ended before then and have no submission that is to be judged yet."""
        undecided = f"SELECT submissions.lease FROM submissions WHERE {UNJUDGED}"
        ended = f"SELECT lease FROM leases WHERE ended_at_ms < :before_ms AND lease NOT IN ({undecided})"
        return int(self._execute(f"DELETE FROM shown WHERE lease IN ({ended})", {"before_ms": before_ms}).rowcount)


def is_overtaken(error: BaseException) -> bool:
    said = getattr(error, "orig", error)  # SQLAlchemy wraps what PostgreSQL's driver says
    return not _OVERTAKEN.isdisjoint((getattr(said, "sqlstate", None), getattr(said, "sqlite_errorname", None)))


class Storage(Protocol):
    """The defaults are those of a database with a single hub. `durable=False` commits without fsync: such writes
    survive the process, but perhaps not the machine."""

    @property
    def is_shared(self) -> bool:
        """Whether other hubs may work on it: then changes come without notice."""
        return False

    arrivals: Arrived

    def known(self, node: str) -> rows.NodeRow | None:
        """From memory: what it is now; where hubs share the database, what a worker was a moment ago."""

    def find(self, node: str) -> rows.NodeRow | None:
        """From the database; `known` from then on."""

    def take_nonce(self, node: str, nonce: str, expires_at_ms: int) -> bool:  # noqa: ARG002
        """Whether no other hub has taken it; a single hub looks into `arrivals`."""
        return True

    def flush(self) -> None:
        """Write what has arrived to the database, so that it can be read there."""

    def read(self) -> AbstractContextManager[Reader]: ...

    def write(self, durable: bool = True, exclusive: bool = False) -> AbstractContextManager[Writer]:
        """`exclusive`: no hub writes beside it. In a file that is always so."""

    def now_ms(self) -> int | None:
        """The database's clock, for all its hubs; None where one machine's will do."""
        return None

    def lead(self, name: str, holder: str, for_s: float) -> bool:  # noqa: ARG002
        """Whether `holder` does background work `name` for the next `for_s` seconds."""
        return True

    def resign(self, name: str, holder: str) -> None:  # noqa: ARG002
        return

    def close(self) -> None: ...
