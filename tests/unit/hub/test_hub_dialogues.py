"""Runs whose environment answers the model: what leases say of it, and who gets none."""

import pytest

from kit.hub import Bench, FakeEnvironment, ok, submission_body
from shoal.environments import DialogueRule, Task
from shoal.protocol import BodyLimits, DialogueTerms, TrainingBatch, unpack
from shoal.protocol.submission import Rollout, pack_logprobs, pack_spans, pack_tokens


class Talking(FakeEnvironment):
    """Answers in tasks of even number."""

    def dialogue(self, task: Task) -> DialogueRule | None:
        return DialogueRule("calculator", 3) if int(task.id.rpartition("-")[2]) % 2 == 0 else None


pytestmark = pytest.mark.hub(run={"groups_per_step": 8}, changes={"environment": Talking(), "frame": ((7, 8), (9,))})


def test_a_lease_says_which_tool_answers_and_what_frames_its_words(bench: Bench) -> None:
    leases = bench.alice.lease(8)
    even = [lease for lease in leases if int(lease.task[-1]) % 2 == 0]
    assert 0 < len(even) < len(leases)
    terms = DialogueTerms(tool="calculator", max_turns=3, before=(7, 8), after=(9,))
    assert all(lease.dialogue == (terms if lease in even else None) for lease in leases)


def test_what_was_given_reaches_the_trainer(bench: Bench) -> None:
    tokens, logprobs = pack_tokens([5, 0, 7, 6, 0]), pack_logprobs([-1, -1, 0, -1, -1])
    rollout = Rollout(tokens=tokens, logprobs=logprobs, finish="eos", given=pack_spans([(2, 1)]))
    for lease in bench.alice.lease(8):
        ok(bench.alice.submit(lease, submission_body(lease, rollouts=[rollout, rollout])))
    bench.accept()
    assert bench.batch(0) is not None
    answer = ok(bench.trainer.call("GET", "/batches/0/rollouts"))
    batch = unpack(answer.content, TrainingBatch, BodyLimits())
    given = [rollout.given for group in batch.groups for rollout in group.rollouts]
    assert (len(given), set(given)) == (16, {pack_spans([(2, 1)])})
