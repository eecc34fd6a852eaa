"""Coarse arithmetic gets a token quite wrong now and then: no credit for that, no punishment, and no loophole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from honest import LengthEnvironment, docket, lease, loaded, submission

from shoal.protocol import Outcome, Submission, Tally, Verdict, pack_logprobs
from shoal.validator import Judge
from shoal.validator.bands import accidents_of
from shoal.validator.profiles import BUILT_IN, Profile

KEY = "scripted/cpu/float32"
COARSE = BUILT_IN[KEY].model_copy(update={"accidents": 1e-3})


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


def test_one_token_that_is_far_off_is_unsure_where_that_happens() -> None:
    verdict = judged(with_wrong_tokens(1))
    assert (verdict.outcome, verdict.reason, verdict.severity) == (Outcome.UNSURE, "sampling.accident", None)
    assert verdict.tally.accidents == 1
    assert "it may be nobody's fault" in verdict.message


def test_where_that_does_not_happen_it_is_a_failure() -> None:
    verdict = judged(with_wrong_tokens(1), BUILT_IN[KEY])
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "logprobs.mismatch")
    assert verdict.tally.accidents == 0


def test_too_many_at_once_are_a_failure_too() -> None:
    verdict = judged(with_wrong_tokens(6))
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "logprobs.mismatch")


def test_too_many_of_late_are_a_failure_too() -> None:
    """One in this submission, but the node has had as many of them as no accident explains."""
    seldom = Tally(tokens=2000, entropy=4000.0, accidents=3)
    often = replace_tally(seldom, accidents=30)
    assert judged(with_wrong_tokens(1), record=seldom).outcome is Outcome.UNSURE
    assert judged(with_wrong_tokens(1), record=often).outcome is Outcome.REJECTED


def replace_tally(tally: Tally, **changes: Any) -> Tally:
    return tally.model_copy(update=changes)


def test_an_accident_excuses_nothing_else() -> None:
    """A submission with one wrong token and other dice is rejected for the dice."""
    of = lease()
    other = of.model_copy(update={"seeds": tuple(f"{77 + i:016x}" for i in range(len(of.seeds)))})
    on_table = replace(docket(of, with_wrong_tokens(1)), lease=other)
    [verdict] = Judge(LengthEnvironment(), {KEY: COARSE}).verdicts([on_table], loaded())
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "sampling.seed")


def test_honest_work_has_none() -> None:
    verdict = judged(submission(lease()))
    assert verdict.outcome is Outcome.ACCEPTED
    assert verdict.tally.accidents == 0


@pytest.mark.parametrize("accidents", [0, 3])
def test_calibration_tells_accidents_from_the_tail_of_the_others(accidents: int) -> None:
    chance = np.random.default_rng(1)
    distance = np.where(chance.random(20_000) < 0.2, chance.exponential(0.004, 20_000), 0.0)
    errors = np.abs(chance.normal(0, 0.05, 20_000))
    distance[:accidents], errors[accidents : 2 * accidents] = 0.6, 5.0
    strange = accidents_of(distance, np.full(20_000, 2.0), errors)
    assert strange.sum() == 2 * accidents
