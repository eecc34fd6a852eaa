"""Where a ledger is read, and the head that was seen last.

URL     GET /ledger, page by page; heads: the hub's signed one, and those in the manifests of the sources
folder  the hub's database, running or not; heads: those in the manifests in origin/
file    one entry per line; beside it `FILE.evidence` (signed documents behind the rows, one line for each row that
        has some) and `FILE.head` (the hub's signed head, with the root key's certificate for the hub's key)

~/.shoal/heads/RUN.json         written after every successful verification: it reveals a rewritten ledger
~/.shoal/forks/RUN-INDEX.json   the proof of a fork, which anybody can check without the hub
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from shoal import protocol
from shoal.client import HubClient
from shoal.errors import BroadcastError, ConfigError, LedgerError, LedgerForked, ProtocolError, ShoalError, UserError
from shoal.hub.service.context import orders_of
from shoal.hub.service.stories import evidence_of
from shoal.hub.storage import open_blobs, open_storage
from shoal.ledger import ForkProof, Keys, Pin, check_fork, head_of
from shoal.ledger.evidence import LedgerReader
from shoal.run.folder import RunFolder, hub_address
from shoal.runtime import StopToken, SystemClock, ensure_folder, home, write_atomically
from shoal.runtime.targets import Reach
from shoal.shardcast.connection import Connection, Deadline, Timeouts
from shoal.shardcast.lookup import get_document
from shoal.shardcast.manifest import MAX_HEAD_BYTES, MAX_MANIFEST_BYTES, MAX_WITNESS_BYTES, read_head, read_manifest
from shoal.shardcast.tree import HEAD, Tree, manifest_key, parse_label, witness_key

M = TypeVar("M", bound=protocol.Message)
PAGE = 1000
ASK_S = 10.0
MAX_LINE_BYTES = 2**20
MAX_ROWS = 100_000  # in a proof of a fork
START = b'{\n  "run"'
MANIFEST = "the manifest of policy "


class LedgerSource(LedgerReader):
    """A ledger somewhere. `notes` say what could not be fetched. It may grow: its rows are read as of the last call of
    `pins`. `complete`: its last row is the last of all; not known of a file."""

    complete = True
    reach: Reach | None = None

    def __init__(self, label: str, root_key: str | None = None) -> None:
        self.label, self.root_key, self.notes = label, root_key, list[str]()

    @abstractmethod
    def pins(self, run: str, root_key: str) -> list[Pin]:
        """Signed heads that the entries must pass through; `run` and root key are those of row 0."""

    @abstractmethod
    def signed_head(self) -> CertifiedHead | None: ...

    def certificates(self) -> tuple[protocol.SignedDocument, ...]:
        """The root key's certificates for this run's keys, as far as they are here."""
        return () if (found := self.signed_head()) is None else found.certificates

    def witnessed(self, public_key: str) -> list[bytes]:  # noqa: ARG002  a file has no sources
        """What a witness published at the sources, not yet verified."""
        return []

    def fetch(self, url: str, name: str, max_bytes: int) -> list[bytes]:
        """Nothing if a server does not have it, or does not answer (which is noted)."""
        try:
            with closing(Connection(url, StopToken(), Timeouts(ASK_S, ASK_S, reach=self.reach))) as connection:
                found = get_document(connection, name, max_bytes, Deadline(ASK_S))
        except (BroadcastError, ConfigError) as error:
            self.notes.append(str(error))
            return []
        return [] if found is None else [found]

    def missing_evidence(self) -> str:
        return ""

    def close(self) -> None: ...


def open_ledger(where: str, wait_s: float = 3.0) -> LedgerSource:
    if "://" in where:
        return HubLedger(where, wait_s)
    path = Path(where)
    if path.is_dir():
        return FolderLedger(path)
    if path.is_file():
        return FileLedger(path)
    raise UserError(f"{where} is no run's folder (here or in runs/), no exported ledger and no URL")


class HubLedger(LedgerSource):
    def __init__(self, where: str, wait_s: float) -> None:
        self._client = HubClient.of_a_person(*hub_address(where, wait_s))
        self._run = self._client.trusted_run()
        super().__init__(self._client.url, self._run.info.root_key)
        self.reach, self._sources = self._run.reach, (*self._run.info.sources, *self._run.info.last_resort)
        self._head = self._client.signed_ledger_head()

    def entries(self) -> Iterator[protocol.LedgerEntry]:
        """Up to the head that was signed last."""
        return served_rows(self._client, -1, int(self._head.document["index"]))

    def evidence(self, entries: Sequence[protocol.LedgerEntry]) -> dict[int, protocol.Evidence]:
        """`pages` gives no more of them than one answer may have."""
        return {each.row: each for each in self._client.evidence(entries[0].index - 1, len(entries)).evidence}

    def certificates(self) -> tuple[protocol.SignedDocument, ...]:
        return self._run.info.certificates

    def witnessed(self, public_key: str) -> list[bytes]:
        return [data for url in self._sources for data in self.fetch(url, witness_key(public_key), MAX_WITNESS_BYTES)]

    def pins(self, run: str, root_key: str) -> list[Pin]:  # noqa: ARG002  the client has checked both
        found = self._manifests()
        self._head = self._client.signed_ledger_head()  # last, so that no other head of an honest hub is ahead
        return [hub_pin(self._head), *found]

    def signed_head(self) -> CertifiedHead | None:
        hubs = tuple(each for each in self._run.info.certificates if each.document.get("role") == "hub")
        return CertifiedHead(head=self._head, certificates=hubs)

    def _manifests(self) -> list[Pin]:
        """From the first source that answers with signatures of the trainer."""
        run, key = self._run.run, self._run.trainer_key
        for source in self._sources:
            try:
                heads = self.fetch(source, HEAD, MAX_HEAD_BYTES)
                labels = [label for head in heads for label in read_head(head, run, key).versions]
                keys = [manifest_key(place) for label in labels if (place := parse_label(label)) is not None]
                if found := [data for name in keys for data in self.fetch(source, name, MAX_MANIFEST_BYTES)]:
                    return _pins_of(found, run, key)
            except (BroadcastError, ProtocolError) as error:
                self.notes.append(f"{source}: {error}")
        self.notes.append("no source of this run could be asked for policy manifests, which contain heads")
        return []

    def close(self) -> None:
        self._client.close()


def hub_pin(signed: protocol.SignedDocument) -> Pin:
    return Pin(protocol.LedgerHead.model_validate(signed.document), "the hub's signed head", signed)


def served_rows(client: HubClient, after: int, last: int) -> Iterator[protocol.LedgerEntry]:
    """The rows behind `after` up to `last`. Each must be the next one, or a hub could serve one page for ever."""
    while after < last and (page := client.ledger(after, PAGE).entries):
        for entry in page:
            if entry.index != after + 1:
                raise LedgerError(f"ledger row {after + 1} is missing: row {entry.index} comes next")
            if entry.index > last:
                return
            yield entry
            after = entry.index


def _pins_of(manifests: Iterable[bytes], run: str, key: str) -> list[Pin]:
    found = []
    for data in manifests:
        if (manifest := read_manifest(data, run, key)).ledger_head is not None:
            signed = protocol.SignedDocument.model_validate_json(data)
            found.append(Pin(manifest.ledger_head, f"{MANIFEST}{manifest.policy.label}", signed))
    return found


class FolderLedger(LedgerSource):
    def __init__(self, path: Path) -> None:
        self._folder = RunFolder.open(path)
        super().__init__(str(path), self._folder.root_key)
        database, hub = self._folder.recipe.hub.database, path / "hub"
        self._folder.require_hub()
        if not database and not (hub / "hub.db").is_file():
            raise LedgerError(f"there is no hub database {hub / 'hub.db'}: has the run begun?")
        self._storage, self._view = open_storage(database, hub), ExitStack()
        self._look()

    def _look(self) -> None:
        """One snapshot of the database: the run may continue meanwhile."""
        self._view.close()
        self.reader = self._view.enter_context(self._storage.read())

    def entries(self) -> Iterator[protocol.LedgerEntry]:
        after = -1
        while page := self.reader.ledger_after(after, PAGE):
            yield from page
            after = page[-1].index

    def evidence(self, entries: Sequence[protocol.LedgerEntry]) -> dict[int, protocol.Evidence]:
        return {each.row: each for each in evidence_of(self.reader, entries)}

    def certificates(self) -> tuple[protocol.SignedDocument, ...]:
        return self._folder.certificate("hub"), self._folder.certificate("trainer")

    def witnessed(self, public_key: str) -> list[bytes]:
        trees = [Tree(path) for path in (self._folder.path / "origin", *sorted(self._folder.path.glob("relay-*")))]
        return [data for tree in trees if (data := tree.read(witness_key(public_key))) is not None]

    def pins(self, run: str, root_key: str) -> list[Pin]:  # noqa: ARG002  the folder's own
        origin, found = self._folder.path / "origin", list[Pin]()
        for path in sorted((origin / "manifests").glob("*.json")):
            place = parse_label(path.stem)
            data = None if place is None else Tree(origin).read(manifest_key(place))
            try:
                found += _pins_of([] if data is None else [data], self._folder.run_id, self._folder.trainer_key)
            except BroadcastError as error:
                raise LedgerError(f"{path} is not a manifest that this run's trainer signed: {error}") from error
        if not found:
            self.notes.append("origin/ has no policy manifest yet, which would contain a head")
        self._look()  # last, so that no other head of an honest run is ahead
        return found

    def signed_head(self) -> CertifiedHead | None:
        """Signed with the hub's key, which is in the folder."""
        head = head_of(self._folder.run_id, self.reader.ledger_last())
        signed = protocol.sign_document(head, self._folder.key("hub"))
        return CertifiedHead(head=signed, certificates=(self._folder.certificate("hub"),))

    def kept(self, submission: str) -> tuple[protocol.SignedDocument, bytes]:
        row = self.reader.submission(submission)
        holding = None if row is None else self.reader.holding(row.lease)
        if holding is None:
            raise LedgerError(f"the hub has no submission {submission[:16]}…")
        settings = self._folder.recipe.hub
        blobs = open_blobs(settings.storage, settings.storage_endpoint, self._folder.path / "hub" / "blobs")
        return protocol.SignedDocument.model_validate_json(holding.lease.document), blobs.get(submission)

    def calibration(self, digest: str) -> protocol.Calibration | None:
        """As a validator or the owner signed it; None if it is not kept."""
        if (text := self.reader.setting(f"calibration/{digest}")) is None or protocol.document_hash(text) != digest:
            return None
        certificates = [*self._folder.certificates, *orders_of(self.reader).certificates]
        keys = {str(each.document["public_key"]) for each in certificates if each.document.get("role") == "validator"}
        signed = protocol.SignedDocument.model_validate_json(text)
        return protocol.open_document(signed, protocol.Calibration, {self._folder.root_key, *keys})

    def balances(self) -> dict[str, tuple[int, int]] | None:
        """Credit and pending credit of each node by the hub's rows; None while entries wait to be appended."""
        if self.reader.outbox_length():
            return None
        return {row.node: (row.credit, row.pending) for row in self.reader.nodes()}

    def close(self) -> None:
        self._view.close()
        self._storage.close()


class FileLedger(LedgerSource):
    complete = False

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        self._documents = _lines(beside(path, "evidence"), protocol.Evidence, "evidence of a ledger row")
        self._ahead: protocol.Evidence | None = None

    def entries(self) -> Iterator[protocol.LedgerEntry]:
        return _lines(self.path, protocol.LedgerEntry, "a ledger entry")

    def evidence(self, entries: Sequence[protocol.LedgerEntry]) -> dict[int, protocol.Evidence]:
        """Read on as far as these rows go; the file has them in order."""
        found: dict[int, protocol.Evidence] = {}
        while (each := self._ahead or next(self._documents, None)) is not None:
            self._ahead = each if each.row > entries[-1].index else None
            if self._ahead is not None:
                break
            found[each.row] = each
        return found

    def missing_evidence(self) -> str:
        path = beside(self.path, "evidence")
        return "" if path.is_file() else f"there is no {path.name} beside {self.path}"

    def pins(self, run: str, root_key: str) -> list[Pin]:
        """The head of an export, if a hub of this very run signed it. The run's id holds the root key's fingerprint."""
        name, found = beside(self.path, "head").name, self.signed_head()
        if found is None:
            self.notes.append(f"there is no {name} beside it, with the hub's signed head: anybody may have written it")
            return []
        try:
            opened = [protocol.open_document(each, protocol.RoleCertificate, root_key) for each in found.certificates]
            keys = {each.public_key for each in opened if (each.run, each.role) == (run, "hub")}
            return [Pin(protocol.open_document(found.head, protocol.LedgerHead, keys), name)]
        except ProtocolError as error:
            raise LedgerError(f"{name} was not signed by a hub of run {run}: {error}") from error

    def signed_head(self) -> CertifiedHead | None:
        return read_kept(
            beside(self.path, "head"), CertifiedHead, "it is damaged, or no head of an export", LedgerError
        )


def beside(ledger: Path, what: Literal["head", "evidence"]) -> Path:
    return ledger.with_name(f"{ledger.name}.{what}")


def _lines(path: Path, kind: type[M], what: str) -> Iterator[M]:
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                yield kind.model_validate_json(line)
    except ValidationError as error:
        raise LedgerError(f"{path}, line {number}: not {what}: {protocol.first_problem(error)}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_kept(path: Path, kind: type[M], remedy: str, raised: type[ShoalError] = ConfigError) -> M | None:
    """What shoal has written to `path`; None if there is no such file."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise raised(f"cannot read {path}: {error}; {remedy}") from error


class KeptHead(protocol.Message):
    run: str
    root_key: str
    index: int
    hash: str
    seen_ms: int
    signed: protocol.SignedDocument | None = None

    @property
    def head(self) -> protocol.LedgerHead:
        return protocol.LedgerHead(run=self.run, index=self.index, hash=self.hash)


class CertifiedHead(protocol.Message):
    """Beside an exported ledger: the hub's signed head, and what the root key says of the key that signed it."""

    head: protocol.SignedDocument
    certificates: tuple[protocol.SignedDocument, ...]


def kept_path(run: str) -> Path:
    return home() / "heads" / f"{Path(run).name}.json"


def load_kept(run: str) -> KeptHead | None:
    return read_kept(kept_path(run), KeptHead, "restore it, or remove it to begin again")


def keep(root_key: str, head: protocol.LedgerHead, signed: protocol.SignedDocument | None) -> None:
    """Remember the newest verified head, unless a newer one is known; `signed`: as the hub signed it."""
    known = load_kept(head.run)
    if known is not None and known.index >= head.index:
        return
    statement = signed if signed is not None and signed.document.get("index") == head.index else None
    now_ms, place = SystemClock().now_ms(), kept_path(head.run)
    kept = KeptHead(run=head.run, root_key=root_key, index=head.index, hash=head.hash, seen_ms=now_ms, signed=statement)
    ensure_folder(home(), private=True)
    ensure_folder(place.parent)
    write_atomically(place, kept.model_dump_json(indent=2).encode() + b"\n")


def read_head_file(path: Path, run: str) -> list[Pin]:
    """Heads that the user kept: an answer of `GET /ledger/head`, the file beside an export, one kept here, one of a
    witness, or a worker's `heads.jsonl`. The user vouches for them, so signatures do not matter."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the head {path}: {error.strerror}") from error
    many = path.suffix == ".jsonl"  # without a line that was being written when its machine stopped
    lines = data[: data.rfind(b"\n") + 1].splitlines() if many else [data]
    found = [pin for line in lines if (pin := _pin(line, f"--head {path}")) is not None]
    if not found:
        raise ConfigError(f"{path} is no ledger head: neither as a hub or a witness signs it nor as shoal keeps it")
    return [pin for pin in found if pin.head.run == run or not many]


def _pin(data: bytes, source: str) -> Pin | None:
    for kind in (KeptHead, CertifiedHead, protocol.SignedDocument):
        with suppress(ValidationError):
            found = kind.model_validate_json(data)
            if isinstance(found, KeptHead):
                return Pin(found.head, source, found.signed)
            signed = found.head if isinstance(found, CertifiedHead) else found
            named = signed.document.get("ledger") if signed.kind == protocol.Receipt.kind else signed.document
            return Pin(protocol.LedgerHead.model_validate(named, extra="ignore"), source, signed)
    return None


def proven_fork(place: LedgerSource, keys: Keys, error: LedgerForked) -> str:
    """Write the proof of a fork, if it can be proven; the addition to the error message."""
    if (head := place.signed_head()) is None or not isinstance(error.statement, protocol.SignedDocument):
        return ""
    certificates = {str(each.document.get("public_key")): each for each in place.certificates()} | keys.certificates
    rows = (entry for entry in place.entries() if entry.index >= error.index)
    try:
        path = save_proof(keys, tuple(certificates.values()), error.statement, head.head, list(islice(rows, MAX_ROWS)))
    except ShoalError as nothing:  # the error stands without a proof
        return f" ({nothing})"
    return f". The proof is in {path}: it needs nobody's word; check it with shoal ledger verify {path}"


def save_proof(
    keys: Keys, certificates: tuple[protocol.SignedDocument, ...], first: protocol.SignedDocument,
    second: protocol.SignedDocument, entries: list[protocol.LedgerEntry],
) -> Path:  # fmt: skip
    """Write the proof; `LedgerError` if it proves nothing. `entries`: the rows of the second statement's ledger."""
    last = second.document.get("index")
    between = tuple(entry for entry in entries if isinstance(last, int) and entry.index <= last)
    proof = ForkProof(
        run=keys.run, root_key=keys.root_key, certificates=certificates, first=first, second=second, entries=between
    )
    check_fork(proof)
    path = home() / "forks" / f"{Path(keys.run).name}-{entries[0].index if entries else 0}.json"
    ensure_folder(path.parent)
    write_atomically(path, proof.model_dump_json(indent=2).encode() + b"\n")
    return path


def read_proof(path: Path) -> str | None:
    """What a proof shows, if the file is a proof and not a ledger; `LedgerError` if it shows nothing."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(START)) != START:  # entries are one per line
            return None
    try:
        return check_fork(ForkProof.model_validate_json(path.read_bytes()))
    except ValidationError as error:
        raise LedgerError(f"{path} is no proof of a fork: {error}") from error
