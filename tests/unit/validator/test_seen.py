"""Copies: what is one, what is not, and what is forgotten. Shown progress: honest chunks pass wherever they are cut,
wrong ones fail for certain, what is doubtful says nothing; a submission begins with what was shown of it."""

import honest
import msgspec
import numpy as np
import pytest
from honest import LengthEnvironment, audit_job, completions, engine, lease, loaded, long_lease, proved, submission
from hypothesis import given
from hypothesis import strategies as st

from shoal.engines import Completion, LoadedPolicy
from shoal.protocol import Lease, Outcome, ProofParameters, SamplingParameters, Severity, Verdict
from shoal.protocol.submission import Rollout, ShownPrefix, Submission, pack_tokens, shown_digest
from shoal.runtime.clock import ManualClock
from shoal.toploc import split_proofs
from shoal.validator.case import DISTINCT_PROOF_BYTES, Case, Mark, SeenWork
from shoal.validator.judge import Judge
from shoal.validator.profiles import BUILT_IN, AccidentLimits, Profile, Profiles, load_profiles

# Hot, and with an end token that is never drawn: every rollout is improbable, and of the same length.
LONG = SamplingParameters(temperature=5.0, max_new_tokens=16, eos_token_ids=(500,))
PROFILE = BUILT_IN["scripted/cpu/float32"]


def hot(unit: int = 5, **changes: object) -> Lease:
    return lease(unit, seeds=4, sampling=LONG, **changes)


def judged(by: Judge, of: Lease, what: Submission | None = None, **audit: object) -> Verdict:
    [verdict] = by.verdicts([audit_job(of, what, **audit)], loaded())
    return verdict


def case(of: Lease, what: Submission) -> Case:
    return Case(of, what, "", 96, 64, PROFILE)


def copied_group(of: Lease, source: Lease) -> Submission:
    """The completions of one lease, handed in for another (whose prompt is the same)."""
    return submission(of, completions(source))


def test_a_rollout_twice_in_one_submission_is_a_copy() -> None:
    group = completions(hot())
    group[3] = group[1]
    verdict = judged(honest.judge(), hot(), submission(hot(), group))
    assert (verdict.reason, verdict.severity) == ("duplicate.rollout", "certain")
    assert verdict.checks[-1].evidence["rollout"] == 3


@pytest.mark.parametrize("depth", ["full", "light"])
def test_rollout_of_an_earlier_submission_or_of_the_same_batch_is_a_copy(depth: str) -> None:
    by, first, second = honest.judge(), hot(5), hot(6, prompt_ids=hot(5).prompt_ids)
    audit_jobs = [audit_job(first), audit_job(second, copied_group(second, first), depth="light")]
    one, two = honest.judge().verdicts(audit_jobs, loaded())
    assert (one.outcome, two.reason) == (Outcome.ACCEPTED, "duplicate.rollout")
    assert judged(by, first).outcome is Outcome.ACCEPTED
    verdict = judged(by, second, copied_group(second, first), depth=depth)
    assert verdict.reason == "duplicate.rollout"
    assert "a copy" in verdict.message


@pytest.mark.parametrize(("depth", "reason"), [("light", ""), ("full", "sampling.seed")])
def test_light_or_rejected_submissions_are_not_remembered(depth: str, reason: str) -> None:
    """Else who hands in what another is about to could have the other banned for a copy."""
    by, first, second = honest.judge(), hot(5), hot(6, prompt_ids=hot(5).prompt_ids)
    assert judged(by, second, copied_group(second, first), depth=depth).reason == reason
    assert not by.seen._whose
    assert judged(by, first).outcome is Outcome.ACCEPTED


def test_judging_again_and_issuing_again_are_no_copies() -> None:
    """A claim that was lost and given again; a unit that another node does again, under the same seeds."""
    by = honest.judge()
    again = hot(node="m" * 32, lease="lease-again", attempt=1)
    for of in (hot(), hot(), again):
        assert judged(by, of).outcome is Outcome.ACCEPTED


def test_equal_rollouts_that_are_probable_are_ordinary() -> None:
    by, cold = honest.judge(), SamplingParameters(temperature=0.001, max_new_tokens=16, eos_token_ids=(500,))
    first = lease(5, seeds=8, sampling=cold)
    second = lease(6, seeds=8, sampling=cold, prompt_ids=first.prompt_ids)
    tokens = {each.token_ids.tobytes() for of in (first, second) for each in completions(of)}
    assert len(tokens) < 8
    assert judged(by, first).outcome is judged(by, second).outcome is Outcome.ACCEPTED


def test_proof_submitted_for_other_tokens_is_a_copy() -> None:
    by, first, second = honest.judge(), hot(5), hot(6)
    assert judged(by, first).outcome is Outcome.ACCEPTED
    borrowed = [
        msgspec.structs.replace(mine, proofs=theirs.proofs)
        for mine, theirs in zip(submission(second).rollouts, submission(first).rollouts, strict=True)
    ]
    cheat = msgspec.structs.replace(submission(second), rollouts=borrowed)
    verdict = judged(by, second, cheat, depth="light")
    assert (verdict.reason, verdict.severity) == ("duplicate.proof", "statistical")
    assert judged(by, second, depth="light").outcome is Outcome.ACCEPTED


def test_accidental_proof_of_another_makes_no_copyist() -> None:
    """In coarse formats one wrong proof in a long group is accepted. Whoever guesses the first tokens of another's
    rollout can put its proof there."""
    by, first = honest.judge(limits={"accidents": AccidentLimits(first=0.02, later=2e-3)}), long_lease()
    second = first.model_copy(update={"unit": 6, "prompt_ids": (*first.prompt_ids, 90)})
    mine, theirs = submission(first), submission(second).rollouts[0].proofs
    one = mine.rollouts[0]
    planted = msgspec.structs.replace(one, proofs=theirs[:DISTINCT_PROOF_BYTES] + one.proofs[DISTINCT_PROOF_BYTES:])
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
    assert (mark.kind, mark.place) == ("proof", (1, 0))


def test_short_and_constant_proofs_tell_nothing() -> None:
    short = lease(sampling=SamplingParameters(temperature=1.0, max_new_tokens=1, eos_token_ids=(500,)))
    assert {len(rollout.proofs) for rollout in submission(short).rollouts} == {18}  # 8 values each
    assert [mark.kind for mark in case(short, submission(short)).marks] == []
    honest, replace = submission(hot()), msgspec.structs.replace
    rollouts = [replace(each, proofs=each.proofs[:4] + bytes(len(each.proofs) - 4)) for each in honest.rollouts]
    flat = replace(honest, rollouts=rollouts)
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


ROWS = 8
NOTHING = Rollout(tokens=b"", logprobs=b"", finish="length")


def cut(of: Lease, rollout: Rollout, chunks: int) -> Rollout:
    proofs = split_proofs(rollout.proofs, len(rollout.tokens) // 4, engine().hidden_size, 16, ROWS)
    return Rollout(rollout.tokens[: 4 * ROWS * chunks], b"", "length", b"".join(proofs[:chunks]))


def shown(of: Lease, index: int, rollout: Rollout) -> Submission:
    """A submission with one rollout, as a hub makes it of a lease at work."""
    rollouts = [NOTHING] * len(of.seeds)
    rollouts[index] = rollout
    return msgspec.structs.replace(submission(of), rollouts=rollouts)


def verdicts(
    of: Lease, what: Submission, by: LoadedPolicy | None = None, limits: Profiles | None = None
) -> list[Verdict]:
    judge = Judge(LengthEnvironment(), limits or load_profiles(), clock=ManualClock())
    return judge.verdicts([audit_job(of, what, depth="progress")], by or loaded())


def prefix(index: int, rollout: Rollout) -> ShownPrefix:
    count = len(rollout.tokens) // 4
    digest = shown_digest(rollout.tokens, rollout.proofs)
    return ShownPrefix(rollout=index, tokens=count, proof_bytes=len(rollout.proofs), digest=digest)


@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
def test_honest_chunks_say_nothing(chunks: int) -> None:
    of = long_lease()
    for index, rollout in enumerate(submission(of).rollouts):
        assert verdicts(of, shown(of, index, cut(of, rollout, chunks))) == []


def failing(of: Lease) -> dict[str, tuple[Rollout, str]]:
    rollouts = submission(of).rollouts
    honest, other = cut(of, rollouts[0], 4), cut(of, rollouts[1], 4)
    noise = np.random.default_rng(0).integers(2, 90, 4 * ROWS)
    made_up = Rollout(tokens=pack_tokens(noise), logprobs=b"", finish="length", proofs=honest.proofs)
    again = proved(of, msgspec.structs.replace(submission(of), rollouts=[made_up])).rollouts[0]
    half = pack_tokens([*honest.token_ids[: 2 * ROWS], *noise[2 * ROWS :]])
    constant = honest.proofs[:2] + b"\x3f\x80" + bytes(30)
    replace = msgspec.structs.replace
    return {
        "random tokens": (made_up, "progress.seed"),
        "random tokens, with the policy's own proofs": (replace(again, logprobs=b""), "progress.seed"),
        "the second half made up": (replace(honest, tokens=half), "progress.seed"),
        "another seed's chunks": (other, "progress.seed"),
        "tokens that are none": (replace(honest, tokens=pack_tokens([500] * 4 * ROWS)), "progress.shape"),
        "a proof too few": (replace(honest, proofs=honest.proofs[:-34]), "progress.proofs"),
        "proofs that fit anything": (replace(honest, proofs=constant * 4), "progress.proofs"),
    }


EXACT = load_profiles()[long_lease().profile]
COARSE = EXACT.model_copy(update={"accidents": AccidentLimits(first=2e-3, later=1e-4)})


@pytest.mark.parametrize("limits", [pytest.param(EXACT, id="exact"), pytest.param(COARSE, id="coarse")])
@pytest.mark.parametrize("name", list(failing(long_lease())))
def test_wrong_chunks_fail_for_certain(name: str, limits: Profile) -> None:
    of = long_lease()
    rollout, reason = failing(of)[name]
    if limits is COARSE and name == "the second half made up":
        assert verdicts(of, shown(of, 0, rollout), limits={limits.key: limits}) == [], "of two chunks it is doubtful"
        return
    [verdict] = verdicts(of, shown(of, 0, rollout), limits={limits.key: limits})
    assert (verdict.outcome, verdict.reason, verdict.severity) == (Outcome.REJECTED, reason, Severity.CERTAIN)
    assert (verdict.depth, verdict.unit, verdict.node, verdict.generated_tokens) == ("progress", 5, of.node, 0)
    assert not verdict.checks[-1].passed
    assert verdict.message


def test_doubtful_progress_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    of, right, wrong, broken = long_lease(), loaded(), loaded(4.0), loaded()
    mine, other = (cut(of, rollout, 4) for rollout in submission(of).rollouts[:2])
    assert verdicts(of, shown(of, 0, msgspec.structs.replace(mine, proofs=other.proofs))) == [], "left to the audit"
    engines = iter([wrong.engine.prefill, right.engine.prefill])
    monkeypatch.setattr(right.engine, "prefill", lambda *asked: next(engines)(*asked))
    assert verdicts(of, shown(of, 0, mine), right) == []
    assert next(engines, None) is None
    made_up = shown(of, 0, failing(of)["random tokens"][0])
    monkeypatch.setattr(broken.engine, "prefill", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    assert verdicts(of, made_up, broken) == []
    assert verdicts(of.model_copy(update={"environment_digest": "f" * 64}), made_up) == []


def judged_with(of: Lease, what: Submission, *prefixes: ShownPrefix, depth: str = "full") -> Verdict:
    judge = Judge(LengthEnvironment(), load_profiles(), clock=ManualClock())
    [verdict] = judge.verdicts([audit_job(of, what, shown=prefixes, depth=depth)], loaded())
    return verdict


def test_a_submission_that_begins_with_what_was_shown_is_accepted() -> None:
    of = long_lease()
    rollouts = submission(of).rollouts
    prefixes = [prefix(0, cut(of, rollouts[0], 3)), prefix(2, cut(of, rollouts[2], 8))]
    assert judged_with(of, submission(of), *prefixes).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("depth", ["full", "light"])
def test_a_submission_that_begins_otherwise_than_shown_fails_for_certain(depth: str) -> None:
    of = long_lease()
    rollouts = submission(of).rollouts
    right = cut(of, rollouts[0], 3)
    flipped = bytes([right.proofs[0] ^ 1]) + right.proofs[1:]
    edited = msgspec.structs.replace(right, tokens=right.tokens[:-4] + b"\5\0\0\0")
    for other in (cut(of, rollouts[1], 3), msgspec.structs.replace(right, proofs=flipped), edited):
        verdict = judged_with(of, submission(of), prefix(2, cut(of, rollouts[2], 1)), prefix(0, other), depth=depth)
        assert (verdict.reason, verdict.severity) == ("progress.prefix", Severity.CERTAIN)
        assert verdict.checks[-1].evidence["rollout"] == 0
        assert verdict.checks[-1].evidence["shown"] == prefix(0, other).digest


def test_a_rollout_that_is_shorter_than_what_was_shown_of_it_fails_for_certain() -> None:
    of, short = long_lease(), lease(5, seeds=4, proof=ProofParameters(topk=16, rows=ROWS))
    longer = cut(of, submission(of).rollouts[0], 8)
    assert judged_with(short, submission(short), prefix(0, longer)).reason == "progress.prefix"
