"""`shoal key` as it is typed: made, shown, carried to another machine, vouched for; nothing is ever overwritten."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import UserError
from shoal.protocol import SignedDocument, SigningKey, Vouch, load_key, open_document
from shoal.run.keyring import PASSPHRASE, node_of, read_vouch, vouch_of

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def owner(tmp_path: Path, capsys: Shown) -> Path:
    assert main(["key", "new", str(tmp_path / "owner.key")]) == 0
    capsys.readouterr()
    return tmp_path / "owner.key"


@pytest.fixture(autouse=True)
def passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSPHRASE, "several words of mine")


def test_a_key_is_made_private_and_shown(owner: Path, capsys: Shown) -> None:
    key = load_key(owner)
    for where in (owner, owner.parent / "w"):
        if where != owner:
            where.mkdir()
            owner.rename(where / "node.key")  # a worker's folder stands for the key in it
        assert main(["key", "show", str(where)]) == 0
        assert capsys.readouterr().out.split() == ["node", key.node, "public", "key", key.public_key]


def test_no_key_is_overwritten(owner: Path, tmp_path: Path, capsys: Shown) -> None:
    before = owner.read_bytes()
    assert main(["key", "new", str(owner)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert main(["key", "export", str(owner), "--out", str(tmp_path / "sealed")]) == 0
    assert main(["key", "export", str(owner), "--out", str(tmp_path / "sealed")]) == 2
    assert main(["key", "import", str(tmp_path / "sealed"), str(owner)]) == 2
    assert owner.read_bytes() == before


def test_a_key_is_carried_to_another_machine(
    owner: Path, tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["key", "export", str(owner)]) == 0
    text = capsys.readouterr().out
    assert "PRIVATE" not in text
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["key", "import", "-", str(tmp_path / "there.key")]) == 0
    assert load_key(tmp_path / "there.key").public_key == load_key(owner).public_key
    (tmp_path / "words").write_text("other words than those\n")
    (tmp_path / "sealed").write_text(text)
    there = str(tmp_path / "nowhere.key")
    assert main(["key", "import", str(tmp_path / "sealed"), there, "--passphrase-file", str(tmp_path / "words")]) == 2
    assert "does not open" in capsys.readouterr().err
    assert not Path(there).exists()


def test_without_a_terminal_a_passphrase_has_to_be_given(
    owner: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSPHRASE)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["key", "export", str(owner)]) == 2
    assert "--passphrase-file" in capsys.readouterr().err


def test_an_owner_vouches_for_a_machine_without_going_there(owner: Path, tmp_path: Path, capsys: Shown) -> None:
    machine = SigningKey.generate()
    for name in (machine.node, machine.public_key):
        assert main(["key", "vouch", name, "--owner", str(owner)]) == 0
        text = capsys.readouterr().out
        vouch = open_document(SignedDocument.model_validate_json(text), Vouch, load_key(owner).public_key)
        assert (vouch.node, vouch.owner) == (machine.node, load_key(owner).public_key)
    (tmp_path / "vouch.json").write_text(text)
    assert read_vouch(tmp_path / "vouch.json", machine).signed_by == vouch.owner
    with pytest.raises(UserError, match=f"vouches for node {machine.node}, but this one is"):
        read_vouch(tmp_path / "vouch.json", SigningKey.generate())


def test_what_a_worker_brings_along_of_its_owner(owner: Path, tmp_path: Path) -> None:
    machine = SigningKey.generate()
    assert vouch_of(machine, None, None) is None
    signed = vouch_of(machine, owner, None)
    assert signed is not None
    assert open_document(signed, Vouch, load_key(owner).public_key).node == machine.node
    with pytest.raises(UserError, match="give one of them"):
        vouch_of(machine, owner, owner)
    with pytest.raises(UserError, match="is not a vouch"):
        vouch_of(machine, None, owner)
    assert node_of(str(owner)) == load_key(owner).node
    with pytest.raises(UserError, match="neither a node id"):
        node_of("alice")
