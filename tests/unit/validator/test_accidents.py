"""Coarse arithmetic gets a token quite wrong now and then: no credit for that, no punishment, and no loophole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from honest import LengthEnvironment, docket, lease, loaded, submission

from shoal.protocol import Outcome, Submission, Sums, Tally, Verdict, pack_logprobs
from shoal.validator import Judge
from shoal.validator.evidence import DOUBT, STRIKE, accident_sums, log_evidence
from shoal.validator.profiles import BUILT_IN, AccidentLimits, Profile

KEY = "scripted/cpu/float32"
COARSE = BUILT_IN[KEY].model_copy(update={"accidents": AccidentLimits(first=1e-3, later=1e-4)})


def judged(what: Submission, profile: Profile = COARSE, **audit: Any) -> Verdict:
    [verdict] = Judge(LengthEnvironment(), {KEY: profile}).verdicts([docket(lease(), what, **audit)], loaded())
    return verdict


def with_wrong_tokens(count: int) -> Submission:
    """Honest but for the reported log-probabilities of some tokens, which are far off."""
    import msgspec

    honest = submission(lease())
    rollouts = list(honest.rollouts)
    for index in range(count):
        values = rollouts[index].logprob_values
        values[0] -= 5.0
        rollouts[index] = msgspec.structs.replace(rollouts[index], logprobs=pack_logprobs(values))
    return msgspec.structs.replace(honest, rollouts=rollouts)


def test_a_group_with_one_token_that_is_far_off_is_unsure_where_that_happens() -> None:
    """Whoever may place one such token chooses an end, an answer, or a ratio that ruins a step."""
    verdict = judged(with_wrong_tokens(1))
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "sampling.accident")
    assert verdict.tally.accidents == 1
    assert verdict.tally.of("accidents") == Sums(seen=0.5, expected=0.012)
    assert verdict.tally.of("logprobs").seen == pytest.approx(0.0, abs=1e-3), "it counts nowhere else"


def test_a_few_are_unsure_and_many_are_a_failure() -> None:
    few = judged(with_wrong_tokens(4))
    assert (few.outcome, few.reason, few.severity) == (Outcome.UNSURE, "sampling.accident", None)
    assert "it may be nobody's fault" in few.message
    many = judged(with_wrong_tokens(12))
    assert (many.outcome, many.reason) == (Outcome.REJECTED, "logprobs.mismatch")


def test_where_that_does_not_happen_it_is_a_failure() -> None:
    verdict = judged(with_wrong_tokens(1), BUILT_IN[KEY])
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "logprobs.mismatch")


def test_too_many_with_earlier_ones_are_unsure_and_then_a_failure() -> None:
    """One in this submission; the node has had none, a few, or as many as no accident explains."""

    def record(seen: float) -> Tally:
        return Tally(tokens=2000, channels={"accidents": Sums(seen=seen, expected=0.1)})

    assert judged(with_wrong_tokens(1), record=record(0.5)).outcome is Outcome.UNSURE
    assert judged(with_wrong_tokens(1), record=record(3.0)).outcome is Outcome.UNSURE
    verdict = judged(with_wrong_tokens(1), record=record(8.0))
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "sampling.seed")


def test_all_parts_of_one_rollout_are_one_accident_and_those_of_two_are_evidence() -> None:
    """Seen once in 2,048 groups of Gemma-3-270M: from its second part on a rollout was 8 units of mantissa off, by two
    validators. What went wrong once is in the context of all that follows."""
    limits, rollout_of = AccidentLimits(first=2e-3, later=1e-4), np.repeat(np.arange(16), 4)
    points = np.zeros(64, np.int64)
    points[29:32] = 6
    one = accident_sums(points, rollout_of, limits)
    assert (one.seen, one.expected) == (3.0, pytest.approx(16 * 2e-3 + 48 * 1e-4))
    assert DOUBT < log_evidence("accidents", one) < STRIKE
    points[40] = 6
    assert log_evidence("accidents", accident_sums(points, rollout_of, limits)) >= STRIKE


def test_an_accident_excuses_nothing_else() -> None:
    """A submission with one wrong token and other seeds is rejected for the seeds."""
    of = lease()
    other = of.model_copy(update={"seeds": tuple(f"{77 + i:016x}" for i in range(len(of.seeds)))})
    on_table = replace(docket(of, with_wrong_tokens(1)), lease=other)
    [verdict] = Judge(LengthEnvironment(), {KEY: COARSE}).verdicts([on_table], loaded())
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "sampling.seed")


def test_honest_work_has_none() -> None:
    verdict = judged(submission(lease()))
    assert verdict.outcome is Outcome.ACCEPTED
    assert verdict.tally.accidents == 0
