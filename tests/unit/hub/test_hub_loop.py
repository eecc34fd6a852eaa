"""The whole loop over HTTP: policy, lease, submission, audit, verdict, batch, next policy."""

import pytest

from kit.hub import Bench, ok


def test_three_steps_from_policy_to_finish(bench: Bench) -> None:
    for step in range(3):
        ok(bench.announce(step))
        leases = bench.accept_groups(2)
        assert [lease.policy.version for lease in leases] == [step, step]
        batch = bench.batch(step)
        assert [group.unit for group in batch.groups] == [2 * step, 2 * step + 1]
        assert bench.alice.lease() == []
    ok(bench.announce(3))
    status = bench.status()
    assert status.finished
    assert status.units["trained"] == 6
    assert bench.alice.ask(wait_s=20).finished, "a finished run answers a long poll at once"
    assert ok(bench.validator.call("POST", "/audits", {"wait_s": 20})).json()["finished"] is True
    assert bench.alice.beat().finished


@pytest.mark.hub
def test_a_batch_says_what_was_earned_by_everything_sampled_for_it(bench: Bench) -> None:
    """One group of ones is dropped, two groups of halves are kept; a hub restarted in between counts the same."""
    bench.alice.deliver(2)
    dropped, kept = bench.audits()
    ok(bench.judge(dropped, (1.0, 1.0)))
    ok(bench.judge(kept, (0.0, 1.0)))
    bench.restart()
    bench.accept_groups(1)  # the refill
    batch = bench.batch(0)
    assert (len(batch.groups), batch.dropped_groups, batch.sampled_reward) == (2, 1, (1 + 1 + 0 + 1 + 0 + 1) / 6)
    ok(bench.announce(1))
    bench.accept_groups(2)
    following = bench.batch(1)
    assert following.sampled_reward == 0.5, "what step 0 dropped is no part of step 1"
    bench.restart()
    assert bench.batch(0) == batch, "once written down it never changes"
