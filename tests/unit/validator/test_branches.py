"""Which branches are looked at, what they cost, and that honest work shows no gain by them, whatever rewards follow."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from honest import EOS, SAMPLING, LengthEnvironment, audit_job, cases, engine, lease, loaded, rounding, submission

from kit import Patch
from shoal.engines import GenerationRequest
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import ResourceError, ScoringFailure
from shoal.protocol import Branches, GainEvidence, Lease, Outcome, RolloutReward, Severity
from shoal.runtime.clock import ManualClock
from shoal.validator import branches
from shoal.validator.branches import Branch, BranchChecker, block_around, branch_of, by_tolerance, differences
from shoal.validator.case import Case
from shoal.validator.judge import Judge
from shoal.validator.profiles import BUILT_IN, ChannelLimits, LogprobLimits, NoiseLimits, Profile
from shoal.validator.rewards import Group, Scored

EXACT = BUILT_IN["scripted/cpu/float32"]
ANY = NoiseLimits(**{name: ChannelLimits(rate=1e9, unit=1e9) for name in NoiseLimits.model_fields})
WIDE = EXACT.model_copy(update={"sampling": replace(EXACT.sampling, distance=1.0), "noise": ANY})


def case_of(of: Lease, by: ScriptedEngine | None = None, profile: Profile = WIDE) -> Case:
    return cases([of], by or rounding(), profile)[0]


@cache
def nth_case(unit: int) -> Case:
    return case_of(lease(unit=unit, seeds=32, prompt_ids=(10 + unit % 80, 20 + unit // 80, 30)))


def by_length(groups: Sequence[Group]) -> list[Scored | ScoringFailure]:
    """The reward that short completions would look reward_steering by, if places were chosen carelessly."""
    return [Scored(tuple(RolloutReward(value=float(len(each.tokens))) for each in group.rollouts)) for group in groups]


def rewards_of(case: Case) -> tuple[RolloutReward, ...]:
    [scored] = by_length([Group(case.lease, case.rollouts)])
    assert isinstance(scored, Scored)
    return scored.rewards


def test_the_block_of_a_position() -> None:
    asked = [(0, 8, 0), (7, 8, 0), (2, 8, 3), (3, 8, 3), (12, 4, 1), (15, 16, 16)]  # position, size, phase
    assert [block_around(*each) for each in asked] == [(0, 8), (0, 8), (0, 3), (3, 11), (9, 13), (0, 16)]


def test_the_first_token_by_tolerance_in_the_last_block_is_where_the_branch_begins() -> None:
    case = case_of(lease(seeds=32))
    for rollout, length in enumerate(case.lengths):
        start = int(case.starts[rollout])
        places = np.flatnonzero(by_tolerance(case)[start : start + length]).tolist()
        begin, end = block_around(length - 1, 4, 1)
        inside = [place for place in places if place >= begin]
        look = branch_of(case, rollout, 4, 1)
        assert (look.token if look else None) == (inside[0] if inside else None)
        if look is not None:
            assert look.limit == min(end, SAMPLING.max_new_tokens) - look.token


def test_a_branch_is_what_the_seed_gives_by_the_validators_own_interval() -> None:
    """From the beginning it is the honest completion; from a token on, that with the tokens before it kept."""
    of, clean = lease(seeds=4), engine()
    case = case_of(of)
    honest = clean.generate([GenerationRequest(of.prompt_ids, of.seed_numbers, of.sampling)])[0]
    for rollout in range(4):
        [[whole]] = clean.generate([Branch(case, rollout, 0, 12).request(12)])
        assert whole.token_ids.tolist() == honest[rollout].token_ids.tolist()
        cut = min(3, len(honest[rollout].token_ids) - 1)
        kept = case_of(of, clean)
        [[rest]] = clean.generate([Branch(kept, rollout, cut, 12).request(12 - cut)])
        assert rest.token_ids.tolist() == honest[rollout].token_ids[cut:].tolist()


def test_no_branch_is_asked_for_tokens_beyond_its_leases() -> None:
    """The model's context may end there: beyond it an engine with learned positions fails."""
    asked: list[GenerationRequest] = []

    class Asked(ScriptedEngine):
        def generate(self, requests, proof=None):  # type: ignore[no-untyped-def]
            asked.extend(requests)
            return engine().generate(requests, proof)

    case = nth_case(0)
    BranchChecker(time_share=1e9, rng=random.Random(1)).look([(case, rewards_of(case), 1.0)], Asked(), by_length)
    room = len(case.lease.prompt_ids) + SAMPLING.max_new_tokens
    assert len({len(each.prompt_ids) for each in asked}) > 1
    assert {len(each.prompt_ids) + each.sampling.max_new_tokens for each in asked} == {room}


def test_one_branch_for_rollouts_that_begin_alike() -> None:
    """All of a group draw their first token from the same distribution: where rounding favours the better of two
    answers, it does so in each of them, and that is one piece of evidence."""
    case = case_of(lease(seeds=32))
    low, high = case.replay.low.copy(), case.replay.high.copy()
    low[case.starts], high[case.starts] = 0.0, 0.0  # the first tokens pass only by the tolerance
    case.replay = replace(case.replay, low=low, high=high)
    looked = {look.rollout for seed in range(8) for look in BranchChecker(rng=random.Random(seed))._chosen(case, 1.0)}
    assert len(list(BranchChecker()._chosen(case, 1.0))) == 1
    assert len(looked) > 3, "any of them, so that nobody has one that is looked at for all"


def test_branch_that_does_not_end_in_its_block_is_dropped() -> None:
    case = case_of(lease(seeds=1))
    look = Branch(case, 0, 0, 3)
    assert look.ended(np.array([5, 6, 7], dtype=np.int32)) is None
    ended = look.ended(np.array([5, 6, EOS], dtype=np.int32))
    assert (ended.token_ids.tolist(), ended.finish) == ([5, 6, EOS], "eos")
    at_the_limit = Branch(case, 0, 0, 12).ended(np.arange(5, 17, dtype=np.int32))
    assert at_the_limit.finish == "length"


def test_differences_are_shares_of_the_range_that_all_rewards_have() -> None:
    assert differences([0.0, 10.0, 4.0], [(0, 5.0), (1, 10.0), (2, 0.0)]) == (-0.5, 0.4)
    assert differences([1.0, 1.0], [(0, 1.0)]) == ()


@pytest.mark.parametrize("longest", [512, 8])
def test_honest_work_gains_nothing_even_where_rewards_follow_from_lengths(longest: int, monkeypatch: Patch) -> None:
    """Of 300 looks the sum of differences is within 4 standard errors of 0: at whole completions, and at blocks."""
    monkeypatch.setattr(branches, "LONGEST", longest)
    branch_checker, found = BranchChecker(time_share=1e9, rng=random.Random(1)), list[float]()
    unit, looked = 0, 0
    while looked < 300:
        case = nth_case(unit)
        [seen] = branch_checker.look([(case, rewards_of(case), 1.0)], engine(), by_length)
        found += seen.differences
        looked, unit = looked + seen.looked, unit + 1
    assert len(found) > 50
    assert abs(np.sum(found)) < 4 * np.sqrt(np.square(found).sum())


@pytest.mark.parametrize("longest", [512, 8])
def test_about_the_share_of_the_audited_tokens_is_decoded(longest: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(branches, "LONGEST", longest)
    branch_checker, audited, decoded = BranchChecker(time_share=1e9, rng=random.Random(2)), 0, 0
    for unit in range(30):
        case = nth_case(unit)
        [seen] = branch_checker.look([(case, rewards_of(case), 0.1)], engine(), by_length)
        audited, decoded = audited + len(case.tokens), decoded + seen.tokens
    assert 0.02 * audited < decoded < 0.15 * audited


def test_no_more_time_is_taken_than_its_share() -> None:
    clock = ManualClock()

    class Slow(ScriptedEngine):
        def generate(self, requests, proof=None):  # type: ignore[no-untyped-def]
            clock.advance(5.0)
            return engine().generate(requests, proof)

    branch_checker, looked, case = BranchChecker(clock=clock, rng=random.Random(3)), 0, nth_case(0)
    for _ in range(200):
        clock.advance(1.0)
        [seen] = branch_checker.look([(case, rewards_of(case), 1.0)], Slow(), by_length)
        looked += seen.looked > 0
    assert looked == 2  # 5 s each, of 210 s; none in the first 120 s


def test_look_without_time_or_that_fails_is_made_up_for_with_later_groups_of_its_node() -> None:
    clock, case, other = ManualClock(), nth_case(0), nth_case(1)
    other.lease = other.lease.model_copy(update={"node": "another"})
    branch_checker, every = (
        BranchChecker(clock=clock, rng=random.Random(4)),
        len(list(BranchChecker()._chosen(case, 1.0))),
    )

    def looked(of: Case, share: float, by: ScriptedEngine | None = None) -> int:
        return branch_checker.look([(of, rewards_of(of), share)], by or engine(), by_length)[0].looked

    assert [looked(case, 0.25) for _ in range(6)] == [0] * 6  # in the first seconds
    clock.advance(1000.0)
    assert looked(case, 0.25, Full()) == 0
    assert looked(other, 0.0) == 0, "nothing is owed to it"
    found = [looked(case, share) for share in (0.25, *[0.0] * 5)]
    assert found[2] == every, "after a quarter and a half, because the calls were quick; two groups were owed"
    assert 0 < sum(found[:2]) < 2 * every
    assert found[4:] == [0, 0], "the last quarter is paid"
    branch_checker._owe([(case, 1.0)] * 500)
    assert branch_checker._owed == {case.lease.node: branches.MOST_OWED}


class Full(ScriptedEngine):
    def generate(self, requests, proof=None):  # type: ignore[no-untyped-def]
        raise ResourceError("no memory")


def test_an_engine_that_fails_ends_no_audit() -> None:
    case = nth_case(0)
    assert BranchChecker(time_share=1e9).look([(case, rewards_of(case), 1.0)], Full(), by_length) == [Branches()]


def judge_with(branch_checker: BranchChecker | None) -> Judge:
    profile = WIDE.model_copy(update={"logprobs": LogprobLimits(largest=99.0)})
    return Judge(LengthEnvironment(), {"scripted/cpu/float32": profile}, branch_checker=branch_checker)  # type: ignore[arg-type]


def handed_in(of: Lease):  # type: ignore[no-untyped-def]
    [group] = rounding().generate([GenerationRequest(of.prompt_ids, of.seed_numbers, of.sampling)], of.proof)
    return submission(of, group)


def test_the_verdict_tells_what_the_branches_showed() -> None:
    of = lease(seeds=32)
    branch_checker = BranchChecker(time_share=1e9, rng=random.Random(5))
    [verdict] = judge_with(branch_checker).verdicts([audit_job(of, handed_in(of), look_share=1.0)], loaded())
    assert verdict.outcome is Outcome.ACCEPTED
    looked = [check.evidence["looked"] for check in verdict.checks if check.check == "branches"]
    assert looked == [verdict.branches.looked]
    assert min(verdict.branches.looked, verdict.branches.tokens) > 0


def test_a_node_whose_evidence_suffices_is_struck() -> None:
    of, steered = lease(seeds=32), GainEvidence().after([1.0] * 60)
    [verdict] = judge_with(None).verdicts([audit_job(of, handed_in(of), gains=steered)], loaded())
    found = (verdict.outcome, verdict.reason, verdict.severity)
    assert found == (Outcome.REJECTED, "sampling.steered", Severity.STATISTICAL)
    assert "60 unequal pairs" in verdict.message


def test_distrusted_node_is_unsure_only_with_tokens_by_tolerance() -> None:
    of = lease(seeds=32)
    audit_jobs = [audit_job(of, handed_in(of), distrusted="newcomers"), audit_job(of, distrusted="newcomers")]
    verdicts = judge_with(BranchChecker()).verdicts(audit_jobs, loaded())
    found = [(each.outcome, each.reason) for each in verdicts]
    assert found == [(Outcome.UNSURE, "sampling.distrusted"), (Outcome.ACCEPTED, "")]


def test_bits_that_may_be_chosen_by_hand() -> None:
    """Of tokens with u near no edge, near one and between two: 0, 1 and log2 3 bits."""
    case = case_of(lease(seeds=1))
    assert case.replay is not None
    count = len(case.tokens)
    wide, narrow = np.zeros(count), np.zeros(count)
    case.replay = replace(case.replay, uniforms=np.full(count, 0.5), low=wide, high=np.ones(count))
    assert branches.choice_bits([case], 0.1) == (0.0, 0.0)
    case.replay = replace(case.replay, low=narrow + 0.45)
    assert branches.choice_bits([case], 0.1) == (1.0, 1.0)
    case.replay = replace(case.replay, high=narrow + 0.55)
    assert branches.choice_bits([case], 0.1) == (1.0, pytest.approx(np.log2(3)))
