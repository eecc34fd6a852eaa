"""What the checks after the prefill see beyond single tokens: proofs, likelihood, the node's record, light audits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from honest import LengthEnvironment, completions, docket, engine, lease, loaded, proved, submission
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engines import Completion, PrefillRequest
from shoal.protocol import Lease, Outcome, ProofParameters, SamplingParameters, Submission, Sums, Tally, Verdict
from shoal.sampling import SeedTolerance
from shoal.validator import Judge, load_profiles
from shoal.validator.checks import AFTER_PREFILL, BEFORE_PREFILL
from shoal.validator.profiles import BUILT_IN, CertainLimits, ChannelLimits, LikelihoodLimits, NoiseLimits

KEY = "scripted/cpu/float32"
NO_END = SamplingParameters(temperature=1.0, max_new_tokens=16, eos_token_id=500)
PRIME = 65497


def judge(environment: object = None, **limits: object) -> Judge:
    profile = BUILT_IN[KEY].model_copy(update=limits)
    return Judge(environment or LengthEnvironment(), {**load_profiles(), KEY: profile})  # type: ignore[arg-type]


def judged(of: Lease, what: Submission | None = None, by: Judge | None = None, **audit: object) -> Verdict:
    [verdict] = (by or judge()).verdicts([docket(of, what, **audit)], loaded())
    return verdict


def with_proofs(of: Lease, index: int, proofs: bytes) -> Submission:
    rollouts = list(submission(of).rollouts)
    rollouts[index] = msgspec.structs.replace(rollouts[index], proofs=proofs)
    return msgspec.structs.replace(submission(of), rollouts=rollouts)


def long_lease(**changes: object) -> Lease:
    sampling = NO_END.model_copy(update={"max_new_tokens": 40})
    return lease(seeds=4, sampling=sampling, **changes)


# ── proofs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def changed_words(proofs: bytes, **changes: int) -> bytes:
    words = np.frombuffer(proofs, dtype=">u2").copy()
    for where, value in changes.items():
        words[int(where.removeprefix("at_"))] = value
    return words.tobytes()


MALFORMED = {
    "none": lambda proofs: b"",
    "one byte less": lambda proofs: proofs[:-1],
    "one byte more": lambda proofs: proofs + b"\0",
    "one proof of two": lambda proofs: proofs[: 2 + 2 * 128],
    "all zero": lambda proofs: bytes(len(proofs)),
    "modulus 1": lambda proofs: changed_words(proofs, at_0=1),
    "modulus too large": lambda proofs: changed_words(proofs, at_0=65535),
    "coefficient not below the prime": lambda proofs: changed_words(proofs, at_5=PRIME),
    "in the second proof": lambda proofs: changed_words(proofs, at_130=65535),
}


@pytest.mark.parametrize("depth", ["full", "light"])
@pytest.mark.parametrize("name", MALFORMED)
def test_bytes_that_are_no_proofs_are_seen_without_a_prefill(name: str, depth: str) -> None:
    of = long_lease()
    cheat = with_proofs(of, 2, MALFORMED[name](submission(of).rollouts[2].proofs))
    verdict = judged(of, cheat, depth=depth)
    assert (verdict.reason, verdict.severity) == ("proofs.malformed", "certain")
    assert len(verdict.checks) < len(BEFORE_PREFILL)
    if "less" not in name and "more" not in name and name not in ("none", "one proof of two"):
        where = (2, 32) if name == "in the second proof" else (2, 0)
        assert (verdict.checks[-1].evidence["rollout"], verdict.checks[-1].evidence["token"]) == where


def constant(proofs: bytes) -> bytes:
    return proofs[:2] + b"\x40\x40" + bytes(len(proofs) - 4)


def nearly_constant(proofs: bytes) -> bytes:
    return proofs[:2] + b"\x40\x40" + bytes(len(proofs) - 6) + b"\0\1"


def test_a_proof_made_without_computing_is_forged() -> None:
    of = lease(sampling=NO_END)
    verdict = judged(of, with_proofs(of, 1, constant(submission(of).rollouts[1].proofs)))
    assert (verdict.reason, verdict.severity) == ("proofs.forged", "certain")
    assert "rollout 1" in verdict.message


def test_a_constant_in_disguise_is_no_proof_either() -> None:
    of = lease(sampling=NO_END)
    verdict = judged(of, with_proofs(of, 1, nearly_constant(submission(of).rollouts[1].proofs)))
    assert verdict.reason in ("proofs.forged", "proofs.mismatch")


def test_proofs_of_other_weights_are_a_mismatch_and_the_place_is_named() -> None:
    of = long_lease()
    other = proved(of, submission(of), 99.0).rollouts[3].proofs
    verdict = judged(of, with_proofs(of, 3, other))
    assert (verdict.reason, verdict.severity) == ("proofs.mismatch", "statistical")
    evidence = verdict.checks[-1].evidence
    assert evidence["rollout"] == 3
    assert evidence["exponent_mismatches"] > 0.5 * evidence["values"] / 4
    assert "rollout 3" in verdict.message


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_no_bytes_of_the_right_size_pass_for_proofs(data: st.DataObject) -> None:
    of = long_lease()
    honest = submission(of).rollouts[1].proofs
    words = np.frombuffer(honest, dtype=">u2").copy()
    where = data.draw(st.sampled_from(["one", "all"]))
    if where == "one":  # one coefficient is another: the polynomial is another everywhere
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(st.integers(0, 65_535).filter(lambda value: value != words[at]))
    else:
        seed = data.draw(st.integers(0, 2**32))
        words = np.random.default_rng(seed).integers(65_433, PRIME, len(words)).astype(">u2")
    verdict = judged(of, with_proofs(of, 1, words.tobytes()))
    assert verdict.outcome is Outcome.REJECTED
    assert verdict.reason in ("proofs.malformed", "proofs.forged", "proofs.mismatch")


def test_the_size_of_proofs_is_the_leases() -> None:
    of = long_lease(proof=ProofParameters(topk=16, rows=8))
    assert judged(of).outcome is Outcome.ACCEPTED
    usual = long_lease()
    assert judged(of, submission(usual)).reason == "proofs.malformed"


def test_leases_of_two_sizes_of_proofs_in_one_batch() -> None:
    leases = [long_lease(unit=1), long_lease(unit=2, proof=ProofParameters(topk=16, rows=8)), long_lease(unit=3)]
    verdicts = judge().verdicts([docket(of) for of in leases], loaded())
    assert [(v.unit, v.outcome) for v in verdicts] == [(unit, Outcome.ACCEPTED) for unit in (1, 2, 3)]


def test_the_surest_failure_decides_and_the_others_are_listed() -> None:
    """Wrong weights: the proofs differ (statistical), and the dice give other tokens beyond doubt (certain)."""
    of = lease(sampling=NO_END)
    verdict = judged(of, submission(of, completions(of, engine(99.0))))
    assert (verdict.reason, verdict.severity) == ("sampling.seed", "certain")
    failures = [check.check for check in verdict.checks if not check.passed]
    assert [each for each in failures if each != "likelihood"] == ["proofs", "logprobs", "second", "sampling"]


# ── likelihood ───────────────────────────────────────────────────────────────────────────────────────────────────


def redrawn(of: Lease, temperature: float) -> Submission:
    """Drawn at another temperature, under the lease's own dice; reported and proved as the lease's policy has it."""
    colder = of.model_copy(update={"sampling": of.sampling.model_copy(update={"temperature": temperature})})
    group = completions(colder)
    return proved(of, submission(of, [replace(each, logprobs=reported(of, each)) for each in group]))


def reported(of: Lease, completion: Completion) -> np.ndarray:
    [prefill] = engine().prefill([PrefillRequest(of.prompt_ids, completion.token_ids, of.sampling.temperature)])
    return prefill.logprobs


BLIND_TO_SEEDS = {
    "sampling": SeedTolerance(distance=2.0, floor=0.0),
    "noise": NoiseLimits(outside=ChannelLimits(rate=1e9, unit=1e9), distance=ChannelLimits(rate=1e9, unit=1e9)),
    "certain": CertainLimits(distance=2.0),
}


@pytest.mark.parametrize(("temperature", "side"), [(0.3, "likelier"), (4.0, "unlikelier")])
def test_picking_by_likelihood_shows_without_the_dice(temperature: float, side: str) -> None:
    of = lease(seeds=12, sampling=NO_END)
    verdict = judged(of, redrawn(of, temperature), judge(**BLIND_TO_SEEDS))
    assert (verdict.reason, verdict.severity) == ("likelihood.unlikely", "statistical")
    assert f"the tokens are {side} than drawn ones" in verdict.message
    assert abs(verdict.checks[-1].evidence["deviations"]) > 8


@pytest.mark.parametrize(
    ("tokens", "variance", "is_checked"), [(48, 1.0, True), (49, 1.0, False), (48, 1e6, False)], ids=str
)
def test_few_tokens_or_little_chance_are_no_statistic(tokens: int, variance: float, is_checked: bool) -> None:
    of = lease(seeds=3, sampling=NO_END)  # 48 tokens
    limits = LikelihoodLimits(deviations=2.0, tokens=tokens, variance=variance)
    verdict = judged(of, redrawn(of, 0.01), judge(**BLIND_TO_SEEDS, likelihood=limits))
    assert (verdict.reason == "likelihood.unlikely") is is_checked


def test_honest_deviations_are_those_of_a_bell() -> None:
    """Mean and spread over groups, also where the end of the sequence stops some rollouts early."""
    dockets = [docket(lease(unit, seeds=8)) for unit in range(24)]
    found = [
        float(check.evidence["deviations"])
        for verdict in judge().verdicts(dockets, loaded())
        for check in verdict.checks
        if check.check == "likelihood"
    ]
    assert len(found) == 24
    assert abs(np.mean(found)) < 4 / 24**0.5
    assert 0.5 < np.std(found) < 1.6


# ── the record ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("channel", "reason"),
    [
        ("outside", "sampling.drift"), ("distance", "sampling.drift"), ("exponents", "proofs.drift"),
        ("mantissa", "proofs.drift"), ("logprobs", "logprobs.mismatch"), ("bias", "logprobs.mismatch"),
    ],
)  # fmt: skip
def test_more_than_rounding_explains_together_with_earlier_work_fails(channel: str, reason: str) -> None:
    off = Tally(tokens=100_000, channels={channel: Sums(seen=2000.0, expected=500.0)})
    verdict = judged(lease(), record=off)
    assert (verdict.reason, verdict.severity) == (reason, "statistical")
    assert verdict.checks[-1].evidence["channel"] == channel
    fine = Tally(tokens=100_000, channels={channel: Sums(seen=510.0, expected=500.0)})
    assert judged(lease(), record=fine).outcome is Outcome.ACCEPTED


def test_a_verdict_counts_what_its_audit_saw() -> None:
    verdict = judged(lease())
    tokens = sum(len(each.token_ids) for each in completions(lease()))
    assert verdict.tally.tokens == verdict.generated_tokens == tokens
    assert verdict.tally.proofs == 12
    assert verdict.tally.of("exponents").seen == verdict.tally.of("outside").seen == 0.0
    assert verdict.tally.of("outside").expected > 10 * BUILT_IN[KEY].noise.outside.rate
    assert set(verdict.tally.channels) == {*NoiseLimits.model_fields, "accidents"}
    bad = judged(lease(), submission(lease(), completions(lease(), seeds=range(12))))
    assert bad.outcome is Outcome.REJECTED
    assert bad.tally.of("outside").seen > 10
    assert judged(lease(), b"garbage").tally == judged(lease(), depth="light").tally == Tally()  # type: ignore[arg-type]


# ── light audits ─────────────────────────────────────────────────────────────────────────────────────────────────


class NoPrefill(type(engine())):  # type: ignore[misc]
    def prefill(self, requests, proof=None):  # type: ignore[no-untyped-def]
        raise AssertionError("a light audit needs no prefill")


def test_a_light_audit_makes_the_cheap_checks_and_the_reward_without_a_prefill() -> None:
    by, policy = judge(), replace(loaded(), engine=NoPrefill())
    good, bad = docket(lease(1), depth="light"), docket(lease(2), b"garbage", depth="light")
    one, two = by.verdicts([good, bad], policy)
    assert (one.outcome, one.depth, two.depth) == (Outcome.ACCEPTED, "light", "light")
    assert [check.check for check in one.checks] == [*(check.__name__ for check in BEFORE_PREFILL), "reward"]
    full = judged(lease(1))
    assert (full.depth, one.rewards, one.generated_tokens) == ("full", full.rewards, full.generated_tokens)
    assert two.reason == "envelope.malformed"


def test_light_and_full_in_one_batch() -> None:
    cheat = submission(lease(2), completions(lease(2), seeds=range(12)))
    dockets = [docket(lease(1), depth="light"), docket(lease(2), cheat), docket(lease(3))]
    verdicts = judge().verdicts(dockets, loaded())
    assert [v.outcome.value for v in verdicts] == ["accepted", "rejected", "accepted"]
    cheap, all_ = len(BEFORE_PREFILL), len(BEFORE_PREFILL) + len(AFTER_PREFILL)
    assert [len(v.checks) for v in verdicts] == [cheap + 1, all_ + 1, all_ + 1]  # a second look, and the reward


# ── the environment ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("depth", ["full", "light"])
def test_a_lease_of_another_environment_is_not_judged(depth: str) -> None:
    verdict = judged(lease(environment_digest="f" * 64), depth=depth)
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "machinery.environment")


def test_equal_completions_are_scored_once_and_all_get_it() -> None:
    class Counting(LengthEnvironment):
        calls = 0

        def score(self, task, completion):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().score(task, completion)

    cold = lease(seeds=12, sampling=NO_END.model_copy(update={"temperature": 0.001}))
    environment = Counting()
    verdict = judged(cold, by=judge(environment))
    distinct = {each.token_ids.tobytes() for each in completions(cold)}
    assert environment.calls == len(distinct) < 12
    assert [reward.value for reward in verdict.rewards] == [16.0] * 12
