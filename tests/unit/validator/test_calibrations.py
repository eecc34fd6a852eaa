"""Which limits a lease is judged by: those that its calibration has, built-in ones, or those of its number format."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
from honest import LengthEnvironment, completions, docket, lease, loaded, submission

from shoal.protocol import AuditReply, Calibration, MeasuredKind, Outcome, PolicyRef, Severity, pack_logprobs
from shoal.runtime.clock import ManualClock
from shoal.sampling import SeedTolerance
from shoal.toploc import ProofTolerance
from shoal.validator import Judge, Profile, ValidatorSettings, load_profiles
from shoal.validator.limits import Calibrator
from shoal.validator.profiles import BUILT_IN, LogprobLimits, Measured, Profiles, limits_for, widest

if TYPE_CHECKING:
    from shoal.client import HubClient
    from shoal.engines.shelf import EngineShelf

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


def test_joined_limits_keep_the_wider_band_so_that_neither_machine_sees_the_policy_move() -> None:
    """Before, they were those of one machine: the other measured anew with each version."""

    def seen(machine: str, rate: float) -> Profile:
        bands = {"exponent_rate": rate}
        return Profile(key=OURS, measured=Measured(model="", tokens=1, date="", validators=(machine,), bands=bands))

    both = widest(seen("cpu/bfloat16", 0.01), seen("cpu/float32", 0.03)).measured
    assert both is not None
    assert (both.bands, both.validators) == ({"exponent_rate": 0.03}, ("cpu/bfloat16", "cpu/float32"))


def test_built_in_limits_are_for_validators_of_the_formats_that_they_name() -> None:
    measured = {THEIRS: Profile(key=THEIRS, validators=("bfloat16",))}
    assert limits_for(OURS, "float32", {}, BUILT_IN) == (BUILT_IN[OURS], True)
    assert limits_for(OURS, "bfloat16", {}, BUILT_IN) is None
    found = limits_for(OURS, "bfloat16", measured, BUILT_IN)
    assert found is not None
    assert (found[0].key, found[0].validators, found[1]) == (OURS, ("bfloat16",), False)


class Hub:
    """What a calibrator asks a hub for: the run, and calibrations by their digest."""

    def __init__(self, **made: Calibration) -> None:
        self._made = made

    def run_info(self) -> SimpleNamespace:
        return SimpleNamespace(
            profiles=("torch/cpu/bfloat16", "torch/cpu/float32"), model=SimpleNamespace(parameters=1)
        )

    def calibration(self, digest: str) -> Calibration:
        return self._made[digest]


def test_a_format_without_built_in_limits_is_measured_first_and_alone_the_others_once_the_validator_is_ready() -> None:
    policy = PolicyRef(incarnation=0, version=0, digest="a" * 64)
    measured = Measured(model="", tokens=1, date="", validators=("cpu/float32",))
    limits = Profile(key="torch/cpu/bfloat16", measured=measured).model_dump(mode="json")
    coarse = Calibration(
        run="run",
        policy=policy,
        kinds={"torch/cpu/bfloat16": MeasuredKind(limits=limits)},
        machines=("cpu/float32",),
        made_at_ms=1,
    )
    known = cast("Judge", SimpleNamespace(profiles=load_profiles(), plain_kinds=set()))
    calibrator = Calibrator(
        cast("HubClient", Hub(c=coarse)), cast("EngineShelf", None), known, "torch", ValidatorSettings(device="cpu"),
        ManualClock(),
    )  # fmt: skip

    def due(in_force: str, is_ready: bool) -> list[str]:
        reply = AuditReply(calibration=in_force, wanted=("torch/cpu/bfloat16", "torch/cpu/float32"))
        job = calibrator.due(reply, policy, is_ready)
        return list(cast("partial[None]", job).args[1]) if job is not None else []

    assert due("", is_ready=False) == ["torch/cpu/bfloat16"]
    assert due("", is_ready=True) == ["torch/cpu/bfloat16"]
    assert due("c", is_ready=False) == []
    assert due("c", is_ready=True) == ["torch/cpu/float32"]
