"""The owner's orders: who may give them, what they do to a running hub, and that the ledger keeps them."""

from pathlib import Path
from typing import Any

import pytest

from kit import hub as kit
from kit.hub import ADMIN, ROOT, TRAINER, VALIDATOR, Bench, Owner, certificate, code_of, ok
from shoal.errors import LedgerError
from shoal.ledger import fold, open_order, verify
from shoal.protocol import ModelSize, NodeState, SigningKey
from shoal.runtime.sizing import RunSize, derive

ALICE = kit.worker_key(1).node
KEY = SigningKey.from_seed(b"w" * 32)
REFUSED: list[tuple[str, dict[str, Any], tuple[int, str]]] = [
    ("ban", {"target": "f" * 32}, (404, "node.unknown")),
    *((verb, {"target": key.node}, (409, "admin.role")) for verb in ("ban", "suspend") for key in (VALIDATOR, TRAINER)),
    ("revoke", {"target": ROOT.public_key}, (409, "admin.root")),
    ("revoke", {"target": kit.HUB.public_key}, (409, "admin.in_use")),
    ("revoke", {"target": TRAINER.public_key}, (409, "admin.trainer")),
    ("revoke", {"target": "0c" * 32}, (403, "admin.root_needed")),
    ("revoke", {"target": "no key"}, (422, "admin.key")),
    ("remove-relay", {"target": "http://127.0.0.1:1"}, (409, "admin.last_source")),
    ("add-relay", {"target": "ftp://relay"}, (422, "admin.relay")),
    ("certify", {"certificates": (certificate(KEY, "validator", signer=ADMIN),)}, (422, "admin.certificate")),
    ("certify", {"certificates": (certificate(KEY, "trainer"),)}, (409, "admin.trainer")),
    ("certify", {}, (422, "admin.certificate")),
]


@pytest.mark.hub
def test_a_paused_run_gives_out_nothing_and_says_why(bench: Bench, owner: Owner) -> None:
    reply = owner.order("pause", reason="power cut")
    assert (reply.changed, reply.message) == (True, "the run is paused")
    refused = bench.alice.ask()
    assert not refused.leases
    assert "paused the run (0 s ago): power cut" in refused.waiting
    assert bench.status().standing.conduct == "paused"
    assert any("paused the run" in wait.what for wait in bench.status().waits)
    owner.order("resume")
    assert len(bench.alice.ask().leases) == 1


@pytest.mark.hub
def test_a_drained_run_trains_on_what_there_is_and_waits_with_the_rest(bench: Bench, owner: Owner) -> None:
    leases = bench.alice.lease(2)
    owner.order("drain", reason="moving house")
    assert not bench.alice.ask().leases
    assert not bench.status().standing.drained
    for lease in leases:
        ok(bench.alice.submit(lease))
    bench.accept()
    assert bench.batch(0) is not None  # the step that was filled goes on
    ok(bench.announce(1))
    assert bench.batch(1) is None  # the next one waits: it is not trained on less
    assert not bench.alice.ask().leases
    assert bench.status().standing.drained
    [wait] = [wait.what for wait in bench.status().waits if "step 1" in wait.what]
    assert "no worker is asking" not in wait
    assert "0 of 2 groups; the run's owner lets the run drain" in wait


def test_only_the_owner_gives_orders(bench: Bench, owner: Owner) -> None:
    stranger = SigningKey.from_seed(b"x" * 32)
    own, other = owner.request("pause", key=stranger), {"run": "other-000000000000"}
    admins = (certificate(stranger, "admin", **by) for by in ({"signer": stranger}, other))
    forged = [own.model_copy(update={"certificate": each}) for each in (*admins, certificate(stranger, "validator"))]
    for request in (own, *forged, owner.request("pause", **other)):
        assert code_of(owner.post(request)) == (403, "admin.signature")
    assert bench.status().standing.conduct == "running"
    assert owner.order("pause", key=ROOT).changed


def test_an_order_is_carried_out_once_and_only_now(bench: Bench, owner: Owner) -> None:
    pause = owner.request("pause")
    ok(owner.post(pause))
    owner.order("resume")
    answer = ok(owner.post(pause)).json()
    assert answer == {"changed": False, "message": "this very order was carried out before"}
    assert bench.status().standing.conduct == "running"
    bench.clock.advance(1000)
    owner.order("drain")  # by now the hub has forgotten the first one
    assert code_of(owner.post(pause)) == (401, "admin.skew")
    late = owner.request("pause", issued_at_ms=bench.clock.now_ms() + 121_000)
    assert code_of(owner.post(late)) == (401, "admin.skew")


@pytest.mark.hub
def test_sanctions_by_order_and_a_banned_node_keeps_its_name(bench: Bench, owner: Owner) -> None:
    bench.alice.lease()
    owner.order("ban", target=ALICE, reason="a bot")
    assert code_of(bench.alice.call("POST", "/leases", {"request": "request-1"})) == (403, "node.banned")
    assert bench.status().units["open"] == 1  # its lease goes to others
    again = ok(bench.alice.register(name="somebody else")).json()
    assert (again["name"], again["state"]) == ("alice", "banned")
    assert bench.view(bench.alice).name == "alice"
    owner.order("pardon", target=ALICE, reason="a misunderstanding")
    assert len(bench.alice.ask().leases) == 1
    owner.order("suspend", target=ALICE, for_s=120, reason="be slower")
    assert "suspended for 120 s more: be slower" in bench.alice.ask().waiting
    view = bench.view(bench.alice)
    assert (view.state, view.suspensions) == (NodeState.SUSPENDED, 1)


def test_orders_that_are_refused_change_nothing(bench: Bench, owner: Owner) -> None:
    """Whom the root vouches for is revoked, not sanctioned."""
    for verb, fields, code in REFUSED:
        assert code_of(owner.post(owner.request(verb, **fields))) == code, (verb, fields)
    assert {node.state for node in bench.status().nodes} == {NodeState.ACTIVE}
    assert not any(entry.kind == "admin" for entry in bench.ledger().entries)


def test_relays_come_and_go(bench: Bench, owner: Owner) -> None:
    assert owner.order("add-relay", target="http://relay:8472/").changed
    assert owner.run_info().sources == ("http://127.0.0.1:1", "http://relay:8472")
    assert not owner.order("add-relay", target="http://relay:8472").changed
    assert owner.order("remove-relay", target="http://127.0.0.1:1").changed
    assert owner.run_info().sources == ("http://relay:8472",)
    assert owner.order("add-relay", target="http://127.0.0.1:1").changed
    assert set(owner.run_info().sources) == {"http://127.0.0.1:1", "http://relay:8472"}


def test_every_role_derives_its_waits_from_the_slowest_link(tmp_path: Path) -> None:
    size = ModelSize(parameters=32 * 10**9, payload_bytes=64 * 10**9)
    bench = Bench(tmp_path, settings={"link_mbit": 50}, changes={"model": size})
    told = derive(RunSize.of(Owner(bench).run_info()))
    assert told.policy_wait_s == 202_790.0  # as in unit/runtime/test_limits.py
    assert bench.hub.context.rules.audit_ms == 1000 * told.audit_s


def test_a_validator_is_added_and_its_key_revoked(bench: Bench, owner: Owner) -> None:
    signed = certificate(KEY, "validator")
    assert owner.order("certify", certificates=(signed,)).changed
    assert signed in owner.run_info().certificates
    second = bench.actor(KEY)
    ok(second.register("validator"))
    ok(second.call("POST", "/audits", {"max_audits": 1}))
    assert owner.order("revoke", target=KEY.public_key).changed
    assert signed not in owner.run_info().certificates
    assert owner.run_info().revoked == (KEY.public_key,)
    assert code_of(second.call("POST", "/audits", {"max_audits": 1})) == (403, "node.banned")
    assert code_of(second.register("validator")) == (403, "auth.revoked")
    assert code_of(owner.post(owner.request("certify", certificates=(signed,)))) == (409, "admin.revoked")


def test_every_order_that_changed_something_is_in_the_ledger_as_it_was_signed(bench: Bench, owner: Owner) -> None:
    owner.order("pause", reason="why not")
    owner.order("ban", target=ALICE)
    owner.order("add-relay", key=ROOT, target="http://relay:8472")
    page = bench.ledger()
    verify(page.entries, page.head)
    orders = [entry for entry in page.entries if entry.kind == "admin"]
    assert [entry.body["verb"] for entry in orders] == ["pause", "ban", "add-relay"]
    assert [entry.body["by"] for entry in orders] == [ADMIN.node, ADMIN.node, "root"]
    for entry in orders:
        assert open_order(entry.body, bench.alice.run, ROOT.public_key).verb == entry.body["verb"]
    assert ALICE not in fold(page.entries).by_node, "she had nothing accepted: the order alone tells of her"
    changed = {**orders[0].body, "order": orders[1].body["order"] | {"certificate": None}}
    with pytest.raises(LedgerError, match="does not hold"):
        open_order(changed, bench.alice.run, ROOT.public_key)
