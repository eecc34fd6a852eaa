"""Witnesses and kept heads: a ledger that is rewritten is found, and proven to anybody."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hubrun import batch, earn, hub_config, join, join_validator, make_folder, publish, record, serving

from shoal.cli.accounting.checking import check_ledger
from shoal.cli.folder import RunFolder
from shoal.cli.main import main
from shoal.errors import LedgerError, ManifestRefused
from shoal.hub.service import Hub
from shoal.hub.storage import SqliteStorage
from shoal.protocol import SignedDocument, SigningKey, WitnessedHead, load_key, open_document, sign_document
from shoal.runtime.clock import ManualClock
from shoal.runtime.stop import StopToken
from shoal.shardcast import RelayConfig
from shoal.shardcast.catalogue import Arrivals
from shoal.shardcast.mirror import CountingScores, Mirror
from shoal.shardcast.relay import Follower
from shoal.shardcast.server import run_origin
from shoal.shardcast.tree import Tree, witness_key
from shoal.worker.heads import HEADS, KEPT, KeptHeads

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


def look(folder: RunFolder, where: Path, *out: Path) -> int:
    with serving(folder) as url:
        named = [option for path in out for option in ("--out", str(path))]
        return main(["ledger", "witness", url, "--folder", str(where), "--once", *named])


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
    assert last is not None
    assert (head.run, head.index, head.hash) == (folder.run_id, last.index, last.hash)
    assert (where / "witness.key").stat().st_mode & 0o077 == 0


def test_a_witness_refuses_a_rewritten_ledger_and_leaves_the_proof(
    folder: RunFolder, tmp_path: Path, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "w"
    before = shutil.copytree(folder.path / "hub", tmp_path / "before")
    grow(folder, 0)
    assert look(folder, where) == 0
    published = (where / "witness" / f"{key_of(where)}.json").read_bytes()
    roll_back(folder, before)
    with opened(folder) as hub:
        record(hub, ("batch", {"step": 0, "units": [], "digest": "another"}), batch(1))
    assert look(folder, where) == 5
    assert (where / "witness" / f"{key_of(where)}.json").read_bytes() == published, "nothing new was signed"
    said = capsys.readouterr().err
    assert "does not follow row" in said
    [proof] = (own_home / "forks").glob("*.json")
    assert str(proof) in said
    assert main(["ledger", "verify", str(proof)]) == 5
    assert "was forked" in capsys.readouterr().err
    tampered = json.loads(proof.read_bytes())
    tampered["second"] = tampered["first"]
    proof.write_text(json.dumps(tampered, indent=2))
    assert main(["ledger", "verify", str(proof)]) == 5
    assert "proves no fork" in capsys.readouterr().err


def test_a_witness_refuses_a_ledger_that_was_cut(folder: RunFolder, tmp_path: Path) -> None:
    before = shutil.copytree(folder.path / "hub", tmp_path / "before")
    grow(folder, 0)
    assert look(folder, tmp_path / "w") == 0
    roll_back(folder, before)
    assert look(folder, tmp_path / "w") == 5


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


def test_a_witness_finds_what_the_hubs_own_heads_do_not(folder: RunFolder, tmp_path: Path, own_home: Path) -> None:
    where, before = tmp_path / "w", shutil.copytree(folder.path / "hub", tmp_path / "before")
    grow(folder, 0)
    assert look(folder, where, folder.path / "origin") == 0
    roll_back(folder, before)
    with opened(folder) as hub:
        record(hub, ("batch", {"step": 0, "units": [], "digest": "another"}), batch(1))
    check_ledger(str(folder.path))
    shutil.rmtree(own_home, ignore_errors=True)
    with pytest.raises(LedgerError, match=r"signed for .witness"):
        check_ledger(str(folder.path), witnesses=[key_of(where)])


def test_relays_carry_what_a_witness_signed_and_cannot_change_it(folder: RunFolder, tmp_path: Path) -> None:
    """Served by the origin, mirrored by a relay that was given the key, read by URL; forgeries are not taken."""
    where, origin = tmp_path / "w", folder.path / "origin"
    assert look(folder, where, origin) == 0
    key, stop, urls = key_of(where), StopToken(), queue.Queue[str]()
    config = RelayConfig(tmp_path / "relay", (), folder.run_id, folder.trainer_key, witnesses=(key,))
    tree, scores = Tree(config.folder), CountingScores(())
    tree.prepare()
    mirror = Mirror(config, tree, Arrivals(), scores)
    server = threading.Thread(target=run_origin, args=(origin, "127.0.0.1", 0, stop, urls.put))
    server.start()
    try:
        url = urls.get(timeout=30)
        Follower(url, config, mirror, scores, StopToken())._poll()
        checked = check_ledger(str(folder.path), witnesses=[f"{key}@{url}"])
        assert sum("witness" in pin.source for pin in checked.pins) == 2, "in the folder, and by its address"
    finally:
        stop.set("done")
        server.join(30)
    assert tree.read(witness_key(key)) == (origin / witness_key(key)).read_bytes()
    assert mirror.find(witness_key(key)) is not None
    stranger = sign_document(WitnessedHead(run=folder.run_id, index=99, hash="0" * 64, at_ms=1), SigningKey.generate())
    other = sign_document(WitnessedHead(run="other", index=99, hash="0" * 64, at_ms=1), load_key(where / "witness.key"))
    for forged in (stranger, other):
        with pytest.raises(ManifestRefused, match="is not"):
            mirror.adopt_witness(key, forged.model_dump_json().encode())


def test_a_worker_keeps_the_heads_of_its_receipts_and_they_prove_a_fork(
    folder: RunFolder, tmp_path: Path, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = shutil.copytree(folder.path / "hub", tmp_path / "before")
    kept = KeptHeads(tmp_path)
    grow(folder, 0)
    with opened(folder) as hub:
        earn(hub, folder, ALICE.node, 1, 7)
        with hub.context.storage.read() as reader:
            row = reader.submission_of_lease("u1a0")
    assert row is not None
    receipt = SignedDocument.model_validate_json(row.receipt)
    kept.keep(receipt)
    kept.keep(receipt)
    assert len((tmp_path / HEADS).read_text().splitlines()) == 1, "the ledger had not grown"
    assert main(["ledger", "verify", str(folder.path), "--head", str(tmp_path / HEADS)]) == 0
    assert "passes through row 4: --head" in capsys.readouterr().out
    shutil.rmtree(own_home, ignore_errors=True)
    roll_back(folder, before)
    with opened(folder) as hub:
        record(hub, ("batch", {"step": 0, "units": [], "digest": "another"}), batch(1))
    assert main(["ledger", "verify", str(folder.path), "--head", str(tmp_path / HEADS)]) == 5
    assert "The proof is in" in capsys.readouterr().err
    [proof] = (own_home / "forks").glob("*.json")
    assert main(["ledger", "verify", str(proof)]) == 5
    assert f"the ledger of {folder.run_id} was forked" in capsys.readouterr().err


def test_kept_heads_are_bounded_and_a_torn_line_is_left_out(folder: RunFolder, tmp_path: Path) -> None:
    with SqliteStorage(folder.path / "hub" / "hub.db").read() as reader:
        row = reader.submission_of_lease("u0a0")
    assert row is not None
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
