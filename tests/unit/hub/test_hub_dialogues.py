"""Runs whose environment answers the model: what leases say of it, and who gets none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kit import hub as hubkit
from kit.hub import Bench, FakeEnvironment, fresh_request, ok
from shoal.environments import DialogueRule, Task
from shoal.protocol.batch import TrainingBatch
from shoal.protocol.codec import BodyLimits, pack, unpack
from shoal.protocol.lease import Lease
from shoal.protocol.submission import Rollout, Submission, pack_logprobs, pack_spans, pack_tokens


class Talking(FakeEnvironment):
    """Answers in tasks of even number."""

    def dialogue(self, task: Task) -> DialogueRule | None:
        return DialogueRule("calculator", 3) if int(task.id.rpartition("-")[2]) % 2 == 0 else None


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    plain = hubkit.make_config
    monkeypatch.setattr(
        hubkit, "make_config", lambda *a, **k: replace(plain(*a, **k), environment=Talking(), frame=((7, 8), (9,)))
    )
    bench = Bench(tmp_path / "hub", run={"groups_per_step": 8})
    bench.announce(0)
    yield bench
    bench.close()


def test_a_lease_says_which_tool_answers_and_what_frames_its_words(bench: Bench) -> None:
    leases = bench.alice.lease(fresh_request(), 8)
    even = [lease for lease in leases if int(lease.task[-1]) % 2 == 0]
    assert 0 < len(even) < len(leases)
    for lease in leases:
        if lease in even:
            assert lease.dialogue is not None
            assert (lease.dialogue.tool, lease.dialogue.max_turns) == ("calculator", 3)
            assert (lease.dialogue.before, lease.dialogue.after) == ((7, 8), (9,))
        else:
            assert lease.dialogue is None


def test_what_was_given_reaches_the_trainer(bench: Bench) -> None:
    for lease in bench.alice.lease(fresh_request(), 8):
        ok(bench.alice.submit(lease, pack(spoken(lease))))
    for audit in bench.audits(64):
        ok(bench.judge(audit))
    assert bench.batch(0) is not None
    answer = ok(bench.trainer.call("GET", "/batches/0/rollouts"))
    batch = unpack(answer.content, TrainingBatch, BodyLimits())
    given = [rollout.given for group in batch.groups for rollout in group.rollouts]
    assert len(given) == 16
    assert set(given) == {pack_spans([(2, 1)])}


def spoken(lease: Lease) -> Submission:
    rollout = Rollout(
        tokens=pack_tokens([5, 0, 7, 6, 0]), logprobs=pack_logprobs(np.array([-1, -1, 0, -1, -1])), finish="eos",
        given=pack_spans([(2, 1)]),
    )  # fmt: skip
    return Submission(
        format=1, run=lease.run, node=lease.node, lease=lease.lease, unit=lease.unit,
        incarnation=lease.policy.incarnation, version=lease.policy.version, policy_digest=lease.policy.digest,
        prompt=pack_tokens(lease.prompt_ids), rollouts=[rollout, rollout],
    )  # fmt: skip
