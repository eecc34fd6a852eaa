"""Trusted workers: whose certificate is believed, what light audits are worth, and what one failed sample costs.

A cheat passes 1/0.05 - 1 = 19 times on average before it is sampled, and 0.95^90 = 1 % of all cheats last longer than
90 groups. What was trained on by then stays; everything else is taken back, and nothing of it was ever paid.
"""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.hub import HUB, ROOT, RUN_ID, Actor, Bench, Owner, certificate, code_of, make_config, ok, worker_key
from kit.state import node, submission, verdict
from shoal import protocol
from shoal.hub.state import draws, reputation
from shoal.protocol import NodeState, Outcome, Severity, SignedDocument

TRUSTED = worker_key(9)
LIGHT, FULL = 0.05, 0.049  # draws on both sides of hub.trusted_audit
FAILED = {"outcome": Outcome.REJECTED, "reason": "sampling.seed", "rewards": (), "generated_tokens": 0}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "hub", {"groups_per_step": 8, "max_staleness": 1})
    ok(bench.announce(0))
    yield bench
    bench.close()


def trusted(bench: Bench, **terms: int) -> Actor:
    actor = bench.actor(TRUSTED)
    ok(actor.register("trusted", "box", certificate=certificate(TRUSTED, "trusted", **terms)))
    return actor


def draw(monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    monkeypatch.setattr(draws, "audit_fraction", lambda *_: fraction)


def with_later_end(bench: Bench) -> SignedDocument:
    signed = certificate(TRUSTED, "trusted", expires_at_ms=bench.clock.now_ms())
    return signed.model_copy(update={"document": {**signed.document, "expires_at_ms": 2**52}})


def without_end(_: Bench) -> SignedDocument:
    fields = {"run": RUN_ID, "role": "trusted", "public_key": TRUSTED.public_key, "issued_at_ms": 0}
    return protocol.sign_document(protocol.RoleCertificate(**fields), ROOT)


def vouch(_: Bench) -> SignedDocument:
    return protocol.sign_document(protocol.Vouch(owner=ROOT.public_key, node=TRUSTED.node, issued_at_ms=0), ROOT)


NOT_BELIEVED: dict[str, tuple[Callable[[Bench], SignedDocument | None], str, str]] = {
    "none": (lambda _: None, "auth.certificate", "needs the root key's certificate"),
    "expired": (lambda bench: certificate(TRUSTED, "trusted", expires_at_ms=bench.clock.now_ms()),
        "certificate.expired", "its certificate ended 0 s ago: ask the run's owner for another"),
    "a later end": (with_later_end, "auth.certificate", "the signature does not match"),
    "no end": (without_end, "auth.certificate", "must say when it ends"),
    "forged": (lambda _: certificate(TRUSTED, "trusted", signer=TRUSTED), "auth.certificate", "not trusted for it"),
    "by the hub": (lambda _: certificate(TRUSTED, "trusted", signer=HUB), "auth.certificate", "not trusted for it"),
    "other run": (lambda _: certificate(TRUSTED, "trusted", run="other"), "auth.certificate", "for another run"),
    "other key": (lambda _: certificate(worker_key(1), "trusted"), "auth.certificate", "for another run, role or key"),
    "other role": (lambda _: certificate(TRUSTED, "validator"), "auth.certificate", "for another run, role or key"),
    "vouch": (vouch, "auth.certificate", "expected a signed role-certificate, got a vouch"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_BELIEVED)
def test_certificate_that_does_not_hold_is_refused_with_the_reason(bench: Bench, case: str) -> None:
    make, code, reason = NOT_BELIEVED[case]
    answer = bench.actor(TRUSTED).register("trusted", certificate=make(bench))
    assert (code_of(answer), reason in answer.json()["message"]) == ((403, code), True), answer.text
    assert bench.stored.node(TRUSTED.node) is None


def test_revoked_key_is_refused_and_what_it_did_is_given_out_again(bench, monkeypatch) -> None:
    draw(monkeypatch, LIGHT)
    worker = trusted(bench)
    worker.deliver(3)
    for audit in bench.audits(2):
        ok(bench.judge(audit, depth="light"))
    assert bench.status().units["accepted"] == 2
    assert code_of(Owner(bench).post(Owner(bench).request("ban", target=TRUSTED.node))) == (409, "admin.role")
    Owner(bench).order("revoke", ROOT, target=TRUSTED.public_key)
    assert (bench.status().units["open"], bench.status().submissions["pulled"]) == (2, 2)
    assert [audit.depth for audit in bench.audits()] == ["full"]
    assert code_of(worker.call("POST", "/leases", {"request": "request-x"})) == (403, "node.banned")
    assert code_of(worker.register("trusted")) == (403, "auth.revoked")


def test_certificate_that_ends_during_the_run_ends_every_call_until_there_is_another(bench: Bench) -> None:
    worker = trusted(bench, expires_at_ms=bench.clock.now_ms() + 30_000)
    (lease,) = worker.lease()
    bench.clock.advance(29)
    worker.beat()
    bench.clock.advance(1)
    refused = (403, "certificate.expired")
    assert code_of(worker.call("POST", "/heartbeat", {})) == refused
    assert code_of(worker.call("POST", "/leases", {"request": "request-x"})) == refused
    assert code_of(worker.submit(lease)) == refused
    trusted(bench)
    assert worker.submit(lease).status_code == 201


def test_light_audit_earns_nothing_and_is_marked_and_a_full_one_earns(bench, monkeypatch) -> None:
    worker, earned = trusted(bench), []
    for fraction in (LIGHT, FULL):
        draw(monkeypatch, fraction)
        worker.deliver()
        (audit,) = bench.audits()
        assert (audit.trusted, audit.newcomer) == (False, False)
        ok(bench.judge(audit, depth=audit.depth))
        earned.append((audit.depth, bench.view(worker).credit))
    assert earned == [("light", 0), ("full", 6)]
    worker.deliver(6)
    bench.accept()
    batch = bench.batch(0)
    assert batch is not None
    assert [group.audit for group in batch.groups] == ["light"] + ["full"] * 7
    entries = bench.ledger().entries
    assert [entry.body["unaudited"] for entry in entries if entry.kind == "batch"] == [[0]]
    assert [entry.body["unit"] for entry in entries if entry.kind == "credit"] == [1, *range(2, 8)]
    (row,) = [entry for entry in entries if entry.body.get("role") == "trusted"]
    assert row.body["certificate"]["document"]["public_key"] == TRUSTED.public_key


@pytest.mark.parametrize("severity", [Severity.CERTAIN, Severity.STATISTICAL])
def test_one_failed_sample_revokes_and_pulls_all_that_is_in_no_batch(bench, monkeypatch, severity) -> None:
    worker = trusted(bench)
    for fraction in (LIGHT, LIGHT, FULL):
        draw(monkeypatch, fraction)
        worker.deliver()
        (audit,) = bench.audits()
        ok(bench.judge(audit, depth=audit.depth))
    worker.deliver()  # unit 3 is sampled and fails; 4 waits for a light audit, 5 is in one
    draw(monkeypatch, LIGHT)
    worker.deliver(2)
    worker.lease()  # unit 6 is being generated
    failing, under_way = bench.audits(2)
    ok(bench.judge(failing, severity=severity, **FAILED))
    row = bench.row(worker)
    assert (row.state, row.reason) == (NodeState.BANNED, "its certificate is revoked, sampling.seed")
    units = bench.status().units
    assert (units["open"], units["void"], units["submitted"]) == (4, 1, 2), "0, 1, 3, 6; 2 is paid; 4, 5"
    (pulled,) = [entry.body for entry in bench.ledger().entries if entry.kind == "pulled"]
    assert (pulled["units"], pulled["unpaid"]) == ([0, 1], [0, 1])
    assert any(f"worker box ({TRUSTED.node[:8]}) failed an audit" in alarm for alarm in bench.status().alarms)
    assert code_of(bench.judge(under_way, depth="light")) == (422, "verdict.depth")
    bench.accept(depth="full")
    assert (bench.view(worker).credit, bench.status().units["accepted"]) == (18, 0), "judged and paid, not trained on"
    again = bench.alice.lease(4)
    assert [lease.unit for lease in again] == [0, 1, 3, 6]
    assert ok(worker.register("trusted")).json()["state"] == "banned"
    assert code_of(Owner(bench).post(Owner(bench).request("pardon", target=TRUSTED.node))) == (409, "admin.role")


def test_trusted_worker_is_no_newcomer_and_unsure_samples_are_followed_by_full_audits(bench: Bench) -> None:
    worker, rules = trusted(bench), bench.hub.context.rules
    assert len(worker.lease(64)) == 16, "a quarter of hub.leases_per_node at once"
    assert bench.stored.newcomers_in_hand("").networks == {}
    row = node(9, role="trusted", passed=0)
    assert (row.unproven, row.on_probation) == (False, False)
    assert reputation.full_audit_probability(rules, row) == 0.05
    of, passed = submission(0), 0
    row = reputation.unsure(row, verdict(of, outcome=Outcome.UNSURE), own_fault=True)
    while reputation.full_audit_probability(rules, row) == 1:
        row, passed = reputation.passed(row, verdict(of)), passed + 1
    assert passed == 63, "1 - 1/64 at first, then 1/64 less with each"


def test_cheat_is_sampled_after_20_groups_on_average_and_one_in_a_hundred_after_more_than_90() -> None:
    """The hub's own draws under 2,000 secrets, within three standard deviations: of the mean 19.5/sqrt(2000) = 0.44, of
    a count of 2000 x 0.95^90 = 19.8 about 4.4."""
    rules, row = make_config(Path()).rules, node(9, role="trusted")

    def lasts(secret: bytes) -> int:
        return next(
            group
            for group in range(1, 10_000)
            if reputation.depth_for(rules, row, draws.audit_fraction(secret, f"{group:064x}")) == "full"
        )

    lasted = [lasts(f"secret-{number}".encode()) for number in range(2_000)]
    assert 18.7 < statistics.mean(lasted) < 21.3
    assert 6 < sum(groups > 90 for groups in lasted) < 34


@pytest.mark.parametrize("seed", range(4))
def test_cheat_that_is_sampled_leaves_nothing_that_is_not_trained_on(tmp_path: Path, seed: int) -> None:
    (tmp_path / "hub").mkdir(mode=0o700)
    (tmp_path / "hub" / "secret").write_text(f"{seed:064x}")
    bench = Bench(tmp_path / "hub", {"groups_per_step": 4, "max_staleness": 1, "steps": 999})
    ok(bench.announce(0))
    worker, trained, cheated = trusted(bench), set[int](), 0
    while bench.row(worker).state is NodeState.ACTIVE:
        worker.deliver()
        cheated += 1
        (audit,) = bench.audits()
        found = {"severity": Severity.CERTAIN, **FAILED} if audit.depth == "full" else {"depth": "light"}
        ok(bench.judge(audit, **found))
        if (batch := bench.batch(step := len(trained) // 4)) is not None:
            trained |= {group.unit for group in batch.groups}
            ok(bench.announce(step + 1))
    units = bench.status().units
    assert len(trained) == 4 * ((cheated - 1) // 4), "what was in a batch before"
    assert (units["accepted"], units["open"]) == (len(trained) % 4, cheated - len(trained))
    assert bench.view(worker).credit == 0
    bench.close()


def test_key_of_a_worker_is_no_trusted_one_and_the_reverse(bench: Bench) -> None:
    answer = bench.alice.register("trusted")
    assert code_of(answer) == (409, "node.role")
    assert "use another key to take part as trusted worker" in answer.json()["message"]
    worker = trusted(bench)
    assert code_of(worker.register("worker")) == (409, "node.role")
    assert code_of(worker.call("POST", "/audits", {"max_audits": 1})) == (403, "auth.role")
