"""Which limits a lease is judged by: those that its calibration has, built-in ones, or those of its number format."""

from __future__ import annotations

import msgspec
from honest import LengthEnvironment, completions, docket, lease, loaded, submission

from shoal.protocol import Outcome, Severity, pack_logprobs
from shoal.runtime.clock import ManualClock
from shoal.sampling import SeedTolerance
from shoal.toploc import ProofTolerance
from shoal.validator import Judge, Profile, load_profiles
from shoal.validator.profiles import BUILT_IN, LogprobLimits, Profiles, limits_for, widest

DIGEST = "c" * 64
OURS, THEIRS = "scripted/cpu/float32", "scripted/gpu/float32"


def judge(measured: Profiles, known: Profiles | None = None) -> Judge:
    calibrations = {DIGEST: measured}
    return Judge(
        LengthEnvironment(), load_profiles() if known is None else known, clock=ManualClock(),
        calibrations=calibrations.get,
    )  # fmt: skip


def test_a_verdict_goes_by_the_limits_of_its_leases_calibration_and_names_it() -> None:
    of = lease(calibration=DIGEST)
    narrow = BUILT_IN[OURS].model_copy(update={"logprobs": LogprobLimits(largest=1e-30)})
    off = [
        msgspec.structs.replace(each, logprobs=pack_logprobs(each.logprob_values - 1e-6))
        for each in submission(of).rollouts
    ]
    handed_in = docket(of, msgspec.structs.replace(submission(of), rollouts=off))
    [verdict] = judge({OURS: narrow}).verdicts([handed_in], loaded())
    assert (verdict.reason, verdict.calibration, verdict.measured) == ("logprobs.mismatch", DIGEST, True)
    [verdict] = judge({OURS: BUILT_IN[OURS]}).verdicts([handed_in], loaded())
    assert (verdict.outcome, verdict.calibration) == (Outcome.ACCEPTED, DIGEST)


def test_a_calibration_that_cannot_be_had_makes_work_unsure() -> None:
    [verdict] = judge({}).verdicts([docket(lease(calibration="d" * 64))], loaded())
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "machinery.profile")


def test_work_of_a_kind_that_nobody_measured_passes_by_the_limits_of_its_format_and_says_so() -> None:
    [verdict] = judge({THEIRS: Profile(key=THEIRS)}, known={}).verdicts([docket(lease(calibration=DIGEST))], loaded())
    assert (verdict.outcome, verdict.measured) == (Outcome.ACCEPTED, False)


def test_a_statistical_failure_of_a_kind_that_nobody_measured_is_unsure_and_a_certain_one_rejects() -> None:
    of = lease(calibration=DIGEST)
    narrow = Profile(key=THEIRS, logprobs=LogprobLimits(largest=1e-30))
    off = [
        msgspec.structs.replace(each, logprobs=pack_logprobs(each.logprob_values - 1e-6))
        for each in submission(of).rollouts
    ]
    statistical = docket(of, msgspec.structs.replace(submission(of), rollouts=off))
    [verdict] = judge({THEIRS: narrow}, known={}).verdicts([statistical], loaded())
    assert (verdict.outcome, verdict.reason, verdict.severity) == (Outcome.UNSURE, "machinery.kind", None)
    assert "no trusted machine has measured scripted/cpu/float32" in verdict.message
    seeds = [seed + 10**6 for seed in of.seed_numbers]
    certain = docket(of, submission(of, completions(of, seeds=seeds)))
    [verdict] = judge({THEIRS: narrow}, known={}).verdicts([certain], loaded())
    assert (verdict.outcome, verdict.severity) == (Outcome.REJECTED, Severity.CERTAIN)


def test_two_machines_limits_are_joined_number_by_number() -> None:
    one = Profile(key=OURS, sampling=SeedTolerance(distance=0.1, floor=1e-9), validators=("float32",))
    other = Profile(key=OURS, proofs=ProofTolerance(exponents=0.3), validators=("bfloat16",))
    joined = widest(one, other)
    assert (joined.sampling.distance, joined.proofs.exponents) == (0.1, 0.3)
    assert joined.sampling.floor == min(1e-9, SeedTolerance().floor)
    assert joined.validators == ("bfloat16", "float32")
    assert widest(other, one) == joined


def test_built_in_limits_are_for_validators_of_the_formats_that_they_name() -> None:
    measured = {THEIRS: Profile(key=THEIRS, validators=("bfloat16",))}
    assert limits_for(OURS, "float32", {}, BUILT_IN) == (BUILT_IN[OURS], True)
    assert limits_for(OURS, "bfloat16", {}, BUILT_IN) is None
    found = limits_for(OURS, "bfloat16", measured, BUILT_IN)
    assert found is not None
    assert (found[0].key, found[0].validators, found[1]) == (OURS, ("bfloat16",), False)
