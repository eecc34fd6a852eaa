"""The owner's orders: who may give them, what they do to a running hub, and that the ledger keeps them."""

from __future__ import annotations

import pytest

from kit.hub import ADMIN, ROOT, TRAINER, VALIDATOR, Bench, Owner, certificate, code_of, fresh_request, ok, worker_key
from shoal.errors import LedgerError
from shoal.ledger import fold, open_order, verify
from shoal.protocol import LeaseReply, LedgerPage, NodeState, RunStatus, SigningKey

ALICE = worker_key(1).node


@pytest.fixture
def owner(bench: Bench) -> Owner:
    return Owner(bench)


def ledger(bench: Bench) -> LedgerPage:
    return LedgerPage.model_validate_json(ok(bench.http.get("/ledger", params={"limit": 1000})).content)


def status(bench: Bench) -> RunStatus:
    return RunStatus.model_validate_json(ok(bench.http.get("/status", headers={"shoal-protocol": "2"})).content)


def asked(bench: Bench) -> LeaseReply:
    response = bench.alice.call("POST", "/leases", {"request": fresh_request(), "max_units": 1})
    return LeaseReply.model_validate_json(ok(response).content)


# ── pause, drain, resume ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_paused_run_gives_out_nothing_and_says_why(bench: Bench, owner: Owner) -> None:
    ok(bench.announce(0))
    reply = owner.order("pause", reason="power cut")
    assert (reply.changed, reply.message) == (True, "the run is paused")
    refused = asked(bench)
    assert not refused.leases
    assert "paused the run (0 s ago): power cut" in refused.waiting
    assert status(bench).standing.conduct == "paused"
    assert any("paused the run" in wait.what for wait in status(bench).waits)
    owner.order("resume")
    assert len(asked(bench).leases) == 1


def test_a_drained_run_trains_on_what_there_is_and_waits_with_the_rest(bench: Bench, owner: Owner) -> None:
    ok(bench.announce(0))
    leases = bench.alice.lease(fresh_request(), 2)
    owner.order("drain", reason="moving house")
    assert not asked(bench).leases
    assert not status(bench).standing.drained
    for lease in leases:
        ok(bench.alice.submit(lease))
    for audit in bench.audits():
        ok(bench.judge(audit))
    assert bench.batch(0) is not None  # the step that was filled goes on
    ok(bench.announce(1))
    assert bench.batch(1) is None  # the next one waits: it is not trained on less
    assert not asked(bench).leases
    assert status(bench).standing.drained
    [wait] = [wait.what for wait in status(bench).waits if "step 1" in wait.what]
    assert "no worker is asking" not in wait
    assert "0 of 2 groups; the run's owner lets the run drain" in wait


# ── who may ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_the_owner_gives_orders(bench: Bench, owner: Owner) -> None:
    stranger = SigningKey.from_seed(b"x" * 32)
    assert code_of(owner.post(owner.request("pause", key=stranger))) == (403, "admin.signature")
    own = owner.request("pause", key=stranger)
    own = own.model_copy(update={"certificate": certificate(stranger, "admin", signer=stranger)})
    assert code_of(owner.post(own)) == (403, "admin.signature")
    validator = own.model_copy(update={"certificate": certificate(stranger, "validator")})
    assert code_of(owner.post(validator)) == (403, "admin.signature")
    other = own.model_copy(update={"certificate": certificate(stranger, "admin", run="other-000000000000")})
    assert code_of(owner.post(other)) == (403, "admin.signature")
    assert code_of(owner.post(owner.request("pause", run="other-000000000000"))) == (403, "admin.signature")
    assert status(bench).standing.conduct == "running"
    assert owner.order("pause", key=ROOT).changed


def test_an_order_is_carried_out_once_and_only_now(bench: Bench, owner: Owner) -> None:
    pause = owner.request("pause")
    ok(owner.post(pause))
    owner.order("resume")
    answer = ok(owner.post(pause)).json()
    assert answer == {"changed": False, "message": "this very order was carried out before"}
    assert status(bench).standing.conduct == "running"
    bench.clock.advance(1000)
    owner.order("drain")  # by now the hub has forgotten the first one
    assert code_of(owner.post(pause)) == (401, "admin.skew")
    late = owner.request("pause", issued_at_ms=bench.clock.now_ms() + 121_000)
    assert code_of(owner.post(late)) == (401, "admin.skew")


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sanctions_by_order(bench: Bench, owner: Owner) -> None:
    ok(bench.announce(0))
    bench.alice.lease(fresh_request())
    owner.order("ban", target=ALICE, reason="a bot")
    response = bench.alice.call("POST", "/leases", {"request": fresh_request(), "max_units": 1})
    assert code_of(response) == (403, "node.banned")
    assert status(bench).units["open"] == 1  # its lease goes to others
    owner.order("pardon", target=ALICE, reason="a misunderstanding")
    assert len(asked(bench).leases) == 1
    owner.order("suspend", target=ALICE, for_s=120, reason="be slower")
    assert "suspended for 120 s more: be slower" in asked(bench).waiting
    [view] = [node for node in status(bench).nodes if node.node == ALICE]
    assert (view.state, view.suspensions) == (NodeState.SUSPENDED, 1)


@pytest.mark.parametrize("verb", ["ban", "suspend"])
def test_whom_the_root_vouches_for_is_revoked_not_sanctioned(bench: Bench, owner: Owner, verb: str) -> None:
    refused = owner.post(owner.request(verb, target=VALIDATOR.node))
    assert code_of(refused) == (409, "admin.role")
    assert f"shoal admin revoke RUN {VALIDATOR.public_key}" in refused.text
    assert code_of(owner.post(owner.request(verb, target=TRAINER.node))) == (409, "admin.role")
    assert {node.state for node in status(bench).nodes} == {NodeState.ACTIVE}


def test_a_banned_node_keeps_the_name_that_it_was_banned_under(bench: Bench, owner: Owner) -> None:
    owner.order("ban", target=ALICE)
    again = ok(bench.alice.register(name="somebody else")).json()
    assert (again["name"], again["state"]) == ("alice", "banned")
    assert [node.name for node in status(bench).nodes if node.node == ALICE] == ["alice"]


# ── relays and keys ──────────────────────────────────────────────────────────────────────────────────────────────


def test_relays_come_and_go(bench: Bench, owner: Owner) -> None:
    assert owner.order("add-relay", target="http://relay:8472/").changed
    assert owner.run_info().sources == ("http://127.0.0.1:1", "http://relay:8472")
    assert not owner.order("add-relay", target="http://relay:8472").changed
    assert owner.order("remove-relay", target="http://127.0.0.1:1").changed
    assert owner.run_info().sources == ("http://relay:8472",)
    assert code_of(owner.post(owner.request("remove-relay", target="http://relay:8472"))) == (409, "admin.last_source")
    assert owner.order("add-relay", target="http://127.0.0.1:1").changed
    assert set(owner.run_info().sources) == {"http://127.0.0.1:1", "http://relay:8472"}
    assert code_of(owner.post(owner.request("add-relay", target="ftp://relay"))) == (422, "admin.relay")


def test_a_validator_is_added_and_its_key_revoked(bench: Bench, owner: Owner) -> None:
    key = SigningKey.from_seed(b"w" * 32)
    signed = certificate(key, "validator")
    assert owner.order("certify", certificates=(signed,)).changed
    assert signed in owner.run_info().certificates
    second = bench.actor(key)
    ok(second.register("validator"))
    ok(second.call("POST", "/audits", {"max_audits": 1}))
    assert owner.order("revoke", target=key.public_key).changed
    assert signed not in owner.run_info().certificates
    assert owner.run_info().revoked == (key.public_key,)
    assert code_of(second.call("POST", "/audits", {"max_audits": 1})) == (403, "node.banned")
    assert code_of(second.register("validator")) == (403, "auth.revoked")
    assert code_of(owner.post(owner.request("certify", certificates=(signed,)))) == (409, "admin.revoked")


def test_what_cannot_be_revoked(bench: Bench, owner: Owner) -> None:
    codes = {
        ROOT.public_key: (409, "admin.root"),
        bench.hub.context.config.key.public_key: (409, "admin.in_use"),
        TRAINER.public_key: (409, "admin.trainer"),
        "0c" * 32: (403, "admin.root_needed"),
        "no key": (422, "admin.key"),
    }
    for target, code in codes.items():
        assert code_of(owner.post(owner.request("revoke", target=target))) == code


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_order_that_changed_something_is_in_the_ledger_as_it_was_signed(bench: Bench, owner: Owner) -> None:
    owner.order("pause", reason="why not")
    owner.order("ban", target=ALICE)
    owner.order("add-relay", key=ROOT, target="http://relay:8472")
    page = ledger(bench)
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


def test_certificates_are_the_roots_alone(bench: Bench, owner: Owner) -> None:
    key = SigningKey.from_seed(b"w" * 32)
    forged = certificate(key, "validator", signer=ADMIN)
    assert code_of(owner.post(owner.request("certify", certificates=(forged,)))) == (422, "admin.certificate")
    trainer = certificate(key, "trainer")
    assert code_of(owner.post(owner.request("certify", certificates=(trainer,)))) == (409, "admin.trainer")
    assert code_of(owner.post(owner.request("certify"))) == (422, "admin.certificate")


def test_orders_about_nobody_are_refused(bench: Bench, owner: Owner) -> None:
    assert code_of(owner.post(owner.request("ban", target="f" * 32))) == (404, "node.unknown")
