"""What all services share, and the one way to make a decision.

call ─► retry ─► decision: one write transaction ─┬─► answer
          ▲      rows read, `hub.state` decides,  └─ somebody else was at the same rows (`StaleRow`), or tasks are
          │      commands applied                    not made yet (`drawing.NotReady`): nothing was done
          └── again, a little later ──────────────── after a few times: 503 hub.busy
"""

import hashlib
import json
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from shoal.errors import ConfigError, EnvironmentSetupError, ProtocolError, ShoalError
from shoal.hub.changes import Changes, Topic, Waits
from shoal.hub.service.turns import Turns
from shoal.hub.settings import HubConfig
from shoal.hub.state import Holding, Moment, NodeRow, Record, Refusal, Rules, leases, nodes
from shoal.hub.state.orders import Orders
from shoal.hub.storage import DATABASE_FILE, Presence, Reader, StaleRow, Storage, Writer, open_blobs, open_storage
from shoal.hub.storage.copying import BLOB_STORE, INCOMING, RESTORED
from shoal.protocol import Document, NodeView, SignedDocument, open_document, sign_document, sign_values
from shoal.protocol.node import titled
from shoal.runtime import ensure_folder, point, resource_error, write_atomically
from shoal.runtime.clock import Clock, SharedClock, SteadyClock

D = TypeVar("D", bound=Document)
T = TypeVar("T")

ATTEMPTS, PAUSE_S = 6, 0.01
SECRET_BYTES, NOTABLE_MS, NEWEST = 32, 1_000, 20
ORDERS = "orders"
LEADER, LEADS_S = "upkeep", 4.0
"""The lead is renewed every second; another hub takes over so long after the leader's last sign of life. If both lead
for a moment, nothing happens twice: their transactions exclude each other."""

log = logging.getLogger("shoal.hub")


def retry(call: Callable[[], T]) -> T:
    """Nothing else in the hub repeats a decision."""
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except StaleRow as error:
            log.debug("decided again: %s", error)
            last = error
        if attempt + 1 < ATTEMPTS:
            time.sleep(PAUSE_S * 2**attempt * (1 + random.random()))
    log.warning("gave up after %d attempts: %s", ATTEMPTS, last)
    raise Refusal(503, "hub.busy", "many were at the same work at once; try again in a moment") from last


class Context:
    def __init__(self, config: HubConfig, clock: Clock, storage: Storage | None = None) -> None:
        self.config, self.rules = config, config.rules
        self.tasks = config.environment.tasks("train")
        if len(self.tasks) == 0:
            raise EnvironmentSetupError(f"environment {config.environment.name} has no tasks in its train split")
        ensure_folder(config.folder, private=True)
        self.blobs = open_blobs(config.settings.storage, config.settings.storage_endpoint, config.folder / "blobs")
        self.storage: Storage = storage or open_storage(config.settings.database, config.folder)
        with self.storage.read() as reader:
            self._require_restored(reader)
            known, written_ms = json.loads(reader.setting("run") or "{}"), reader.written_ms()
        if config.settings.database and known.get("run", config.run_id) != config.run_id:
            remedy = "give each run a database of its own (hub.database), or resume that run from its own folder"
            raise ConfigError(f"hub.database holds another run, {known['run']}, not {config.run_id}: {remedy}")
        self.secret = load_or_create_secret(config.folder / "secret", is_new=not known)
        self._shared_clock = SharedClock(clock)
        self._agree_on_time()
        self.clock = self._steady(self._shared_clock, written_ms)
        self.started_ms = self.clock.now_ms()
        self.changes, self.waits, self.turns = Changes(), Waits(), Turns()
        self.failure: ShoalError | None = None
        self.holder = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self.leads = False
        self._begin_run()
        self._require_blobs()
        self.look()
        self.lead()

    def lead(self) -> bool:
        """Whether this hub does the run's background work; to be called more often than every `LEADS_S`."""
        led, self.leads = self.leads, self.storage.lead(LEADER, self.holder, LEADS_S)
        self._agree_on_time()
        if self.storage.is_shared and self.leads != led:
            log.info("this hub %s the background work of the run", "does" if self.leads else "no longer does")
        return self.leads

    def look(self) -> None:
        """Read the newest policy into memory, from which heartbeats are answered."""
        with self.storage.read() as reader:
            self.policy = reader.progress(counted=False).policy

    def resign(self) -> None:
        if self.leads:
            self.storage.resign(LEADER, self.holder)

    def close(self) -> None:
        self.changes.close()
        self.storage.close()

    def fail(self, error: ShoalError) -> None:
        """End the process: the hub cannot keep its promises any more (`server`)."""
        self.failure = self.failure or error

    def _steady(self, clock: Clock, written_ms: int) -> SteadyClock:
        """The hub's time never goes back, not even over a restart: leases, claims and nonces are dated with it."""
        now_ms = clock.now_ms()
        if self.storage.is_shared:  # somebody's wrong clock must not become everybody's: the database's is right
            written_ms = min(written_ms, now_ms + NOTABLE_MS)
        self.was_away(min(written_ms or now_ms, now_ms), max(now_ms, written_ms))
        if (behind_ms := written_ms - now_ms) > NOTABLE_MS:
            behind = "this machine's clock is %.0f s behind what the hub wrote down last; the hub continues from there"
            log.warning(behind, behind_ms / 1000)
        return SteadyClock(clock, written_ms)

    def _agree_on_time(self) -> None:
        """Go by the database's clock where hubs share one: leases of one hub are ended by another."""
        asked_s = self._shared_clock.monotonic_s()
        their_ms = self.storage.now_ms()
        if their_ms is not None:
            self._shared_clock.agree(their_ms, self._shared_clock.monotonic_s() - asked_s)

    def was_away(self, from_ms: int, until_ms: int) -> None:
        """The hub could not be reached between these times: what ran out then lasts a little longer."""
        self.absence = leases.Absence(from_ms, until_ms, min(self.rules.lease_ms, nodes.HERE_MS))

    def inexcusable(self, overdue: Sequence[Holding], now_ms: int) -> list[Holding]:
        """Overdue leases that the hub's own absence does not excuse."""
        return [held for held in overdue if not self.absence.still_excuses(held.lease, now_ms)]

    @contextmanager
    def decision(
        self, sweep: bool = False, exclusive: bool = False, counted: bool = True
    ) -> Iterator[tuple[Writer, Moment]]:
        """One write transaction. `sweep` ends overdue leases first. `exclusive` decisions change what all others rely
        on (the newest policy, the next step): no hub decides anything beside them. Where hubs share a database only
        these sweep, and the leader every second: a sweep touches other nodes. Only if `counted` its moment knows how
        many units were lost."""
        swept = False
        with self.storage.write(exclusive=exclusive) as transaction:
            moment = self.moment(transaction, counted)
            if sweep and (exclusive or not self.storage.is_shared):
                overdue = self.inexcusable(transaction.overdue_holdings(moment.now_ms), moment.now_ms)
                if overdue:
                    transaction.apply(leases.end(moment, overdue, holders(transaction, overdue), self.absence))
                    moment, swept = self.moment(transaction), True
            yield transaction, moment
        if swept:
            self.changes.notify(Topic.LEASES, Topic.BATCHES)

    def sign(self, document: Document) -> str:
        return sign_document(document, self.config.key).model_dump_json()

    def signed_before(self, text: str) -> SignedDocument:
        """A document that a hub of this run signed; signed again if its key has changed: the former may be revoked."""
        signed = SignedDocument.model_validate_json(text)
        if signed.signed_by == self.config.key.public_key:
            return signed
        return sign_values(signed.kind, signed.document, self.config.key)

    def opened(self, signed: SignedDocument, kind: type[D], keys: str | set[str], code: str, status: int = 422) -> D:
        try:
            document = open_document(signed, kind, keys)
        except ProtocolError as error:
            raise Refusal(status, f"{code}.signature", f"the {code} does not hold: {error}") from error
        if (run := str(vars(document)["run"])) != self.config.run_id:
            raise Refusal(422, f"{code}.run", f"the {code} is for run {run[:80]}")
        return document

    def moment(self, reader: Reader, counted: bool = True) -> Moment:
        """Progress lacks the count of live units, which only leases need; unless `counted`, policy and step only."""
        progress = reader.progress(counted=False) if counted else reader.standing()
        return Moment(self.rules, progress, self.clock.now_ms())

    def _require_restored(self, reader: Reader) -> None:
        """Rows that a restore copied belong to the folder that it made at its end: that folder's hub starts first."""
        mark, restored = reader.setting(INCOMING), self.config.folder / RESTORED
        if mark and not (restored.is_file() and restored.read_text() == mark):
            raise ConfigError(
                "a `shoal restore` has copied a run into hub.database, and was not completed, or its hub was not yet "
                "started: start the hub of the restored folder; without that folder, give the same command again"
            )

    def _begin_run(self) -> None:
        folder, identity = self.config.folder, self._identity()
        with self.storage.write(exclusive=True) as transaction:
            known = transaction.setting("run")
            self._require_restored(transaction)
            if transaction.setting(INCOMING):
                transaction.put_setting(INCOMING, "")
            if known is None:
                if self.config.settings.database and (folder / DATABASE_FILE).exists():
                    raise ConfigError(
                        f"hub.database is empty, and {folder} holds the run: leave hub.database as it was, "
                        "or move the run with `shoal backup` and `shoal restore --set hub.database=URL`"
                    )
                transaction.put_setting("run", json.dumps(identity))
                # what checks the rest of the ledger; also the certificate of the hub's key, which signs receipts
                first_row = ("run", "root_key", "environment_digest", "group_size", "max_new_tokens", "audit")
                hubs = [each for each in self.config.certificates if each.document.get("role") == "hub"]
                row = {key: identity[key] for key in first_row}
                row["certificates"] = [each.model_dump(mode="json") for each in hubs]
                transaction.apply([Record("run", row, self.clock.now_ms())])
                point("hub.start.before_commit")
                return
        remedies = {
            "eos_token_id": "an earlier shoal began it: finish it with that one",
            "environment_digest": "the environment (tasks, options or reward file) has changed: put it back",
            "secret_hash": f"copy {folder / 'secret'} from the hub that began the run, or restore it from a backup",
        }
        for key, value in json.loads(known).items():
            if identity.get(key) != value:
                remedy = remedies.get(key, "continue it with the same settings")
                found = f"{folder} holds a run whose {key} is {value!r}, not {identity.get(key)!r}"
                raise ConfigError(f"{found}: {remedy}, or use another folder")

    def _identity(self) -> dict[str, Any]:
        """What may not change while a run lasts. `steps` may: a run can be continued for longer."""
        config = self.config
        return {
            "run": config.run_id, "root_key": config.root_key, "environment_digest": config.environment.digest,
            "secret_hash": hashlib.sha256(b"shoal/secret/v1\n" + self.secret).hexdigest(),
            "eos_token_ids": list(config.eos_token_ids), "audit": config.settings.audit,
            "pools": None if config.pools is None else asdict(config.pools),
            **config.run.model_dump(mode="json", exclude={"steps", "name"}),
        }  # fmt: skip

    def _require_blobs(self) -> None:
        """What was promised must be found, also by other hubs of the database: a setting alone cannot change the place
        for blobs. A blob put there at the start names it; in an older database the newest submissions do."""
        place = self.config.settings.storage or self.config.folder / "blobs"
        with self.storage.write(exclusive=True) as transaction:
            mark = transaction.setting(BLOB_STORE)
            if not mark and not self.storage.is_shared and not self.config.settings.storage:
                return
            known = [mark] if mark else [row.submission for row in transaction.decided_submissions(NEWEST)]
            if known and not any(map(self.blobs.has, known)):
                raise ConfigError(
                    f"the submissions of this run are kept elsewhere than in {place}: share one folder among all hubs, "
                    "or keep them in a bucket (hub.storage = s3://…); move a run with `shoal backup` and `shoal "
                    "restore --set hub.storage=URL`"
                )
            if not mark:
                content = f"the blobs of shoal run {self.config.run_id} ({secrets.token_hex(8)})\n"
                transaction.put_setting(BLOB_STORE, self.blobs.put(content.encode()))


def load_or_create_secret(path: Path, is_new: bool) -> bytes:
    """Without the run's secret nobody can know a unit's seeds in advance. Only its owner may read it."""
    if not path.exists():
        if not is_new:
            raise ConfigError(f"the run's secret {path} is missing: restore it from a backup, or copy another hub's")
        write_atomically(path, secrets.token_hex(SECRET_BYTES).encode(), mode=0o600)
        point("hub.start.after_secret")
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except OSError as error:
        raise resource_error("read the run's secret", path, error) from error
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} is not a secret of {SECRET_BYTES} bytes in hex; restore it from a backup")
    return secret


def holders(transaction: Writer, holdings: Sequence[Holding]) -> dict[str, NodeRow]:
    names = sorted({held.lease.node for held in holdings})
    transaction.lock_nodes(names)
    return {name: row for name in names if (row := transaction.node(name)) is not None}


def orders_of(reader: Reader) -> Orders:
    return _parsed(reader.setting(ORDERS) or "{}")


_parsed = lru_cache(maxsize=8)(Orders.model_validate_json)


def require_trusted(reader: Reader, public_key: str) -> Orders:
    """Inside of the decision: the key may have been revoked since its request was let in."""
    orders = orders_of(reader)
    if public_key in orders.revoked:
        raise Refusal(403, "auth.revoked", "the run's owner has revoked this key: ask for another certificate")
    return orders


def shared(row: Any, model: type[BaseModel]) -> dict[str, Any]:
    """What a row and a message about it have in common, by the names of their fields."""
    values, kinds = vars(row), (type(row), model)
    if kinds not in _COMMON:
        _COMMON[kinds] = tuple(name for name in values if name in model.model_fields)
    return {name: values[name] for name in _COMMON[kinds]}


_COMMON: dict[tuple[type, type[BaseModel]], tuple[str, ...]] = {}  # model_fields is slow to ask, with every heartbeat


def node_view(node: NodeRow, presence: Presence | None, rules: Rules, now_ms: int) -> NodeView:
    last_seen_ms = presence.last_seen_ms if presence else node.registered_at_ms
    derived = {
        "strikes": node.strikes, "on_probation": node.on_probation, "doing": presence.doing if presence else "",
        "last_seen_ms": last_seen_ms, "liveness": nodes.liveness(last_seen_ms, now_ms),
        "window": 0 if node.is_ours else nodes.window(rules, node),
    }  # fmt: skip
    return NodeView(**{**shared(node, NodeView), **derived})


def node_label(node: NodeRow) -> str:
    """`worker alice (1f2e3d4c)`, `worker-0 (1f2e3d4c)`, `trainer`."""
    name = node.name if node.name.startswith(node.role) else f"{titled(node.role)} {node.name}".strip()
    return name if node.is_ours else f"{name} ({node.node[:8]})"
