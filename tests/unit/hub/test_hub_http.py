"""Each row of the HTTP table: its codes, its idempotency, and who is turned away with which sentence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.hub import RUN_ID, TRAINER, Bench, Owner, certificate, code_of, ok, policy, submission_body, worker_key
from shoal.protocol import Outcome, PolicyAnnouncement, ProofParameters, Registration, Severity, SigningKey
from shoal.protocol.signing import canonical_json, sign_document, sign_request
from shoal.protocol.submission import submission_digest


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("shoal.hub.settings.MAX_SUBMISSION_BYTES", 4096)
    bench = Bench(tmp_path / "hub")
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One hub for all tests that change nothing another one looks at."""
    bench = Bench(tmp_path_factory.mktemp("calm"))
    yield bench
    bench.close()


@pytest.fixture
def started(bench: Bench) -> Bench:
    ok(bench.announce(0))
    return bench


class TestIdentity:
    @pytest.mark.parametrize(("call", "body"), [
        ("POST /leases", b"{}"), ("POST /heartbeat?x=1", b"{}"), ("POST /heartbeat", b'{"doing":"x"}'),
        ("PUT /submissions/u0a0", b"{}"),
    ], ids=["path", "query", "body", "method"])  # fmt: skip
    def test_nothing_signed_can_be_changed(self, calm: Bench, call: str, body: bytes) -> None:
        headers = sign_request(calm.alice.key, RUN_ID, "POST", "/heartbeat", b"{}", calm.clock.now_ms())
        assert code_of(calm.http.request(*call.split(), content=body, headers=headers)) == (401, "auth.signature")

    def test_a_replay_is_refused_for_as_long_as_its_clock_would_pass(self, calm: Bench) -> None:
        sent_ms = calm.clock.now_ms() + 119_000
        headers = sign_request(calm.alice.key, RUN_ID, "POST", "/heartbeat", b"{}", sent_ms)
        ok(calm.http.post("/heartbeat", content=b"{}", headers=headers))
        calm.clock.advance(230)
        calm.hub.upkeep.tick()
        answer = calm.http.post("/heartbeat", content=b"{}", headers=headers)
        assert (code_of(answer), "clock" in answer.json()) == ((401, "auth.replay"), False)
        calm.clock.advance(60)
        assert code_of(calm.http.post("/heartbeat", content=b"{}", headers=headers)) == (401, "auth.skew")


OTHER_KEY = Registration(public_key=worker_key(8).public_key)
NEWER = Registration(public_key=worker_key(7).public_key, protocol_version=99)
REFUSED: list[tuple[str, str, Any, tuple[int, str]]] = [
    *(("alice", f"POST /{name}", {}, (403, "auth.role"))
      for name in ("audits", "verdicts", "policies", "batches/0", "steps")),
    ("trainer", "POST /leases", {}, (403, "auth.role")), ("validator", "POST /batches/0", {}, (403, "auth.role")),
    ("alice", "GET /batches/0/rollouts", None, (403, "auth.role")),
    ("alice", f"GET /submissions?name={'a' * 64}", None, (403, "auth.role")),
    ("alice", "POST /heartbeat", b"x" * 70_000, (413, "body.too_big")),
    ("alice", "POST /heartbeat", b"not json", (422, "body.malformed")),
    ("alice", "POST /leases", {"request": "long-enough", "max_units": 0}, (422, "body.malformed")),
    *(("alice", "POST /heartbeat", {field: {name: 1}}, (422, "body.malformed"))
      for field in ("counters", "progress") for name in ("x" * 65, "a\x1b[2J", "a\x00")),
    ("alice", "GET /nowhere", None, (404, "http.404")), ("alice", "GET /leases", None, (405, "http.405")),
    ("alice", "GET /ledger?limit=0", None, (422, "request.parameter")),
    ("trainer", "POST /batches/x", {}, (422, "request.parameter")),
    ("carol", "POST /nodes", OTHER_KEY, (401, "auth.signature")),
    ("carol", "POST /nodes", NEWER, (409, "protocol.version")),
    ("trainer", "POST /nodes", Registration(public_key=TRAINER.public_key), (409, "node.role")),
]  # fmt: skip


@pytest.mark.parametrize(("who", "call", "body", "code"), REFUSED)
def test_calls_that_are_refused_and_by_which_code(calm, who, call, body, code):
    actor = calm.actor(worker_key(7)) if who == "carol" else getattr(calm, who)
    assert code_of(actor.call(*call.split(), body)) == code


def test_a_malformed_body_names_the_field_and_names_of_64_letters_are_taken(calm):
    response = calm.alice.call("POST", "/leases", {"request": "long-enough", "max_units": 0})
    assert "max_units" in response.json()["message"]
    for field in ("counters", "progress"):
        calm.alice.beat(**{field: {"x" * 64: 1}})


def test_a_body_over_the_cap_is_refused_while_it_streams(calm):
    headers = sign_request(calm.alice.key, RUN_ID, "POST", "/heartbeat", b"", calm.clock.now_ms())
    parts = (b"x" * 10_000 for _ in range(1000))
    assert code_of(calm.http.post("/heartbeat", content=parts, headers=headers)) == (413, "body.too_big")


class TestNodes:
    @pytest.mark.parametrize("fault", ["none", "other key", "other role", "other run", "not the root"])
    def test_a_trusted_role_needs_its_certificate(self, calm: Bench, fault: str) -> None:
        key = worker_key(7)
        signed = {
            "none": None, "other key": certificate(calm.validator.key, "validator"),
            "other role": certificate(key, "trainer"), "other run": certificate(key, "validator", run="other"),
            "not the root": certificate(key, "validator", signer=key),
        }[fault]  # fmt: skip
        body = Registration(public_key=key.public_key, role="validator", certificate=signed)
        assert code_of(calm.actor(key).call("POST", "/nodes", body)) == (403, "auth.certificate")
        assert calm.stored.presence(key.node) is None, "it leaves no trace"

    def test_a_heartbeat_shows_in_the_status(self, calm: Bench) -> None:
        body = {"doing": "generating", "waiting_for": "policy 0.3 from relay", "counters": {"tokens": 5}}
        assert calm.alice.beat(**body).node.doing == "generating"
        since_ms = calm.clock.now_ms()
        calm.clock.advance(5)
        calm.alice.beat(**body, waiting_s=5.0)
        waits = {wait.who: wait for wait in calm.status().waits}
        wait = waits[f"worker alice ({calm.alice.key.node[:8]})"]
        assert (wait.what, wait.since_ms) == ("policy 0.3 from relay", since_ms)

    def test_units_and_submissions_that_wait_are_told_in_one_line_each(self, started: Bench) -> None:
        started.alice.deliver()
        started.alice.lease()
        waits = {(wait.who, wait.what) for wait in started.status().waits}
        alice = f"worker alice ({started.alice.key.node[:8]})"
        assert {("unit 1", alice), ("submission of unit 0", "a validator to take them")} <= waits


def test_a_lease_says_what_it_is_for_and_how_to_prove_it(started: Bench) -> None:
    [lease] = started.alice.lease(profile="scripted/cpu/float32")
    info = Owner(started).run_info()
    assert (lease.profile, info.profiles) == ("scripted/cpu/float32", ("torch/cpu/float32", "scripted/cpu/float32"))
    assert lease.proof == info.proof == ProofParameters(topk=128, rows=32)


class TestLeases:
    def test_a_released_unit_goes_to_the_next_with_the_same_task_and_seeds(self, started: Bench) -> None:
        (first,) = started.alice.lease()
        body = {"leases": [first.lease, "u99a0"], "reason": "stopping"}
        assert started.bob.call("POST", "/leases/release", body).status_code == 403
        for _ in range(2):
            assert started.alice.call("POST", "/leases/release", body).status_code == 204
        (second,) = started.bob.lease()
        assert (second.unit, second.task, second.seeds) == (first.unit, first.task, first.seeds)
        assert second.attempt == first.attempt + 1
        assert code_of(started.alice.submit(first)) == (410, "lease.released")

    def test_a_worker_that_was_killed_gets_its_units_again_at_once(self, started: Bench) -> None:
        answered, lost = started.alice.lease(2)
        for _ in range(2):  # its answer may be lost: asked again, it stands
            (lease,) = started.alice.lease(2, request="request-1", held=[answered.lease])
            assert (lease.unit, lease.attempt) == (lost.unit, lost.attempt + 1)
        assert started.alice.submit(answered).status_code == 201

    def test_a_worker_ends_no_lease_but_its_own(self, started: Bench) -> None:
        (lease,) = started.bob.lease()
        assert [each.unit for each in started.alice.lease(2, held=[])] == [lease.unit + 1]


class TestSubmissions:
    def test_new_then_the_same_then_another_body(self, started: Bench) -> None:
        (lease,) = started.alice.lease()
        first, again = started.alice.submit(lease), started.alice.submit(lease)
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.content == again.content, "the same receipt"
        other = submission_body(lease, engine="other")
        assert code_of(started.alice.submit(lease, other)) == (409, "submission.other_body")

    def test_malformed_bytes_are_named_and_leave_no_file(self, started: Bench) -> None:
        (lease,) = started.alice.lease()
        for body in (b"", b"not zstd", submission_body(lease)[:-3]):
            assert code_of(started.alice.submit(lease, body)) == (422, "submission.malformed")
        assert code_of(started.bob.call("PUT", "/submissions/u77a0", b"x")) == (404, "lease.unknown")
        assert list((started.folder / "blobs").iterdir()) == []
        assert started.alice.submit(lease).status_code == 201, "the lease is still good"

    def test_a_submission_that_names_something_else_is_refused_by_its_name(self, started: Bench) -> None:
        (lease,) = started.alice.lease()
        for name, other in {"run": "other", "node": "0" * 32, "lease": "u1a0", "unit": 7, "format": 9}.items():
            response = started.alice.submit(lease, submission_body(lease, **{name: other}))
            assert code_of(response) == (422, "submission.mismatch")
            assert name in response.json()["message"]
        short = lease.model_copy(update={"seeds": lease.seeds[:1]})
        assert code_of(started.alice.submit(lease, submission_body(short))) == (422, "submission.group")


class TestAuditsAndVerdicts:
    def test_an_audit_is_given_out_again_when_its_validator_died(self, started: Bench) -> None:
        [lease], [audit] = started.alice.deliver(), started.audits()
        assert audit.submission == submission_digest(submission_body(lease))
        assert started.audits(left=[audit]) == ()
        started.clock.advance(61)
        assert [again.submission for again in started.audits(left=[audit])] == [audit.submission]

    def test_a_validator_that_lost_its_audits_gets_them_again_at_once(self, started: Bench) -> None:
        started.alice.deliver(2)
        first, second = started.audits()
        ok(started.judge(first))
        assert [again.submission for again in started.audits()] == [second.submission]
        assert started.audits(left=[second]) == ()

    def test_verdicts_that_do_not_fit_are_refused_and_the_same_one_again_credits_once(self, started: Bench) -> None:
        audit = started.audit_of(started.alice)
        for changes, code in (
            ({"unit": 9}, (422, "verdict.mismatch")), ({"run": "other"}, (422, "verdict.run")),
            ({"submission": "a" * 64}, (404, "submission.unknown")),
        ):  # fmt: skip
            assert code_of(started.judge(audit, **changes)) == code
        forged = started.verdict(audit).model_copy(update={"signed_by": started.trainer.key.public_key})
        assert code_of(started.report(forged)) == (422, "verdict.signature")
        for value in ("NaN", "Infinity", 1e39):  # no usable numbers
            signed = started.verdict(audit)
            document = {**signed.document, "rewards": [{"value": value, "parts": {}}] * 2}
            signature = started.validator.key.sign(b"shoal/verdict/v1\n" + canonical_json(document))
            forged = signed.model_copy(update={"document": document, "signature": signature})
            assert code_of(started.report(forged)) == (422, "verdict.signature")
        assert started.status().submissions["auditing"] == 1
        for _ in range(3):
            assert started.judge(audit).status_code == 200
        assert code_of(started.judge(audit, outcome=Outcome.REJECTED)) == (409, "verdict.decided")
        view = started.view(started.alice)
        assert (view.accepted, view.credit) == (1, 6)

    def test_one_verdict_that_does_not_fit_does_not_hold_up_the_others(self, started: Bench) -> None:
        started.alice.deliver(2)
        first, second = started.audits()
        report = (started.verdict(first, unit=99), started.verdict(second))
        (refused,) = ok(started.report(*report)).json()["refused"]
        assert (refused["submission"], refused["code"]) == (first.submission, "verdict.mismatch")
        counts = started.status().submissions
        assert (counts["auditing"], counts["accepted"]) == (1, 1)

    def test_a_cheat_is_banned_and_its_units_go_to_others(self, started: Bench) -> None:
        first, second = started.alice.lease(2)
        ok(started.alice.submit(first))
        (audit,) = started.audits()
        changes = {"outcome": Outcome.REJECTED, "reason": "sampling.seed", "severity": Severity.CERTAIN}
        ok(started.judge(audit, message="token 3 is not the one that the seed draws", **changes))
        response = started.alice.call("POST", "/leases", {"request": "request-1"})
        assert code_of(response) == (403, "node.banned")
        assert "sampling.seed" in response.json()["message"]
        assert code_of(started.alice.submit(second)) == (403, "node.banned")
        assert [lease.unit for lease in started.bob.lease(2)] == [first.unit, second.unit]
        (recent,) = started.status().verdicts
        assert (recent.outcome, recent.reason) == ("rejected", "sampling.seed")
        assert "token 3" in recent.message
        assert started.alice.beat(waiting_for="work from the hub", waiting_s=9.0).node.state == "banned"
        assert not any("alice" in wait.who for wait in started.status().waits), "nobody waits for who is shut out"


class TestTrainer:
    def test_an_announcement_is_signed_by_the_trainer_for_this_run_and_stays(self, started: Bench) -> None:
        assert started.announce(0).status_code == 204
        assert code_of(started.announce(0, digest="ab" * 32)) == (409, "policy.digest")
        document = PolicyAnnouncement(run=RUN_ID, policy=policy(0), created_at_ms=0)
        forged = sign_document(document, SigningKey.from_seed(b"x" * 32))
        assert code_of(started.trainer.call("POST", "/policies", forged)) == (422, "policy.signature")
        other = sign_document(document.model_copy(update={"run": "other"}), started.trainer.key)
        assert code_of(started.trainer.call("POST", "/policies", other)) == (422, "policy.run")

    def test_a_batch_says_what_it_waits_for_and_then_never_changes(self, started: Bench) -> None:
        started.accept_groups(1)
        reply = ok(started.trainer.call("POST", "/batches/0", {})).json()
        assert reply["batch"] is None
        assert reply["waiting"].startswith("step 0: 1 of 2 groups")
        assert any("a batch: step 0: 1 of 2 groups" in wait.what for wait in started.status().waits)
        assert code_of(started.trainer.call("GET", "/batches/0/rollouts")) == (404, "batch.unknown")
        started.accept_groups(1)
        first, again = started.batch(0), started.batch(0)
        assert first is not None
        assert first == again
        assert not any("a batch" in wait.what for wait in started.status().waits)

    def test_a_batch_says_what_was_earned_by_everything_sampled_for_it(self, started: Bench) -> None:
        """One group of ones is dropped, two groups of halves are kept; a hub restarted in between counts the same."""
        started.alice.deliver(2)
        dropped, kept = started.audits()
        ok(started.judge(dropped, (1.0, 1.0)))
        ok(started.judge(kept, (0.0, 1.0)))
        started.restart()
        started.accept_groups(1)  # the refill
        batch = started.batch(0)
        assert (len(batch.groups), batch.dropped_groups, batch.sampled_reward) == (2, 1, (1 + 1 + 0 + 1 + 0 + 1) / 6)
        ok(started.announce(1))
        started.accept_groups(2)
        following = started.batch(1)
        assert following.sampled_reward == 0.5, "what step 0 dropped is no part of step 1"
        started.restart()
        assert started.batch(0) == batch, "once written down it never changes"

    def test_nobody_waits_for_anything_while_the_last_step_is_trained_but_its_trainer(self, started: Bench) -> None:
        for step in range(3):
            assert [lease.policy.version for lease in started.accept_groups(2)] == [step, step]
            assert [group.unit for group in started.batch(step).groups] == [2 * step, 2 * step + 1]
            if step < 2:
                ok(started.announce(step + 1))
        assert started.alice.lease() == []
        assert started.audits() == ()
        started.alice.beat(waiting_for="work from the hub")
        assert started.status().waits == ()
        started.trainer.beat(waiting_for="a publication")
        assert [wait.what for wait in started.status().waits] == ["a publication"]
        ok(started.announce(3))
        assert (started.status().finished, started.status().units["trained"]) == (True, 6)
        assert started.alice.ask(wait_s=20).finished, "a finished run answers a long poll at once"
        assert ok(started.validator.call("POST", "/audits", {"wait_s": 20})).json()["finished"]
        assert started.alice.beat().finished

    def test_steps_come_in_order_and_end_and_reports_are_shown_in_order_and_replaced(self, started: Bench) -> None:
        assert code_of(started.trainer.call("POST", "/batches/1", {})) == (409, "batch.order")
        assert code_of(started.trainer.call("POST", "/batches/3", {})) == (409, "batch.finished")
        for step, value in ((0, 0.1), (1, 0.2), (0, 0.3)):
            assert started.trainer.call("POST", "/steps", {"step": step, "metrics": {"r": value}}).status_code == 204
        assert [(report.step, report.metrics["r"]) for report in started.status().reports] == [(0, 0.3), (1, 0.2)]

    def test_what_a_report_warns_of_is_an_alarm_of_its_step(self, started: Bench) -> None:
        """Again after a resume: the same alarm, once. A report without any takes none back."""
        warned = {"step": 4, "metrics": {"r": 0.1}, "alarms": {"guard.entropy_rise": "step 4: the entropy rose again"}}
        for body in (warned, warned, {"step": 4, "metrics": {"r": 0.2}}):
            assert started.trainer.call("POST", "/steps", body).status_code == 204
        assert started.status().alarms == ("step 4: the entropy rose again",)
        assert started.status().reports[-1].alarms == {}
        endless = {**warned, "alarms": {"guard.entropy_rise": "x" * 2001}}
        assert started.trainer.call("POST", "/steps", endless).status_code == 422

    def test_a_new_incarnation_voids_leases_but_not_receipts(self, started: Bench) -> None:
        first, second = started.alice.lease(2)
        ok(started.alice.submit(first))
        ok(started.announce(0, incarnation=1))
        assert code_of(started.alice.submit(second)) == (410, "lease.void")
        (audit,) = started.audits()
        ok(started.judge(audit))
        view = started.view(started.alice)
        assert view.credit == 6, "a receipt is a promise: the work is credited although its group is void"
        assert started.status().units["void_incarnation"] == 2
        assert [lease.policy.incarnation for lease in started.bob.lease(2)] == [1, 1]
