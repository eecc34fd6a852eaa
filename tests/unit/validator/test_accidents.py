"""Coarse arithmetic gets a token quite wrong now and then: no credit for that, no punishment, and no loophole."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from honest import LengthEnvironment, completions, docket, lease, loaded, proved, submission

from shoal.engines.groups import submission_of
from shoal.hub.state.reputation import recent
from shoal.protocol import (
    Lease,
    Outcome,
    ProofParameters,
    Rollout,
    SamplingParameters,
    Severity,
    Submission,
    Sums,
    Tally,
    Verdict,
    pack_logprobs,
)
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


LONG = SamplingParameters(temperature=1.0, max_new_tokens=64, eos_token_id=0)
OFTEN = COARSE.model_copy(update={"accidents": AccidentLimits(first=0.02, later=2e-3)})


@cache
def long_lease() -> Lease:
    """Four rollouts of eight parts."""
    of = lease(5, seeds=24, sampling=LONG, proof=ProofParameters(topk=16, rows=8))
    full = [seed for seed, each in zip(of.seeds, completions(of), strict=True) if len(each.token_ids) == 64]
    return of.model_copy(update={"seeds": tuple(full[:4])})


def with_first(of: Lease, rollout: Rollout) -> Submission:
    honest = submission(of)
    return msgspec.structs.replace(honest, rollouts=[rollout, *honest.rollouts[1:]])


def test_one_rollout_of_chosen_tokens_is_certain() -> None:
    """Else a group of one, shown progress, and the first look at a newcomer's group could never fail for certain."""
    of = long_lease()
    one = of.model_copy(update={"seeds": of.seeds[:1]})
    other = next(each for each in completions(of, seeds=range(70, 120)) if len(each.token_ids) == 64)
    made_up = submission_of(one, [other], "scripted")
    for leased, what in ((of, with_first(of, made_up.rollouts[0])), (one, made_up)):
        [verdict] = Judge(LengthEnvironment(), {KEY: COARSE}).verdicts([docket(leased, what)], loaded())
        assert (verdict.reason, verdict.severity) == ("sampling.seed", Severity.CERTAIN)


@pytest.mark.parametrize(
    ("rollouts", "parts", "strikes"),
    [
        pytest.param(16, 4, [2, 4], id="16 x 128 tokens"),
        pytest.param(16, 256, [7, 14], id="16 x 8,192 tokens"),
        pytest.param(1, 4, [2, 4], id="a group of one"),
        pytest.param(2, 1, [2, 4], id="two short ones"),
    ],
)
def test_a_node_with_a_rollout_in_every_group_that_is_off_is_banned_by_its_record(
    rollouts: int, parts: int, strikes: list[int]
) -> None:
    """Not so far off that it is certain; each group is unsure at least, whatever it says of the node."""
    limits, points = AccidentLimits(first=2e-3, later=1e-4), np.zeros(rollouts * parts, np.int64)
    points[:parts] = 6
    tally = Tally(channels={"accidents": accident_sums(points, np.repeat(np.arange(rollouts), parts), limits)})
    assert log_evidence("accidents", tally.of("accidents")) < STRIKE
    record, found = Tally(), list[int]()
    for group in range(1, 15):
        record = recent(record.plus(tally))
        if log_evidence("accidents", record.of("accidents")) >= STRIKE:
            record, found = Tally(), [*found, group]
    assert found[:2] == strikes


def test_a_rollout_that_is_off_in_more_parts_than_count_is_never_accepted() -> None:
    """Parts with wrong proofs are in no sum: their tokens could be steered as far as single tokens may be off."""
    of = long_lease()
    honest = submission(of)
    wrong = proved(of, honest, value=4.0).rollouts[0]
    what = with_first(of, msgspec.structs.replace(honest.rollouts[0], proofs=wrong.proofs))
    [verdict] = Judge(LengthEnvironment(), {KEY: OFTEN}).verdicts([docket(of, what)], loaded())
    assert log_evidence("accidents", verdict.tally.of("accidents")) < DOUBT
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "sampling.accident")


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
