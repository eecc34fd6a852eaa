"""Coarse arithmetic gets a token quite wrong now and then: no credit for that, no punishment, and no loophole."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import honest
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from honest import EOS, KEY, LengthEnvironment, audit_job, completions, lease, loaded, proved, submission

from shoal.engines.groups import submission_of
from shoal.hub.state.reputation import recent
from shoal.protocol import Outcome, Rollout, Severity, Submission, Sums, Tally, Verdict, pack_logprobs
from shoal.protocol.lease import Lease, ProofParameters, SamplingParameters
from shoal.validator.bands import Bands, limits_from
from shoal.validator.case import Case
from shoal.validator.checks import AFTER_PREFILL, run_all
from shoal.validator.evidence import DOUBT, STRIKE, Outliers, accident_sums, log_evidence, log_evidence_of_seeds
from shoal.validator.judge import Judge
from shoal.validator.profiles import BUILT_IN, AccidentLimits, Profile
from shoal.validator.verdicts import LeaseTemplate

COARSE = BUILT_IN[KEY].model_copy(update={"accidents": AccidentLimits(first=1e-3, later=1e-4)})


def judged(what: Submission, profile: Profile = COARSE, **audit: Any) -> Verdict:
    [verdict] = Judge(LengthEnvironment(), {KEY: profile}).verdicts([audit_job(lease(), what, **audit)], loaded())
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


@pytest.mark.parametrize(("count", "profile", "outcome", "reason"), [
    pytest.param(1, COARSE, Outcome.UNSURE, "sampling.accident", id="one is unsure"),
    pytest.param(4, COARSE, Outcome.UNSURE, "sampling.accident", id="a few are unsure"),
    pytest.param(12, COARSE, Outcome.REJECTED, "logprobs.mismatch", id="many are a failure"),
    pytest.param(1, BUILT_IN[KEY], Outcome.REJECTED, "logprobs.mismatch", id="one, where that does not happen"),
])  # fmt: skip
def test_a_group_with_tokens_that_are_far_off(count: int, profile: Profile, outcome: Outcome, reason: str) -> None:
    """Whoever may place one such token chooses an end, an answer, or a ratio that ruins a step."""
    verdict = judged(with_wrong_tokens(count), profile)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)
    if outcome is Outcome.UNSURE:
        assert verdict.severity is None
        assert "it may be nobody's fault" in verdict.message
        assert verdict.tally.accidents == count


def test_one_such_token_counts_as_an_accident_and_nowhere_else() -> None:
    tally = judged(with_wrong_tokens(1)).tally
    assert tally.of("accidents") == Sums(seen=0.5, expected=0.012)
    assert tally.of("logprobs").seen == pytest.approx(0.0, abs=1e-3)


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


def test_only_the_odd_tokens_of_a_part_are_left_out_where_its_proof_is_in_order() -> None:
    """Else two parts of other seeds, each with a few tokens far off, would be two accidents and nothing more."""
    drawn, chunk_of = np.ones(64, np.bool_), np.repeat([0, 1], 32)
    far = np.zeros(64, np.bool_)
    far[[3, 40]] = True
    zero = np.zeros(2, np.int64)
    for proofs, left in ((zero, 62), (np.array([0, 2]), 31)):
        odd = Outliers(seeds=np.array([1, 1]), logprobs=zero, proofs=proofs, tokens=far)
        assert odd.kept(drawn, chunk_of, COARSE.accidents).tokens.sum() == left
        assert odd.kept(drawn, chunk_of, AccidentLimits()).tokens.all(), "where there are no accidents all is measured"


def test_evidence_of_accidents_and_of_all_other_tokens_is_multiplied() -> None:
    accidents, calm = Sums(seen=2.0, expected=0.004), Sums(seen=2.0, expected=4.0)
    outside, distance = Sums(seen=20.0, expected=6.0), Sums(seen=12.0, expected=4.0)
    alone = [log_evidence("accidents", accidents), log_evidence("outside", outside), log_evidence("distance", distance)]
    assert max(alone) < log_evidence_of_seeds(accidents, outside, distance) < sum(alone)
    assert log_evidence_of_seeds(accidents, calm, calm) == alone[0], "honest tokens excuse no accident"


OFTEN = COARSE.model_copy(update={"accidents": AccidentLimits(first=0.02, later=2e-3)})


def with_first(of: Lease, rollout: Rollout) -> Submission:
    honest = submission(of)
    return msgspec.structs.replace(honest, rollouts=[rollout, *honest.rollouts[1:]])


def test_one_rollout_of_chosen_tokens_is_certain() -> None:
    """Else a group of one, shown progress, and the first look at a newcomer's group could never fail for certain."""
    of = honest.long_lease()
    one = of.model_copy(update={"seeds": of.seeds[:1]})
    other = next(each for each in completions(of, seeds=range(70, 120)) if len(each.token_ids) == 64)
    made_up = submission_of(one, [other], "scripted")
    for leased, what in ((of, with_first(of, made_up.rollouts[0])), (one, made_up)):
        [verdict] = Judge(LengthEnvironment(), {KEY: COARSE}).verdicts([audit_job(leased, what)], loaded())
        assert (verdict.reason, verdict.severity) == ("sampling.seed", Severity.CERTAIN)


@pytest.mark.parametrize(("rollouts", "parts", "strikes"), [
    pytest.param(16, 4, [2, 4], id="16 x 128 tokens"), pytest.param(16, 256, [7, 14], id="16 x 8,192 tokens"),
    pytest.param(1, 4, [2, 4], id="a group of one"), pytest.param(2, 1, [2, 4], id="two short ones"),
])  # fmt: skip
def test_a_node_with_a_rollout_in_every_group_that_is_off_is_banned_by_its_record(rollouts, parts, strikes):
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
    of = honest.long_lease()
    whole = submission(of)
    wrong = proved(of, whole, value=4.0).rollouts[0]
    what = with_first(of, msgspec.structs.replace(whole.rollouts[0], proofs=wrong.proofs))
    [verdict] = Judge(LengthEnvironment(), {KEY: OFTEN}).verdicts([audit_job(of, what)], loaded())
    assert log_evidence("accidents", verdict.tally.of("accidents")) < DOUBT
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "sampling.accident")


def test_an_accident_excuses_nothing_else() -> None:
    """A submission with one wrong token and other seeds is rejected for the seeds."""
    of = lease()
    other = of.model_copy(update={"seeds": tuple(f"{77 + i:016x}" for i in range(len(of.seeds)))})
    on_table = replace(audit_job(of, with_wrong_tokens(1)), lease=other)
    [verdict] = Judge(LengthEnvironment(), {KEY: COARSE}).verdicts([on_table], loaded())
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, "sampling.seed")


KIND = "scripted/cpu/bfloat16"
Values = npt.NDArray[np.float32]


@cache
def groups(first: int, count: int) -> list[Case]:
    """Groups of a worker that rounds, as a validator sees that does not."""
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=40, eos_token_ids=(EOS,))
    terms = LeaseTemplate("coarse", 8, sampling, ProofParameters(), KIND)
    leases = [terms.lease(n, (10 + n % 80, 20 + n // 80, 30)) for n in range(first, first + count)]
    return honest.cases(leases, honest.rounding(0.1), Profile(key=KIND))


@cache
def limits() -> Profile:
    return limits_from(Bands.of(groups(0, 40)), KIND)


def outcome(case: Case) -> str:
    finding = run_all(AFTER_PREFILL, case)[-1]
    return "" if finding.passed else finding.reason


def saying(case: Case, change: Callable[[Values, int], Values]) -> Case:
    """The same with other reported log-probabilities."""
    rollouts = [
        msgspec.structs.replace(each, logprobs=pack_logprobs(np.minimum(change(each.logprob_values, n), 0)))
        for n, each in enumerate(case.rollouts)
    ]
    submission = msgspec.structs.replace(case.claim, rollouts=rollouts)
    return replace(case, submission=submission, profile=limits())


def test_honest_groups_never_seen_before_pass_alone_and_as_one_node() -> None:
    record = Tally()
    for case in groups(100, 40):
        judged = replace(case, profile=limits(), record=record)
        assert outcome(judged) == ""
        record = recent(record.plus(judged.tally))


def test_log_probabilities_far_off_for_one_token_in_twenty_are_a_strike_within_a_few_groups() -> None:
    """Groups of a hundred tokens: one with a single such token passes, the others do not."""
    random, record, found = np.random.default_rng(0), Tally(), list[str]()
    for case in groups(100, 40)[:20]:
        lie = saying(case, lambda values, _: values - 1.4 * (random.random(len(values)) < 0.05))
        found.append(outcome(replace(lie, record=record)))
        record = recent(record.plus(lie.tally))
        if found[-1] in ("logprobs.mismatch", "sampling.seed"):
            break
    assert len(found) <= 4
    assert found.count("") <= 2


def test_log_probabilities_that_lean_by_rollout_up_and_down_fail() -> None:
    """Their mean over the group is right, and their size hardly larger: what a rollout is trained by is not."""
    for case in groups(100, 40)[:20]:
        assert outcome(saying(case, lambda values, n: values + 0.05 * (-1) ** n)) != ""


def test_small_bias_is_found_by_the_record() -> None:
    record, passed = Tally(), 0
    for case in groups(100, 40):
        lie = replace(saying(case, lambda values, n: values + 0.02 * (-1) ** n), record=record)
        if outcome(lie):
            assert outcome(lie) == "logprobs.mismatch"
            break
        passed, record = passed + 1, recent(record.plus(lie.tally))
    assert 0 < passed < 39


def test_honest_sums_with_a_shared_error_are_struck_less_often_than_promised() -> None:
    """Exponential lumps, a Poisson number of them, and a relative error of 10 % that each group shares."""
    random = np.random.default_rng(1)
    mean, shared, nodes, struck = 40.0, 0.1, 500, 0
    for _ in range(nodes):
        error = 1 + shared * random.standard_normal(30)
        counts = random.poisson(mean * np.maximum(error, 0))
        seen = random.gamma(np.maximum(counts, 1e-9))
        record = Tally()
        for each in seen:
            sums = Sums(seen=float(each), expected=mean, shared=(shared * mean) ** 2)
            record = record.plus(Tally(channels={"distance": sums}))
            struck += log_evidence("distance", record.of("distance")) >= math.log(1000)
            record = recent(record)
    assert struck <= 30 * nodes / 1000
