"""Batching, broken machinery, rewards, and the shuffled control."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from honest import audit_job, completions, engine, judge, lease, loaded, proved, submission

from shoal.engines.scripted import ScriptedEngine
from shoal.engines.shelf import LoadedPolicy
from shoal.protocol import Outcome, RolloutReward, Severity
from shoal.rewards.panel import Panel
from shoal.validator.judge import KeptSubmission, recheck
from shoal.validator.verdicts import AuditJob


class CountingEngine(ScriptedEngine):
    """Notes the size of every prefill; fails on prompts that start with `poison`."""

    def __init__(self, poison: int | None = None) -> None:
        super().__init__()
        self.poison = poison
        self.batches: list[int] = []

    def prefill(self, requests, proof=None):  # type: ignore[no-untyped-def]
        self.batches.append(len(requests))
        if any(request.prompt_ids[0] == self.poison for request in requests):
            raise RuntimeError("out of memory")
        return super().prefill(requests, proof)


def counting(poison: int | None = None) -> tuple[CountingEngine, LoadedPolicy]:
    made = CountingEngine(poison)
    made.policy, made._digest, made._loaded = engine().policy, engine()._digest, True
    return made, LoadedPolicy(loaded().ref, made, {})


def test_one_prefill_serves_all_audits_of_a_policy_but_those_of_a_rejected_neighbour() -> None:
    made, policy = counting()
    audit_jobs = [audit_job(lease(unit)) for unit in range(5)]
    verdicts = judge().verdicts([*audit_jobs, audit_job(lease(6), b"garbage")], policy)
    assert made.batches == [60]
    assert verdicts[:5] == [verdict for alone in audit_jobs for verdict in judge().verdicts([alone], loaded())]


def of_newcomer(each: AuditJob) -> AuditJob:
    return replace(each, audit=each.audit.model_copy(update={"newcomer": True}))


def wrong_from(unit: int, first: int) -> AuditJob:
    """A group whose rollouts from `first` on are drawn with other seeds."""
    of = lease(unit)
    seeds = [seed if index < first else seed + 10**6 for index, seed in enumerate(of.seed_numbers)]
    return of_newcomer(audit_job(of, submission(of, completions(of, seeds=seeds))))


def test_garbage_of_a_newcomer_costs_one_rollout() -> None:
    made, policy = counting()
    audit_jobs = [wrong_from(1, first=0), of_newcomer(audit_job(lease(2))), audit_job(lease(3))]
    first, second, third = judge(pick=lambda count: count - 1).verdicts(audit_jobs, policy)
    assert made.batches == [2, 1, 24], "one rollout of each newcomer, the bad one again, then the two groups left"
    assert (first.outcome, first.reason, first.severity) == (Outcome.REJECTED, "sampling.seed", Severity.CERTAIN)
    assert first.checks[-1].evidence["rollout"] == 11
    [alone] = judge().verdicts([audit_job(lease(2))], loaded())
    assert (second.outcome, second.rewards, second.tally) == (Outcome.ACCEPTED, alone.rewards, alone.tally)
    assert third.outcome is Outcome.ACCEPTED


def test_first_rollout_of_a_newcomer_is_random() -> None:
    cheat, found = wrong_from(1, first=6), []
    for _ in range(24):
        made, policy = counting()
        judge().verdicts([cheat], policy)
        found.append(made.batches)
    assert {tuple(batches) for batches in found} == {(1, 1), (1, 12, 12)}, "half of the rollouts are honest"


def test_a_first_look_that_the_engine_fails_on_decides_nothing() -> None:
    made, policy = counting(poison=lease(2).prompt_ids[0])
    first, second = judge().verdicts([of_newcomer(audit_job(lease(1))), of_newcomer(audit_job(lease(2)))], policy)
    assert (first.outcome, second.outcome) == (Outcome.ACCEPTED, Outcome.UNSURE)
    assert made.batches == [2, 1, 1, 24, 12, 12]


def test_a_failing_engine_is_unsure_for_the_one_it_fails_on_and_rejects_nobody() -> None:
    made, policy = counting(poison=lease(2).prompt_ids[0])
    first, second, third = judge().verdicts([audit_job(lease(unit)) for unit in (1, 2, 3)], policy)
    assert (first.outcome, third.outcome) == (Outcome.ACCEPTED, Outcome.ACCEPTED)
    assert (second.outcome, second.reason, second.severity) == (Outcome.UNSURE, "machinery.prefill", None)
    assert "out of memory" in second.message
    assert made.batches == [36, 12, 12, 12]


@pytest.mark.parametrize("task", ["t/broken", "t/nan", "unknown"])
def test_scoring_failure_is_unscored_and_never_zero(task: str) -> None:
    [verdict] = judge().verdicts([audit_job(lease(1, task=task))], loaded())
    assert (verdict.outcome, verdict.reason, verdict.rewards) == (Outcome.UNSURE, "reward.machinery", ())
    assert verdict.message
    assert all(check.passed for check in verdict.checks)


def test_shuffled_rewards_keep_the_group_and_lose_the_connection() -> None:
    [plain] = judge().verdicts([audit_job(lease(1, seeds=16))], loaded())
    [control] = judge(shuffle_rewards=True).verdicts([audit_job(lease(1, seeds=16))], loaded())
    [again] = judge(shuffle_rewards=True).verdicts([audit_job(lease(1, seeds=16))], loaded())
    assert control == again
    assert sorted(r.value for r in control.rewards) == sorted(r.value for r in plain.rewards)
    sources = [int(r.parts["shuffled_from"]) for r in control.rewards]
    assert sorted(sources) == list(range(16)) != sources
    assert [r.value for r in control.rewards] == [plain.rewards[i].value for i in sources]
    assert control.rewards[0].parts["task"] == control.rewards[0].value


def test_nan_of_the_validator_rejects_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken policy, or a broken machine: honest work must not be struck for it, and cheats are not accepted."""
    of, table = lease(), loaded()
    prefill = table.engine.prefill

    broken = lambda *asked: [replace(each, cdf_low=each.cdf_low * np.nan) for each in prefill(*asked)]  # noqa: E731
    monkeypatch.setattr(table.engine, "prefill", broken)
    [verdict] = judge().verdicts([audit_job(of)], table)
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "machinery.prefill")
    assert "NaN or infin" in verdict.message


UNIT = lease(5)
HALVES = tuple(RolloutReward(value=0.5) for _ in range(12))


def kept(what: AuditJob, **changes: Any) -> KeptSubmission:
    return KeptSubmission(judge().verdicts([what], loaded())[0].model_copy(update=changes), what.audit.lease, what.body)


@pytest.mark.parametrize(("changes", "words"), [
    ({"generated_tokens": 10**6}, "it was accepted with 1000000 tokens"),
    ({"rewards": HALVES}, "its rewards are others now"), ({"rewards": ()}, "its rewards are others now"),
    ({"unit": 6}, "of another unit or node"), ({"submission": "0" * 64}, "the kept bytes are not those"),
    ({"rewards": HALVES, "unreproducible": ("judge",)}, "it named judge, and there are none"),
])  # fmt: skip
def test_a_verdict_that_says_more_than_was_done_is_found(changes: dict[str, Any], words: str) -> None:
    found = recheck(judge(), kept(audit_job(UNIT), **changes), loaded())
    assert found.state == "different"
    assert words in found.sentence


def test_an_honest_verdict_is_the_same_again_and_a_lie_that_was_waved_through_is_found() -> None:
    assert recheck(judge(), kept(audit_job(UNIT)), loaded()).state == "same"
    lie = audit_job(UNIT, proved(UNIT, submission(UNIT), value=4.0))
    paid = kept(audit_job(UNIT), submission=lie.audit.submission)
    found = recheck(judge(), KeptSubmission(paid.verdict, lie.audit.lease, lie.body), loaded())
    assert found.state == "different"
    assert "and is rejected with 0" in found.sentence


def test_undecidable_recheck_is_unknown() -> None:
    elsewhere = audit_job(lease(5, profile="torch/cuda/nothing"))
    accepted = kept(audit_job(UNIT), submission=elsewhere.audit.submission).verdict
    found = recheck(judge(), KeptSubmission(accepted, elsewhere.audit.lease, elsewhere.body), loaded())
    assert found.state == "unknown"


def test_rewards_that_nobody_can_compute_again_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    what = kept(audit_job(UNIT))
    monkeypatch.setattr(Panel, "unreproducible", ("judge",))
    assert recheck(judge(), what, loaded()).state == "different", "the verdict of then hid the judge"
    verdict = what.verdict.model_copy(update={"unreproducible": ("judge",)})
    found = recheck(judge(), KeptSubmission(verdict, what.lease, what.body), loaded())
    assert found.state == "unknown"
    assert "judge" in found.sentence
