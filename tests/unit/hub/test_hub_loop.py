"""The whole loop over HTTP: policy, lease, submission, audit, verdict, batch, next policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kit.hub import HUB, RUN_ID, TOKENS_PER_ROLLOUT, Bench, fresh_request, ok
from shoal import ledger, protocol


def test_three_steps_from_policy_to_finish(bench: Bench) -> None:
    for step in range(3):
        ok(bench.announce(step))
        leases = bench.accept_groups(2)
        assert [lease.policy.version for lease in leases] == [step, step]
        batch = bench.batch(step)
        assert batch is not None
        assert [group.unit for group in batch.groups] == [2 * step, 2 * step + 1]
        assert bench.alice.lease("nothing-left-now") == []
    ok(bench.announce(3))
    status = bench.status()
    assert status.finished
    assert status.units["trained"] == 6
    reply = ok(bench.alice.call("POST", "/leases", {"request": "after-the-end", "wait_s": 20})).json()
    assert reply["finished"] is True, "a finished run answers a long poll at once"
    assert ok(bench.validator.call("POST", "/audits", {"wait_s": 20})).json()["finished"] is True
    assert ok(bench.alice.call("POST", "/heartbeat", {})).json()["finished"] is True


def test_the_trainer_gets_the_rollouts_with_the_validators_rewards(bench: Bench) -> None:
    ok(bench.announce(0))
    leases = bench.accept_groups(2)
    assert bench.batch(0) is not None
    body = ok(bench.trainer.call("GET", "/batches/0/rollouts")).content
    batch = protocol.unpack(body, protocol.TrainingBatch, protocol.BodyLimits())
    assert [group.unit for group in batch.groups] == [0, 1]
    for group, lease in zip(batch.groups, leases, strict=True):
        assert group.task == lease.task
        assert tuple(group.prompt_ids) == lease.prompt_ids
        assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0]
        np.testing.assert_array_equal(group.rollouts[0].token_ids, range(TOKENS_PER_ROLLOUT))


def test_a_batch_says_what_was_earned_by_everything_sampled_for_it(tmp_path: Path) -> None:
    """One group of ones is dropped, two groups of halves are kept; a hub restarted in between counts the same."""
    bench = Bench(tmp_path / "hub")
    ok(bench.announce(0))
    for lease in bench.alice.lease(fresh_request(), 2):
        ok(bench.alice.submit(lease))
    dropped, kept = bench.audits()
    ok(bench.judge(dropped, (1.0, 1.0)))
    ok(bench.judge(kept, (0.0, 1.0)))
    bench = bench.restarted()
    bench.accept_groups(1)  # the refill
    batch = bench.batch(0)
    assert batch is not None
    assert (len(batch.groups), batch.dropped_groups, batch.sampled_reward) == (2, 1, (1 + 1 + 0 + 1 + 0 + 1) / 6)
    ok(bench.announce(1))
    bench.accept_groups(2)
    following = bench.batch(1)
    assert following is not None
    assert following.sampled_reward == 0.5, "what step 0 dropped is no part of step 1"
    bench = bench.restarted()
    assert bench.batch(0) == batch, "once written down it never changes"
    bench.close()


def test_the_ledger_records_the_run_and_accounts_for_every_credit(bench: Bench) -> None:
    ok(bench.announce(0))
    bench.accept_groups(2)
    bench.batch(0)
    page = protocol.LedgerPage.model_validate_json(ok(bench.http.get("/ledger?limit=1000")).content)
    ledger.verify(page.entries, page.head)
    kinds = [entry.kind for entry in page.entries]
    assert kinds == ["run", "node", "node", "policy", "node", "credit", "credit", "batch"]
    roles = [entry.body["role"] for entry in page.entries if entry.kind == "node"]
    assert roles == ["trainer", "validator", "worker"], "bob, who had nothing accepted, has no row"
    accounts = ledger.fold(page.entries)
    assert accounts.by_node[bench.alice.key.node].credit == 2 * 2 * TOKENS_PER_ROLLOUT
    views = {view.node: view for view in bench.status().nodes}
    assert views[bench.alice.key.node].credit == accounts.by_node[bench.alice.key.node].credit


def test_a_receipt_is_signed_by_the_hub_and_names_what_it_is_for(bench: Bench) -> None:
    ok(bench.announce(0))
    (lease,) = bench.alice.lease("one-unit-please")
    response = bench.alice.submit(lease)
    assert response.status_code == 201
    receipt = protocol.open_document(
        protocol.SignedDocument.model_validate_json(response.content), protocol.Receipt, HUB.public_key
    )
    assert (receipt.run, receipt.node, receipt.lease, receipt.unit) == (RUN_ID, lease.node, lease.lease, lease.unit)
    answer = ok(bench.validator.call("GET", f"/submissions?name={receipt.submission}")).content
    (body,) = protocol.unpack(answer, protocol.SubmissionBodies, protocol.BodyLimits()).bodies
    assert len(body) == receipt.size_bytes


def test_run_info_is_signed_and_complete(bench: Bench) -> None:
    signed = protocol.SignedDocument.model_validate_json(ok(bench.http.get("/run")).content)
    info = protocol.open_document(signed, protocol.RunInfo, HUB.public_key)
    assert (info.run, info.environment, info.group_size) == (RUN_ID, "fake", 2)
    assert len(info.certificates) == 3
