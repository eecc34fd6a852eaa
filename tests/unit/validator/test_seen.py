"""Copies: what is one, what is not, and what is forgotten."""

from __future__ import annotations

import msgspec
import pytest
from honest import completions, docket, judge, lease, loaded, long_lease, proved, submission
from hypothesis import given
from hypothesis import strategies as st

from shoal.engines import Completion
from shoal.protocol import Lease, Outcome, SamplingParameters, Submission, Verdict
from shoal.validator import Judge
from shoal.validator.case import PROOF_BYTES_TOLD_APART, Case, Mark, SeenWork
from shoal.validator.profiles import BUILT_IN, AccidentLimits

# Hot, and with an end token that is never drawn: every rollout is improbable, and of the same length.
LONG = SamplingParameters(temperature=5.0, max_new_tokens=16, eos_token_id=500)
PROFILE = BUILT_IN["scripted/cpu/float32"]


def hot(unit: int = 5, **changes: object) -> Lease:
    return lease(unit, seeds=4, sampling=LONG, **changes)


def judged(by: Judge, of: Lease, what: Submission | None = None, **audit: object) -> Verdict:
    [verdict] = by.verdicts([docket(of, what, **audit)], loaded())
    return verdict


def case(of: Lease, what: Submission) -> Case:
    return Case(of, what, "", 96, 64, PROFILE)


def copied_group(of: Lease, source: Lease) -> Submission:
    """The completions of one lease, handed in for another (whose prompt is the same)."""
    return submission(of, completions(source))


def test_a_rollout_twice_in_one_submission_is_a_copy() -> None:
    group = completions(hot())
    group[3] = group[1]
    verdict = judged(judge(), hot(), submission(hot(), group))
    assert (verdict.reason, verdict.severity) == ("duplicate.rollout", "certain")
    assert verdict.checks[-1].evidence["rollout"] == 3


@pytest.mark.parametrize("depth", ["full", "light"])
def test_a_rollout_of_an_earlier_submission_or_of_the_same_batch_is_a_copy_whoever_made_it(depth: str) -> None:
    by, first, second = judge(), hot(5), hot(6, prompt_ids=hot(5).prompt_ids)
    dockets = [docket(first), docket(second, copied_group(second, first), depth="light")]
    one, two = judge().verdicts(dockets, loaded())
    assert (one.outcome, two.reason) == (Outcome.ACCEPTED, "duplicate.rollout")
    assert judged(by, first).outcome is Outcome.ACCEPTED
    verdict = judged(by, second, copied_group(second, first), depth=depth)
    assert verdict.reason == "duplicate.rollout"
    assert "copied" in verdict.message


@pytest.mark.parametrize(("depth", "reason"), [("light", ""), ("full", "sampling.seed")])
def test_what_a_light_audit_accepts_or_any_rejects_is_not_remembered(depth: str, reason: str) -> None:
    """Else who hands in what another is about to could have the other banned for a copy."""
    by, first, second = judge(), hot(5), hot(6, prompt_ids=hot(5).prompt_ids)
    assert judged(by, second, copied_group(second, first), depth=depth).reason == reason
    assert not by.seen._whose
    assert judged(by, first).outcome is Outcome.ACCEPTED


def test_judging_again_and_issuing_again_are_no_copies() -> None:
    """A claim that was lost and given again; a unit that another node does again, under the same seeds."""
    by = judge()
    again = hot(node="m" * 32, lease="lease-again", attempt=1)
    for of in (hot(), hot(), again):
        assert judged(by, of).outcome is Outcome.ACCEPTED


def test_equal_rollouts_that_are_probable_are_ordinary() -> None:
    by, cold = judge(), SamplingParameters(temperature=0.001, max_new_tokens=16, eos_token_id=500)
    first = lease(5, seeds=8, sampling=cold)
    second = lease(6, seeds=8, sampling=cold, prompt_ids=first.prompt_ids)
    tokens = {each.token_ids.tobytes() for of in (first, second) for each in completions(of)}
    assert len(tokens) < 8
    assert judged(by, first).outcome is judged(by, second).outcome is Outcome.ACCEPTED


def test_a_proof_handed_in_for_other_tokens_is_a_copy() -> None:
    by, first, second = judge(), hot(5), hot(6)
    assert judged(by, first).outcome is Outcome.ACCEPTED
    borrowed = [
        msgspec.structs.replace(mine, proofs=theirs.proofs)
        for mine, theirs in zip(submission(second).rollouts, submission(first).rollouts, strict=True)
    ]
    cheat = msgspec.structs.replace(submission(second), rollouts=borrowed)
    verdict = judged(by, second, cheat, depth="light")
    assert (verdict.reason, verdict.severity) == ("duplicate.proof", "statistical")
    assert judged(by, second, depth="light").outcome is Outcome.ACCEPTED


def test_nobody_becomes_a_copyist_by_a_proof_that_another_submitted_before_as_an_accident() -> None:
    """In coarse formats one wrong proof in a long group is accepted. Whoever guesses the first tokens of another's
    rollout can put its proof there."""
    by, first = judge(limits={"accidents": AccidentLimits(first=0.02, later=2e-3)}), long_lease()
    second = first.model_copy(update={"unit": 6, "prompt_ids": (*first.prompt_ids, 90)})
    mine, theirs = submission(first), submission(second).rollouts[0].proofs
    one = mine.rollouts[0]
    planted = msgspec.structs.replace(one, proofs=theirs[:PROOF_BYTES_TOLD_APART] + one.proofs[PROOF_BYTES_TOLD_APART:])
    verdict = judged(by, first, msgspec.structs.replace(mine, rollouts=[planted, *mine.rollouts[1:]]))
    assert (verdict.outcome, verdict.tally.accidents) == (Outcome.ACCEPTED, 1)
    assert judged(by, second).outcome is Outcome.ACCEPTED


def test_rollouts_that_part_late_may_have_the_same_proof() -> None:
    """All of its values may be of the states that they share; those that differ from the first on share none."""
    group = completions(hot())
    other = group[0].token_ids.copy()
    other[-1] = (other[-1] + 1) % 90
    group[1] = Completion(other, group[0].logprobs, "length")
    twins = proved(hot(), submission(hot(), group))
    assert twins.rollouts[0].proofs == twins.rollouts[1].proofs
    assert SeenWork().copied(case(hot(), twins).marks) is None
    other[-2] = (other[-2] + 1) % 90
    group[1] = Completion(other.copy(), group[0].logprobs, "length", twins.rollouts[0].proofs)
    assert SeenWork().copied(case(hot(), submission(hot(), group)).marks) is None
    other[0] = (other[0] + 1) % 90
    group[1] = Completion(other, group[0].logprobs, "length", twins.rollouts[0].proofs)
    group[0] = Completion(group[0].token_ids, group[0].logprobs, "length", twins.rollouts[0].proofs)
    mark = SeenWork().copied(case(hot(), submission(hot(), group)).marks)
    assert mark is not None
    assert (mark.kind, mark.place) == ("proof", (1, 0))


def test_short_and_constant_proofs_tell_nothing() -> None:
    short = lease(sampling=SamplingParameters(temperature=1.0, max_new_tokens=1, eos_token_id=500))
    assert {len(rollout.proofs) for rollout in submission(short).rollouts} == {18}  # 8 values each
    assert [mark.kind for mark in case(short, submission(short)).marks] == []
    rollouts = [
        msgspec.structs.replace(each, proofs=each.proofs[:4] + bytes(len(each.proofs) - 4))
        for each in submission(hot()).rollouts
    ]
    flat = msgspec.structs.replace(submission(hot()), rollouts=rollouts)
    assert {mark.kind for mark in case(hot(), flat).marks} == {"rollout"}
    assert {mark.kind for mark in case(hot(), submission(hot())).marks} == {"rollout", "proof"}


def test_the_index_is_bounded_and_forgets_what_was_met_least_lately() -> None:
    seen = SeenWork(capacity=3)
    for what in (b"a", b"b", b"c", b"a", b"d"):
        seen.remember([Mark("rollout", what, b"1", (0, 0))])
    assert len(seen._whose) == 3
    found = [what for what in (b"a", b"b", b"c", b"d") if seen.copied([Mark("rollout", what, b"2", (0, 0))])]
    assert found == [b"a", b"c", b"d"]


names = st.sampled_from([b"a", b"b", b"c"])


@given(st.lists(st.lists(st.tuples(names, names), max_size=4), max_size=6))
def test_a_mark_is_copied_exactly_if_another_had_it_first(groups: list[list[tuple[bytes, bytes]]]) -> None:
    """Against the plain statement, submissions accepted one after the other."""
    seen, owners = SeenWork(), dict[bytes, bytes]()
    for group in groups:
        marks = [Mark("rollout", what, whose, (index, 0)) for index, (what, whose) in enumerate(group)]
        trial, first_copy = dict(owners), None
        for mark in marks:
            if trial.setdefault(mark.what, mark.whose) != mark.whose and first_copy is None:
                first_copy = mark
        assert seen.copied(marks) == first_copy
        if first_copy is None:
            seen.remember(marks)
            owners = trial
