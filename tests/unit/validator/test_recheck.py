"""What was accepted is judged again from the kept bytes: an honest verdict is the same, a bought one is not."""

from __future__ import annotations

from typing import Any

import pytest
from honest import LengthEnvironment, docket, lease, loaded, proved, submission

from shoal.protocol import Outcome, RolloutReward, Verdict, pack, submission_digest
from shoal.rewards.panel import Panel
from shoal.validator import Judge, load_profiles
from shoal.validator.judge import KeptSubmission, recheck
from shoal.validator.verdicts import Docket

UNIT = lease(5)


def judge() -> Judge:
    return Judge(LengthEnvironment(), load_profiles())


def verdict_on(what: Docket) -> Verdict:
    (found,) = judge().verdicts([what], loaded())
    return found


def kept(what: Docket, **changes: Any) -> KeptSubmission:
    return KeptSubmission(verdict_on(what).model_copy(update=changes), what.audit.lease, what.body)


def test_an_honest_verdict_is_the_same_again() -> None:
    honest = docket(UNIT)
    assert verdict_on(honest).outcome is Outcome.ACCEPTED
    assert recheck(judge(), kept(honest), loaded()).state == "same"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"generated_tokens": 10**6}, "it was accepted with 1000000 tokens"),
        ({"rewards": tuple(RolloutReward(value=0.5) for _ in range(12))}, "its rewards are others now"),
        ({"rewards": ()}, "its rewards are others now"),
        ({"unit": 6}, "of another unit or node"),
        ({"submission": "0" * 64}, "the kept bytes are not those"),
    ],
)
def test_a_verdict_that_says_more_than_was_done_is_found(changes: dict[str, Any], words: str) -> None:
    found = recheck(judge(), kept(docket(UNIT), **changes), loaded())
    assert found.state == "different"
    assert words in found.sentence


def test_a_lie_that_was_waved_through_is_found() -> None:
    lie = docket(UNIT, proved(UNIT, submission(UNIT), value=4.0))
    paid = kept(docket(UNIT), submission=lie.audit.submission)
    found = recheck(judge(), KeptSubmission(paid.verdict, lie.audit.lease, lie.body), loaded())
    assert found.state == "different"
    assert "and is rejected with 0" in found.sentence


def test_what_this_machine_cannot_decide_is_unknown() -> None:
    elsewhere = docket(lease(5, profile="torch/cuda/nothing"))
    verdict = verdict_on(docket(UNIT)).model_copy(update={"submission": elsewhere.audit.submission})
    found = recheck(judge(), KeptSubmission(verdict, elsewhere.audit.lease, elsewhere.body), loaded())
    assert found.state == "unknown"


def test_a_verdict_that_claims_a_judge_which_the_run_does_not_have_is_different() -> None:
    other = tuple(RolloutReward(value=0.5) for _ in range(12))
    found = recheck(judge(), kept(docket(UNIT), rewards=other, unreproducible=("judge",)), loaded())
    assert found.state == "different"
    assert "it named judge, and there are none" in found.sentence


def test_rewards_that_nobody_can_compute_again_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    what = kept(docket(UNIT))
    monkeypatch.setattr(Panel, "unreproducible", ("judge",))
    assert recheck(judge(), what, loaded()).state == "different", "the verdict of then hid the judge"
    verdict = what.verdict.model_copy(update={"unreproducible": ("judge",)})
    found = recheck(judge(), KeptSubmission(verdict, what.lease, what.body), loaded())
    assert found.state == "unknown"
    assert "judge" in found.sentence
    assert submission_digest(pack(submission(UNIT))) == docket(UNIT).audit.submission
