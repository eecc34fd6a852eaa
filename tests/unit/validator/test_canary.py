"""Canaries: each kind is surely bad and caught; one that passes ends everything before anything is reported."""

from dataclasses import replace

import pytest
from honest import audit_job, judge, lease, loaded
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import CanaryMissed
from shoal.protocol import Outcome, SamplingParameters, Submission, Verdict, unpack
from shoal.sampling import SeedTolerance
from shoal.toploc import ProofTolerance
from shoal.validator.canary import CANARY_CHEATS, Canary, Original
from shoal.validator.case import BODY_LIMITS, Case, SeenWork
from shoal.validator.judge import Judge
from shoal.validator.profiles import BUILT_IN, CertainLimits, ChannelLimits, LogprobLimits, NoiseLimits
from shoal.validator.verdicts import AuditJob

LONG = SamplingParameters(temperature=1.0, max_new_tokens=16, eos_token_ids=(500,))
REASONS = {
    "edited tokens": {"sampling.seed", "proofs.mismatch"}, "other seeds": {"sampling.seed"},
    "log-probabilities of another temperature": {"logprobs.mismatch"}, "another rollout's proofs": {"proofs.mismatch"},
    "proofs that are constants": {"proofs.forged"},
}  # fmt: skip


def original(of, profile=BUILT_IN["scripted/cpu/float32"]) -> Original:  # type: ignore[no-untyped-def]
    accused = audit_job(of)
    return Original(accused, Case(of, unpack(accused.body, Submission, BODY_LIMITS), "", 96, 64, profile))


@pytest.mark.parametrize("name", CANARY_CHEATS)
def test_every_kind_is_caught_for_its_own_reason(name: str) -> None:
    twin = CANARY_CHEATS[name](original(lease(sampling=LONG)))
    assert twin is not None
    [verdict] = judge().verdicts([twin], loaded())
    assert verdict.outcome is Outcome.REJECTED
    assert verdict.reason in REASONS[name]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.01, 0.3, 1.0, 3.0]), st.integers(1, 12))
def test_whatever_is_made_of_honest_work_is_caught(unit: int, seeds: int, temperature: float, tokens: int) -> None:
    """A kind that would not surely show with this submission makes no twin of it."""
    sampling = SamplingParameters(temperature=temperature, max_new_tokens=tokens, eos_token_ids=(1,))
    accused = original(lease(unit % 80, seeds=seeds, sampling=sampling))
    twins = {name: twin for name, forge in CANARY_CHEATS.items() if (twin := forge(accused)) is not None}
    assert "proofs that are constants" in twins
    for name, twin in twins.items():
        [verdict] = judge().verdicts([twin], loaded())
        assert verdict.outcome is Outcome.REJECTED, (name, verdict)


def test_the_first_at_once_then_after_every_so_many_and_all_kinds_in_turn() -> None:
    by = judge()
    canary = Canary(by, every=3)
    caught = []
    for unit in range(15):
        audit_jobs = [audit_job(lease(unit, sampling=LONG))]
        caught.append(canary.check(audit_jobs, by.verdicts(audit_jobs, loaded()), loaded()))
    assert [index for index, name in enumerate(caught) if name] == [0, 3, 6, 9, 12]
    assert [name for name in caught if name] == list(CANARY_CHEATS)


def judged_by(by: Judge) -> tuple[Canary, list[AuditJob], list[Verdict]]:
    """A canary that is due, and a group that was accepted."""
    audit_jobs = [audit_job(lease(sampling=LONG))]
    verdicts = by.verdicts(audit_jobs, loaded())
    assert verdicts[0].outcome is Outcome.ACCEPTED
    return Canary(by, every=1), audit_jobs, verdicts


def test_the_twin_leaves_no_trace_in_the_judges_memory() -> None:
    by = judge()
    canary, audit_jobs, verdicts = judged_by(by)
    before = dict(by.seen._whose)
    canary.check(audit_jobs, verdicts, loaded())
    assert by.seen._whose == before
    assert by.verdicts(audit_jobs, loaded())[0].outcome is Outcome.ACCEPTED


def blind(**limits: object) -> Judge:
    """A judge whose profile allows anything in one respect or more."""
    profile = BUILT_IN["scripted/cpu/float32"].model_copy(update=limits)
    return replace(judge(), profiles={profile.key: profile}, seen=SeenWork())


def test_a_profile_that_is_far_too_wide_is_noticed() -> None:
    by = blind(
        sampling=SeedTolerance(distance=2.0, floor=0.0),
        certain=CertainLimits(distance=2.0),
        proofs=ProofTolerance(exponents=1e9, signs=1e9, mantissa_mean=1e30, mantissa_median=1e30, outside=0.0),
        logprobs=LogprobLimits(largest=1e9),
        noise=NoiseLimits(**{name: ChannelLimits(rate=1e9, unit=1e9) for name in NoiseLimits.model_fields}),
    )
    canary, audit_jobs, verdicts = judged_by(by)
    passed = r"unit 5 with edited tokens, passed every check \(envelope, lease, .*reward"
    with pytest.raises(CanaryMissed, match=passed):
        canary.check(audit_jobs, verdicts, loaded())


def test_an_engine_that_fails_on_the_twin_is_no_miss() -> None:
    canary, audit_jobs, verdicts = judged_by(judge())

    class Failing(type(loaded().engine)):  # type: ignore[misc]
        def prefill(self, requests, proof=None):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of memory")

    broken = replace(loaded(), engine=Failing())
    assert canary.check(audit_jobs, verdicts, broken) is None
    assert canary.check(audit_jobs, verdicts, loaded()) is not None  # made up for at the next occasion
