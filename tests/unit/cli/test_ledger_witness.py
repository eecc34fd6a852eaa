"""Witnesses and kept heads: a ledger that is rewritten is found, and proven to anybody."""

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hubrun import batch, earn, hub_config, join, join_validator, make_folder, publish, record, running, serving

from kit import Capture, Patch
from kit.cli import told
from shoal.cli.main import main
from shoal.client import HubClient
from shoal.errors import HubUnreachable, LedgerError, LedgerForked
from shoal.hub.service import Hub
from shoal.hub.storage import SqliteStorage
from shoal.ledger import Keys, Pin
from shoal.protocol import LedgerPage, SignedDocument, SigningKey, WitnessedHead, load_key, open_document, sign_document
from shoal.run.folder import RunFolder
from shoal.run.ledger.check import check_ledger, check_source, export_ledger
from shoal.run.ledger.sources import FolderLedger, HubLedger, LedgerSource, proven_fork
from shoal.run.ledger.witness import Witness
from shoal.runtime.clock import ManualClock
from shoal.shardcast.server import run_origin
from shoal.shardcast.tree import Tree, witness_key
from shoal.worker.outbox import HEADS, KEPT, KeptHeads

ALICE = SigningKey.from_seed(b"\1" * 32)


@contextmanager
def opened(folder: RunFolder) -> Iterator[Hub]:
    hub = Hub(hub_config(folder), ManualClock())
    try:
        yield hub
    finally:
        hub.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a validator, a worker that has earned once, and a policy."""
    folder = make_folder(tmp_path / "run")
    with opened(folder) as hub:
        join_validator(hub, folder)
        earn(hub, folder, join(hub, ALICE, "alice"), 0, 30)
        publish(folder, hub, 1)
    return folder


def grow(folder: RunFolder, step: int) -> None:
    with opened(folder) as hub:
        record(hub, batch(step))


def roll_back(folder: RunFolder, to: Path) -> None:
    shutil.rmtree(folder.path / "hub")
    shutil.copytree(to, folder.path / "hub")


def record_another(folder: RunFolder, to: Path, *more: Any) -> None:
    """Another ledger than the one that went on from `to`."""
    roll_back(folder, to)
    with opened(folder) as hub:
        record(hub, ("batch", {"step": 0, "units": [], "digest": "another"}), *more)


def look(folder: RunFolder, where: Path, *out: Path) -> int:
    with serving(folder) as url:
        named = [option for path in out for option in ("--out", str(path))]
        return main(["ledger", "witness", url, "--folder", str(where), "--once", *named])


@pytest.fixture
def forked(folder: RunFolder, tmp_path: Path) -> Path:
    """The folder of a witness that signed for a row; the hub's folder from before that row lies beside it."""
    shutil.copytree(folder.path / "hub", tmp_path / "before")
    grow(folder, 0)
    assert look(folder, tmp_path / "w", folder.path / "origin") == 0
    return tmp_path / "w"


def key_of(where: Path) -> str:
    return load_key(where / "witness.key").public_key


def test_a_witness_signs_for_a_ledger_that_has_only_grown(folder: RunFolder, tmp_path: Path) -> None:
    where, tree = tmp_path / "w", tmp_path / "tree"
    assert look(folder, where, tree) == 0
    grow(folder, 0)
    assert look(folder, where, tree) == 0
    key = key_of(where)
    signed = SignedDocument.model_validate_json((tree / "witness" / f"{key}.json").read_bytes())
    head = open_document(signed, WitnessedHead, key)
    with SqliteStorage(folder.path / "hub" / "hub.db").read() as reader:
        last = reader.ledger_last()
    assert (head.run, head.index, head.hash) == (folder.run_id, last.index, last.hash)
    assert (where / "witness.key").stat().st_mode & 0o077 == 0


def test_a_witness_refuses_a_rewritten_ledger_and_proves_it(folder, forked, own_home, capsys):
    published = (folder.path / "origin" / "witness" / f"{key_of(forked)}.json").read_bytes()
    record_another(folder, forked.parent / "before", batch(1))
    assert look(folder, forked, folder.path / "origin") == 5
    said = capsys.readouterr().err
    assert (folder.path / "origin" / "witness" / f"{key_of(forked)}.json").read_bytes() == published, "nothing new"
    assert "does not follow row" in said
    [proof] = (own_home / "forks").glob("*.json")
    assert str(proof) in said
    assert "was forked" in told(capsys, 5, "ledger", "verify", proof).err
    tampered = json.loads(proof.read_bytes())
    tampered["second"] = tampered["first"]
    proof.write_text(json.dumps(tampered, indent=2))
    assert "proves no fork" in told(capsys, 5, "ledger", "verify", proof).err


def test_a_witness_refuses_a_ledger_that_was_cut(folder: RunFolder, forked: Path) -> None:
    roll_back(folder, forked.parent / "before")
    assert look(folder, forked) == 5


def test_a_witness_of_one_run_does_not_accuse_another(folder: RunFolder, tmp_path: Path, capsys: Capture) -> None:
    where, other = tmp_path / "w", make_folder(tmp_path / "other")
    assert look(folder, where) == 0
    with opened(other) as hub:
        record(hub, *(batch(step) for step in range(9)))
    assert look(other, where) == 5
    assert f"this folder watches run {folder.run_id}" in capsys.readouterr().err


def test_witness_of_another_run_is_ignored(folder: RunFolder, tmp_path: Path) -> None:
    """One key may watch several runs: a source could have one ledger called rewritten by its word on another."""
    witness = SigningKey.generate()
    other = WitnessedHead(run="other-000000000000", index=1, hash="ab" * 32, at_ms=1)
    path = tmp_path / "said.json"
    path.write_bytes(sign_document(other, witness).model_dump_json().encode())
    Tree(folder.path / "origin").write(witness_key(witness.public_key), path.read_bytes())
    with pytest.raises(LedgerError, match=r"nothing that witness .* signed was found"):
        check_ledger(str(folder.path), witnesses=[witness.public_key])


def test_a_reader_takes_the_witness_that_it_trusts(folder: RunFolder, tmp_path: Path) -> None:
    where, origin = tmp_path / "w", folder.path / "origin"
    assert look(folder, where, origin) == 0
    key = key_of(where)
    grow(folder, 0)
    checked = check_ledger(str(folder.path), witnesses=[key])
    assert any(pin.source == f"witness {key[:16]}…" for pin in checked.pins)
    with pytest.raises(LedgerError, match="nothing that witness"):
        check_ledger(str(folder.path), witnesses=["ab" * 32])
    path = origin / witness_key(key)
    forged = SignedDocument.model_validate_json(path.read_bytes())
    hub_made = sign_document(WitnessedHead.model_validate(forged.document), folder.key("hub"))
    path.write_text(hub_made.model_dump_json())
    with pytest.raises(LedgerError, match="nothing that witness"):
        check_ledger(str(folder.path), witnesses=[key])
    assert main(["ledger", "verify", str(folder.path), "--witness", "no key"]) == 2


def test_document_of_a_witness_counts_by_file_and_by_address(folder: RunFolder, tmp_path: Path) -> None:
    where, elsewhere = tmp_path / "w", tmp_path / "elsewhere"
    assert look(folder, where, elsewhere) == 0
    key = key_of(where)
    with pytest.raises(LedgerError, match="give its document with --head"):
        check_ledger(str(folder.path), witnesses=[key])
    checked = check_ledger(str(folder.path), head=elsewhere / witness_key(key), witnesses=[key])
    assert any(pin.source == f"witness {key[:16]}…" for pin in checked.pins)
    where, origin = tmp_path / "w", folder.path / "origin"
    assert look(folder, where, origin) == 0
    with served(origin) as source:
        checked = check_ledger(str(folder.path), witnesses=[f"{key_of(where)}@{source}"])
    assert sum("witness" in pin.source for pin in checked.pins) == 2, "in the folder, and by its address"


def test_a_witness_finds_what_the_hubs_own_heads_do_not(folder: RunFolder, forked: Path, own_home: Path) -> None:
    record_another(folder, forked.parent / "before", batch(1))
    check_ledger(str(folder.path))
    shutil.rmtree(own_home, ignore_errors=True)
    with pytest.raises(LedgerError, match=r"signed for .witness"):
        check_ledger(str(folder.path), witnesses=[key_of(forked)])


def test_file_that_ends_before_the_witness_row_fails(folder, forked, own_home, monkeypatch):
    """The hub exports a fork that is shorter than what the witness signed: its own head and every document fit."""
    grow(folder, 1)
    assert look(folder, forked) == 0
    record_another(folder, forked.parent / "before")
    fork, key = forked.parent / "fork.jsonl", key_of(forked)
    last = export_ledger(str(folder.path), fork) - 1
    monkeypatch.setattr(LedgerSource, "fetch", lambda *_: [(forked / witness_key(key)).read_bytes()])
    words = rf"signed row {last + 1}, the file ends at row {last}: it cannot be compared"
    with pytest.raises(LedgerError, match=words):
        check_ledger(str(fork), witnesses=[f"{key}@http://witness"])
    assert main(["ledger", "verify", str(fork), "--witness", f"{key}@http://witness"]) == 5
    check_ledger(str(fork))  # nobody was asked for their word


class StuckHub:
    """Answers with its first rows for ever, whatever is asked for."""

    def __init__(self, client: HubClient) -> None:
        self._client, self._asked = client, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def ledger(self, after: int = -1, limit: int = 500) -> LedgerPage:
        self._asked += 1
        assert self._asked < 10, "it is asked without end"
        return self._client.ledger(-1, 2)


def test_forked_hub_that_repeats_a_page_is_refused(folder: RunFolder, forked: Path, own_home: Path) -> None:
    with closing(FolderLedger(folder.path)) as place:
        seen = place.signed_head()
    assert seen is not None
    record_another(folder, forked.parent / "before", batch(1))
    with serving(folder) as url, closing(HubLedger(url, 3.0)) as place:
        place._client = cast(HubClient, StuckHub(place._client))
        with pytest.raises(LedgerError, match=r"row \d+ is missing: row 0 comes next"):
            Witness(place._client, forked, [forked]).look()
        keys = Keys(folder.run_id, folder.root_key)
        found = LedgerForked("a fork", int(seen.head.document["index"]), seen.head)
        assert "is missing: row 0 comes next" in proven_fork(place, keys, found)
    assert not (own_home / "forks").exists()


def test_hub_that_leaves_does_not_hide_its_fork(folder: RunFolder, forked: Path, monkeypatch: Patch) -> None:
    record_another(folder, forked.parent / "before", batch(1))
    answered: list[int] = []
    ask = HubClient.ledger

    def once(client: HubClient, after: int = -1, limit: int = 500) -> LedgerPage:
        answered.append(after)
        if len(answered) > 1:
            raise HubUnreachable("gone")
        return ask(client, after, limit)

    monkeypatch.setattr(HubClient, "ledger", once)
    assert look(folder, forked) == 5
    assert len(answered) == 2


def served(origin: Path) -> AbstractContextManager[str]:
    return running(partial(run_origin, origin, "127.0.0.1", 0))


def grow_and_publish(folder: RunFolder) -> None:
    with opened(folder) as hub:
        record(hub, batch(0))
        publish(folder, hub, 2)


def test_folder_that_grows_while_verified_was_not_rolled_back(folder: RunFolder, monkeypatch: Patch) -> None:
    """A row and a manifest that names it come after the folder was opened."""
    with closing(FolderLedger(folder.path)) as place:
        pins = place.pins

        def later(run: str, root_key: str) -> list[Pin]:
            grow_and_publish(folder)
            return pins(run, root_key)

        monkeypatch.setattr(place, "pins", later)
        checked = check_source(place)
    assert checked.last.kind == "batch"


def test_hub_that_grows_while_verified_not_rolled_back(folder: RunFolder, tmp_path: Path, monkeypatch: Patch) -> None:
    """A witness signs for a row that came after the hub's head was fetched."""
    where = tmp_path / "w"
    with serving(folder) as url, closing(HubLedger(url, 3.0)) as place:
        grow(folder, 0)
        assert main(["ledger", "witness", url, "--folder", str(where), "--once"]) == 0
        key = key_of(where)
        published = lambda _self, url, *_: [(where / witness_key(key)).read_bytes()] * (url == "http://witness")  # noqa: E731
        monkeypatch.setattr(LedgerSource, "fetch", published)
        checked = check_source(place, witnesses=[f"{key}@http://witness"])
    assert checked.last.kind == "batch"


def test_a_source_that_keeps_fewer_versions_than_its_head_names_is_no_failure(folder: RunFolder) -> None:
    grow_and_publish(folder)
    origin = folder.path / "origin"
    first, second = sorted((origin / "manifests").rglob("*.json"))
    first.unlink()  # as on a relay: the head that it mirrors names both
    with served(origin) as source, serving(folder) as url, closing(HubLedger(url, 3.0)) as place:
        place._sources = (source,)
        pins = place.pins(folder.run_id, folder.root_key)
    assert [pin.source for pin in pins] == ["the hub's signed head", "the manifest of policy 0.2"]
    assert (place.notes, second.exists()) == ([], True)


def test_heads_of_receipts_prove_a_fork(folder: RunFolder, tmp_path: Path, own_home: Path, capsys: Capture) -> None:
    before = shutil.copytree(folder.path / "hub", tmp_path / "before")
    kept = KeptHeads(tmp_path)
    grow(folder, 0)
    with opened(folder) as hub:
        earn(hub, folder, ALICE.node, 1, 7)
        with hub.context.storage.read() as reader:
            row = reader.submission_of_lease("u1a0")
    receipt = SignedDocument.model_validate_json(row.receipt)
    kept.keep(receipt)
    kept.keep(receipt)
    assert len((tmp_path / HEADS).read_text().splitlines()) == 1, "the ledger had not grown"
    assert main(["ledger", "verify", str(folder.path), "--head", str(tmp_path / HEADS)]) == 0
    assert "passes through row 4: --head" in capsys.readouterr().out
    shutil.rmtree(own_home, ignore_errors=True)
    record_another(folder, before, batch(1))
    assert "The proof is in" in told(capsys, 5, "ledger", "verify", folder.path, "--head", tmp_path / HEADS).err
    [proof] = (own_home / "forks").glob("*.json")
    assert f"the ledger of {folder.run_id} was forked" in told(capsys, 5, "ledger", "verify", proof).err


def test_kept_heads_are_bounded_and_a_torn_line_is_left_out(folder: RunFolder, tmp_path: Path) -> None:
    with SqliteStorage(folder.path / "hub" / "hub.db").read() as reader:
        row = reader.submission_of_lease("u0a0")
    receipt = SignedDocument.model_validate_json(row.receipt)
    kept = KeptHeads(tmp_path)
    for number in range(2 * KEPT):
        head = {**receipt.document["ledger"], "hash": f"{number:064x}"}
        kept.keep(receipt.model_copy(update={"document": {**receipt.document, "ledger": head}}))
    lines = (tmp_path / HEADS).read_text().splitlines()
    assert len(lines) == KEPT
    assert f"{2 * KEPT - 1:064x}" in lines[-1]
    (tmp_path / HEADS).write_text(receipt.model_dump_json() + "\n" + receipt.model_dump_json()[:40])
    check_ledger(str(folder.path), head=tmp_path / HEADS)
