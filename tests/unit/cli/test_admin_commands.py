"""`shoal admin` and `shoal why`, as a run's owner and a contributor use them, against a hub that really serves."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hubrun import earn, hub_config, join, join_validator, make_folder, serving

from kit import Capture, TempPaths
from kit.cli import told
from shoal.cli.main import main
from shoal.client import ClientOptions, HubClient
from shoal.errors import HubRefused, UserError
from shoal.hub.service import Hub
from shoal.ledger import verify
from shoal.protocol import (
    AuditRequest,
    LeaseRequest,
    SignedDocument,
    SigningKey,
    Vouch,
    load_key,
    load_or_create_key,
    open_document,
)  # fmt: skip
from shoal.run.folder import RunFolder
from shoal.run.owner import certificate_of, node_of, vouch_for, vouch_of
from shoal.runtime import StopToken, SystemClock
from shoal.validator.profiles import Profile, to_toml

ALICE, BOB, CAROL = (SigningKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))


def client_of(folder: RunFolder, key: SigningKey) -> HubClient:
    return HubClient(folder.endpoints.hub, key, StopToken(), options=ClientOptions(patience_s=5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: TempPaths) -> Iterator[RunFolder]:
    """A run with two workers, served while the tests of this file go on."""
    folder = make_folder(tmp_path_factory.mktemp("admin") / "run", "hub.requests_per_address_s=0")
    hub = Hub(hub_config(folder), SystemClock())
    join(hub, BOB, "bob")
    join_validator(hub, folder)
    earn(hub, folder, join(hub, ALICE, "alice"), 0, 10)
    earn(hub, folder, join(hub, CAROL, "carol"), 1, 10)
    hub.close()
    with serving(folder):
        yield folder


def order(folder: RunFolder, verb: str, *arguments: str) -> int:
    return main(["admin", verb, str(folder.path), *arguments])


def test_pause_resume_and_relays_are_orders_of_the_owner(folder: RunFolder, capsys: Capture) -> None:
    assert order(folder, "pause", "--reason", "power cut") == 0
    assert capsys.readouterr().out == "the run is paused\n"
    reply = client_of(folder, ALICE).lease(LeaseRequest(request="request-1", max_units=1))
    assert "power cut" in reply.waiting
    assert "paused by its owner" in told(capsys, 0, "status", folder.path).out
    assert order(folder, "resume") == 0
    assert order(folder, "drain") == 0
    assert order(folder, "resume") == 0
    assert order(folder, "resume") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to do: the run is running"
    assert order(folder, "add-relay", "http://relay:8472") == 0
    assert "http://relay:8472" in client_of(folder, ALICE).run_info().sources
    assert order(folder, "remove-relay", "http://relay:8472") == 0
    assert "http://relay:8472" not in client_of(folder, ALICE).run_info().sources


def test_node_is_named_by_its_name_or_the_start_of_its_id_and_an_unknown_one_is_a_user_error(folder, capsys):
    assert order(folder, "ban", "alice", "--reason", "a bot") == 0
    said = told(capsys, 0, "why", ALICE.node[:6], folder.path, "--all").out
    assert f"node {ALICE.node} (alice), worker: banned: a bot; only the run's owner can pardon it" in said
    assert "order of the run's owner: verb ban, target" in said
    assert order(folder, "pardon", ALICE.node) == 0
    assert order(folder, "suspend", "bob", "--for", "90") == 0
    out = told(capsys, 0, "why", "bob", folder.path, "--json").out
    story = json.loads(out[out.index("{") :])
    assert (story["node"]["state"], story["node"]["suspensions"]) == ("suspended", 1)
    assert order(folder, "pardon", "bob") == 0
    capsys.readouterr()
    assert order(folder, "ban", "nobody") == 2
    assert "there is no node 'nobody' in this run; a node is named by" in capsys.readouterr().err
    for what, said in (("9999999", "there is no unit 9999999"), ("f" * 32, ""), ("nobody", "")):
        assert said in told(capsys, 2, "why", what, folder.path).err


def test_from_elsewhere_with_the_keys_alone(folder: RunFolder, tmp_path: Path) -> None:
    join_url, keys = folder.endpoints.join, tmp_path / "keys"
    assert main(["admin", "pause", join_url]) == 2
    keys.mkdir()
    assert main(["admin", "pause", join_url, "--keys", str(keys)]) == 2
    for name in ("admin.key", "admin.json"):
        shutil.copy(folder.path / "keys" / name, keys / name)
    assert main(["admin", "pause", join_url, "--keys", str(keys)]) == 0
    assert main(["admin", "resume", join_url, "--keys", str(keys)]) == 0


def test_another_validator_without_a_restart(folder: RunFolder, capsys: Capture) -> None:
    assert order(folder, "add-validator") == 0
    assert "shoal validator " in capsys.readouterr().out
    key = folder.key("validator-1")
    assert "validator-1" in RunFolder.open(folder.path).trusted_roles
    client = client_of(folder, key)
    assert key.public_key in client.trusted_run().validator_keys
    client.register("validator-1", "validator", folder.certificate("validator-1"))
    client.audits(AuditRequest(max_audits=1))
    assert order(folder, "revoke", "validator-1") == 0
    with pytest.raises(HubRefused, match="revoked"):
        client.audits(AuditRequest(max_audits=1))
    assert key.public_key not in client_of(folder, ALICE).trusted_run().validator_keys


def test_validator_elsewhere_gets_its_certificate_as_a_file(folder: RunFolder, tmp_path: Path, capsys: Capture) -> None:
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "certificate.json"
    (elsewhere / "keys").mkdir(parents=True)
    key = load_or_create_key(elsewhere / "keys" / "validator-0.key")
    assert order(folder, "add-validator", key.public_key, "--out", str(out)) == 0
    assert json.loads(out.read_text())["document"]["public_key"] == key.public_key
    assert key.public_key in client_of(folder, ALICE).trusted_run().validator_keys
    for line in capsys.readouterr().out.splitlines():  # done as it says, the folder is one that a validator opens
        source, arrow, target = line.strip().partition(" → VALIDATOR/")
        if arrow and not source.startswith("its own key"):
            shutil.copy(source, elsewhere / target.split()[0])
    there = RunFolder.open(elsewhere)
    assert there.certificate("validator-0").document["public_key"] == key.public_key
    assert there.endpoints.hub == folder.endpoints.hub
    assert order(folder, "add-validator", "no key") == 2


def test_trusted_worker_is_certified_by_a_file_registers_with_it_and_is_revoked(folder, tmp_path, capsys):
    key, out, vouch = load_or_create_key(tmp_path / "node.key"), tmp_path / "box.json", tmp_path / "vouch.json"
    add = ["add-worker", key.public_key, "--out", str(out)]
    assert order(folder, *add, "--for", "1e9") == 2
    assert "holds for at most 100,000,000 seconds" in capsys.readouterr().err
    assert order(folder, *add, "--for", "7200") == 0
    said = capsys.readouterr().out
    assert f"its certificate, for 2 h: {out}" in said
    assert f"join {folder.endpoints.join} --folder FOLDER --trusted box.json" in said
    vouch.write_text(vouch_for(key.node, ALICE).model_dump_json())
    for other, file, message in ((BOB, out, "is for a trusted worker with key"), (key, vouch, "is not a certificate")):
        with pytest.raises(UserError, match=message):
            certificate_of(other, file)
    client = client_of(folder, key)
    assert client.register("box", "trusted", certificate_of(key, out)).role == "trusted"
    assert "no policy" in client.lease(LeaseRequest(request="request-t", max_units=1)).waiting
    assert "a trusted worker that the root key certified" in told(capsys, 0, "why", "box", folder.path).out
    assert order(folder, "revoke", key.public_key) == 0
    with pytest.raises(HubRefused, match="revoked"):
        client.lease(LeaseRequest(request="request-u", max_units=1))
    assert "was revoked by the run's owner, and that is for good" in told(capsys, 0, "why", "box", folder.path).out


def test_limits_signed_by_the_root_key_open_a_new_kind(folder: RunFolder, tmp_path: Path, capsys: Capture) -> None:
    kind = "vllm/cuda/bfloat16"
    (tmp_path / "mine.toml").write_text(to_toml(Profile(key=kind)))
    assert order(folder, "calibrate", str(tmp_path / "mine.toml")) == 0
    digest = capsys.readouterr().out.rsplit(" ", 1)[1].strip()
    client = client_of(folder, ALICE)
    assert kind in client.refreshed_run().info.profiles
    assert list(client.calibration(digest).kinds) == [kind]
    assert client.calibration(digest).kinds[kind].limits == Profile(key=kind).model_dump(mode="json")
    assert order(folder, "calibrate", str(tmp_path / "absent.toml")) == 2


def test_without_the_root_key_nobody_is_certified(folder: RunFolder, tmp_path: Path) -> None:
    root = folder.path / "keys" / "root.key"
    root.rename(tmp_path / "root.key")
    try:
        assert order(folder, "add-validator") == 2
        assert order(folder, "rotate", "validator-0") == 2
        assert order(folder, "pause") == 0
        assert order(folder, "resume") == 0
    finally:
        (tmp_path / "root.key").rename(root)


def test_keys_are_rotated_without_an_interruption(tmp_path: Path, capsys: Capture) -> None:
    folder = make_folder(tmp_path / "run")
    before = {name: folder.key(name).public_key for name in ("hub", "validator-0", "admin")}
    with serving(folder):
        for name in before:
            assert order(folder, "rotate", name) == 0
        assert order(folder, "rotate", "trainer") == 2
        assert order(folder, "rotate", "nobody") == 2
        assert order(folder, "pause") == 0  # signed by the new admin key
        assert order(folder, "resume") == 0
        trusted = client_of(folder, ALICE).trusted_run()
        assert trusted.hub_keys == {before["hub"], folder.key("hub").public_key}
        assert {before["validator-0"], folder.key("validator-0").public_key} <= trusted.validator_keys
    with serving(RunFolder.open(folder.path)):  # restarted: it signs with its new key, and the old one still counts
        client = client_of(folder, ALICE)
        assert before["hub"] in client.trusted_run().hub_keys
        assert client.signed_ledger_head().signed_by == folder.key("hub").public_key != before["hub"]
        for name, key in before.items():
            assert order(folder, "revoke", key) == 0, name
        assert set(client_of(folder, ALICE).run_info().revoked) == set(before.values())
        entries = client.ledger(limit=1000).entries
        verify(entries)
        verbs = [entry.body["verb"] for entry in entries if entry.kind == "admin"]
        assert verbs == ["certify", "certify", "certify", "pause", "resume", "revoke", "revoke", "revoke"]
        capsys.readouterr()
        assert "orders of the owner: 8" in told(capsys, 0, "ledger", "verify", folder.path).out


def test_a_hub_that_is_not_running_takes_no_orders(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    from shoal.run import owner as ordering

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "WAIT_S", 0.0)
        assert order(folder, "pause") == 4
    with pytest.raises(UserError, match="64 hex digits"):
        ordering.revoke(ordering.Order(str(folder.path), "revoke", "short"))


@pytest.fixture
def owner(tmp_path: Path, capsys: Capture) -> Path:
    told(capsys, 0, "key", "new", tmp_path / "owner.key")
    return tmp_path / "owner.key"


def test_no_key_is_overwritten_but_shown(owner: Path, tmp_path: Path, capsys: Capture) -> None:
    before, key = owner.read_bytes(), load_key(owner)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "node.key").symlink_to(owner)
    for where in (owner, tmp_path / "w"):  # a worker's folder stands for the key in it
        shown = told(capsys, 0, "key", "new", where).out
        assert "already" in shown
        assert shown.split()[-5:] == ["node", key.node, "public", "key", key.public_key]
    assert owner.read_bytes() == before


def test_an_owner_vouches_for_a_machine_without_going_there(owner: Path, tmp_path: Path, capsys: Capture) -> None:
    machine = SigningKey.generate()
    for name in (machine.node, machine.public_key):
        text = told(capsys, 0, "key", "vouch", name, "--owner", owner).out
        vouch = open_document(SignedDocument.model_validate_json(text), Vouch, load_key(owner).public_key)
        assert (vouch.node, vouch.owner) == (machine.node, load_key(owner).public_key)
    (tmp_path / "vouch.json").write_text(text)
    assert vouch_of(machine, None, tmp_path / "vouch.json").signed_by == vouch.owner
    with pytest.raises(UserError, match=f"vouches for node {machine.node}, but this one is"):
        vouch_of(SigningKey.generate(), None, tmp_path / "vouch.json")
    assert vouch_of(machine, None, None) is None
    signed = vouch_of(machine, owner, None)
    assert open_document(signed, Vouch, load_key(owner).public_key).node == machine.node
    with pytest.raises(UserError, match="give one of them"):
        vouch_of(machine, owner, owner)
    with pytest.raises(UserError, match="is not a vouch"):
        vouch_of(machine, None, owner)
    assert node_of(str(owner)) == load_key(owner).node
    with pytest.raises(UserError, match="neither a node id"):
        node_of("alice")
