"""Work in coarse arithmetic under limits measured on it: honest groups pass, cheats fail, alone or by their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from honest import EOS, POLICY, engine, weights

from shoal.engines import GenerationRequest
from shoal.engines.groups import submission_of
from shoal.engines.scripted import ScriptedEngine
from shoal.hub.state.reputation import recent
from shoal.protocol import ProofParameters, SamplingParameters, Sums, Tally, pack_logprobs
from shoal.sampling import uniforms
from shoal.validator.bands import Bands, limits_from
from shoal.validator.case import Case, replay_all
from shoal.validator.checks import AFTER_PREFILL, run_all
from shoal.validator.evidence import COUNT_BETS, STRIKE, SUM_BETS, log_evidence
from shoal.validator.profiles import CHANNELS, Profile
from shoal.validator.specimens import Terms

KIND = "scripted/cpu/bfloat16"
NOISE = 0.1
Values = npt.NDArray[np.float32]


class Rounding(ScriptedEngine):
    """Logits that are a little off, by noise that follows from the place."""

    def _step(self, sequence: Sequence[int]) -> tuple[Values, Values]:
        logits_V, hidden_H = super()._step(sequence)
        noise_V = uniforms(hash(tuple(sequence)) % 2**63, 0, len(logits_V)) - 0.5
        return (logits_V + NOISE * noise_V).astype(np.float32), hidden_H


@cache
def groups(first: int, count: int) -> list[Case]:
    """Groups of a worker that rounds, as a validator sees that does not."""
    worker = Rounding()
    worker.load_policy(POLICY, {tensor.name: tensor for tensor in weights(3.0)})
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=40, eos_token_id=EOS)
    terms = Terms("coarse", 8, sampling, ProofParameters(), KIND)
    leases = [terms.lease(n, (10 + n % 80, 20 + n // 80, 30)) for n in range(first, first + count)]
    asked = [GenerationRequest(each.prompt_ids, each.seed_numbers, each.sampling) for each in leases]
    drawn, clean = worker.generate(asked, leases[0].proof), engine()
    cases = [
        Case(lease, submission_of(lease, group, "x"), "", clean.vocabulary_size, clean.hidden_size, Profile(key=KIND))
        for lease, group in zip(leases, drawn, strict=True)
    ]
    for case, replay in zip(cases, replay_all(clean, cases), strict=True):
        assert not isinstance(replay, Exception)
        case.replay = replay
    return cases


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
    for case in groups(100, 60):
        judged = replace(case, profile=limits(), record=record)
        assert outcome(judged) == ""
        record = recent(record.plus(judged.tally))


def test_log_probabilities_far_off_for_one_token_in_twenty_are_a_strike_within_a_few_groups() -> None:
    """Groups of a hundred tokens: one with a single such token passes, the others do not."""
    random, record, found = np.random.default_rng(0), Tally(), list[str]()
    for case in groups(100, 20):
        lie = saying(case, lambda values, _: values - 1.4 * (random.random(len(values)) < 0.05))
        found.append(outcome(replace(lie, record=record)))
        record = recent(record.plus(lie.tally))
        if found[-1] in ("logprobs.mismatch", "sampling.seed"):
            break
    assert len(found) <= 4
    assert found.count("") <= 2


def test_log_probabilities_that_lean_by_rollout_up_and_down_fail() -> None:
    """Their mean over the group is right, and their size hardly larger: what a rollout is trained by is not."""
    for case in groups(100, 20):
        assert outcome(saying(case, lambda values, n: values + 0.05 * (-1) ** n)) != ""


def test_what_leans_less_is_found_by_the_record() -> None:
    record, passed = Tally(), 0
    for case in groups(100, 60):
        lie = replace(saying(case, lambda values, n: values + 0.02 * (-1) ** n), record=record)
        if outcome(lie):
            assert outcome(lie) == "logprobs.mismatch"
            break
        passed, record = passed + 1, recent(record.plus(lie.tally))
    assert 0 < passed < 50


@pytest.mark.parametrize("mean", [0.1, 3.0, 200.0])
@pytest.mark.parametrize("bet", COUNT_BETS)
def test_the_mean_evidence_of_honest_counts_is_one(mean: float, bet: float) -> None:
    """Of a Poisson number, for every bet: so the product over submissions exceeds 1/α with a probability of α."""
    spread = range(int(mean * math.exp(bet) + 40 * math.sqrt(mean * math.exp(bet)) + 60))
    terms = [k * bet - math.expm1(bet) * mean - mean + k * math.log(mean) - math.lgamma(k + 1) for k in spread]
    assert sum(map(math.exp, terms)) == pytest.approx(1.0, abs=1e-6)


def test_honest_sums_with_a_shared_error_are_struck_less_often_than_promised() -> None:
    """Exponential lumps, a Poisson number of them, and a relative error of 10 % that each group shares."""
    random = np.random.default_rng(1)
    mean, shared, nodes, struck = 40.0, 0.1, 2000, 0
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


def test_the_level_allows_a_hundredth_of_a_false_ban_in_ten_thousand_nodes() -> None:
    """Each of 10³ beginnings exceeds it with 10⁻⁶ at most in all channels; a ban takes two, of fresh work each."""
    strike = 1000 * len(CHANNELS) * math.exp(-STRIKE)
    assert 10_000 * strike**2 <= 0.0101
    assert 0 < SUM_BETS.min() < SUM_BETS.max() < 1
