"""`shoal ledger witness`: checks that a ledger only grows, and signs its head with a key of its own.

    hub ── rows since last time ─► chain ─► state (durable) ─► signed head ─► witness/KEY.json, in one folder or several
                                     └ they do not follow: exit 5, with the proof if there is one

Relays or any web server may serve the folders. Readers give the witness's key themselves (`verify --witness KEY`).
"""

import logging
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from shoal import protocol
from shoal.client import HubClient
from shoal.errors import HubUnreachable, LedgerError, ProtocolError, ShoalError, UserError
from shoal.ledger import Chain, Keys, Pin
from shoal.run.folder import hub_address
from shoal.run.ledger.sources import MAX_ROWS, LedgerSource, hub_pin, read_kept, save_proof, served_rows
from shoal.runtime import FolderLock, StopToken, SystemClock, ensure_folder, write_atomically
from shoal.shardcast.manifest import MAX_WITNESS_BYTES
from shoal.shardcast.tree import Tree, witness_key

log = logging.getLogger("shoal.witness")
LOCK_WAIT_S = 5.0


class Seen(protocol.Message):
    run: str
    root_key: str
    last: protocol.LedgerEntry
    head: protocol.SignedDocument


@dataclass
class Witness:
    """Keeps `witness.key` and `seen.json` in its folder; publishes into the folders `out`."""

    client: HubClient
    folder: Path
    out: Sequence[Path]

    def __post_init__(self) -> None:
        self.key: protocol.SigningKey = protocol.load_or_create_key(self.folder / "witness.key")
        self._path = self.folder / "seen.json"

    def look(self) -> protocol.WitnessedHead:
        run, seen = self.client.trusted_run(), read_kept(self._path, Seen, "restore it: it is what you vouched for")
        keys = Keys(run.run, run.info.root_key)
        if seen is not None and (seen.run, seen.root_key) != (keys.run, keys.root_key):
            raise LedgerError(f"this folder watches run {seen.run}; {keys.run} needs another --folder")
        signed = self.client.signed_ledger_head()
        head, before = protocol.LedgerHead.model_validate(signed.document), None if seen is None else seen.last
        try:
            if before is not None and head.index < before.index:
                raise LedgerError(f"the ledger ends at row {head.index}; it had {before.index}: it was rolled back")
            chain = Chain([hub_pin(signed)], before)
            for entry in served_rows(self.client, -1 if before is None else before.index, head.index):
                chain.add(entry)
            chain.finish()
        except LedgerError as error:
            raise LedgerError(f"{error}{self._proof(keys, seen, signed, head)}") from error
        if chain.last is None:
            raise LedgerError("the ledger is empty: it has not even the row of the run")
        last = chain.last  # all rows since last time follow from the last one seen
        now = Seen(run=keys.run, root_key=keys.root_key, last=last, head=signed)
        write_atomically(self._path, now.model_dump_json(indent=2).encode() + b"\n")
        witnessed = protocol.WitnessedHead(run=keys.run, index=last.index, hash=last.hash, at_ms=SystemClock().now_ms())
        document = protocol.sign_document(witnessed, self.key).model_dump_json().encode() + b"\n"
        for folder in self.out:
            Tree(folder).write(witness_key(self.key.public_key), document)
        return witnessed

    def _proof(self, keys: Keys, seen: Seen | None, signed: protocol.SignedDocument, head: protocol.LedgerHead) -> str:
        if seen is None or head.index < seen.last.index:
            return ""
        try:
            rows = list(islice(served_rows(self.client, seen.last.index - 1, head.index), MAX_ROWS))
            path = save_proof(keys, self.client.trusted_run().info.certificates, seen.head, signed, rows)
        except ShoalError:  # the hub does not help to prove it: the error stands without
            return ""
        return f". The proof is in {path}"


def run_witness(url: str, folder: Path, out: Sequence[Path], every_s: float, once: bool, stop: StopToken) -> None:
    ensure_folder(folder)
    with (
        FolderLock(folder).acquire(stop, LOCK_WAIT_S),
        closing(HubClient.of_a_person(*hub_address(url, 10), stop)) as client,
    ):
        witness = Witness(client, folder, out or [folder])
        log.info("witness %s: readers give this key with verify --witness", witness.key.public_key)
        while not stop.is_set():
            try:
                seen = witness.look()
                log.info("row %d of %s was signed for", seen.index, seen.run)
            except HubUnreachable as error:
                if once:
                    raise
                log.warning("%s; asked again in %.0f s", error, every_s)
            if once:
                return
            stop.wait(every_s)


def witness_pins(source: LedgerSource, witness: str, run: str, given: Sequence[Pin] = ()) -> list[Pin]:
    """What a witness, `KEY` or `KEY@URL`, signed about this run, at the sources and in the given --head; at least
    one."""
    key, _, url = witness.partition("@")
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise UserError(f"{key[:80]!r} is no public key of a witness: 64 hex digits, perhaps with @URL after them")
    found, said = source.witnessed(key), [pin.statement for pin in given if pin.statement is not None]
    found += [statement.model_dump_json().encode() for statement in said if statement.signed_by == key]
    if url:
        found += source.fetch(url, witness_key(key), MAX_WITNESS_BYTES)
    pins = []
    for data in found:
        try:
            signed = protocol.SignedDocument.model_validate_json(data)
            head = protocol.open_document(signed, protocol.WitnessedHead, key)
        except (ValidationError, ProtocolError) as error:
            source.notes.append(f"what was found as signed by witness {key[:16]}… is not: {error}")
            continue
        if head.run == run:
            seen = protocol.LedgerHead(run=run, index=head.index, hash=head.hash)
            pins.append(Pin(seen, f"witness {key[:16]}…", signed))
    if not pins:
        short = f"{key[:16]}…"
        remedy = f"Name the address that it publishes to (--witness {short}@URL), or give its document with --head FILE"
        raise LedgerError(f"nothing that witness {short} signed was found: the run's sources do not have it. {remedy}")
    return pins
