"""Every check against an honest group and against the cheat it exists for."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from honest import EOS, SAMPLING, LengthEnvironment, completions, docket, engine, lease, loaded, proved, submission
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engines import Completion, PrefillRequest
from shoal.errors import CodecError
from shoal.protocol import (
    BodyLimits,
    Lease,
    Outcome,
    Rollout,
    Severity,
    Submission,
    Verdict,
    canonical_json,
    pack,
    pack_logprobs,
    pack_tokens,
    unpack,
)
from shoal.validator import Judge, load_profiles
from shoal.validator.checks import AFTER_PREFILL, BEFORE_PREFILL
from shoal.validator.profiles import LogprobLimits

Cheat = Callable[[Lease], Submission]


def judged(of: Lease, what: Submission | bytes) -> Verdict:
    [verdict] = Judge(LengthEnvironment(), load_profiles()).verdicts([docket(of, what)], loaded())
    return verdict


def changed(of: Lease, **fields: object) -> Submission:
    return msgspec.structs.replace(submission(of), **fields)


def with_rollout(of: Lease, index: int, **fields: object) -> Submission:
    honest = submission(of)
    rollouts = list(honest.rollouts)
    rollouts[index] = msgspec.structs.replace(rollouts[index], **fields)
    return msgspec.structs.replace(honest, rollouts=rollouts)


def long_rollout(of: Lease) -> int:
    """The index of a rollout that reached the length limit; the seeds of these tests give one."""
    return next(i for i, rollout in enumerate(submission(of).rollouts) if rollout.finish == "length")


EDITED = 2


def edited_token(of: Lease) -> Submission:
    index = long_rollout(of)
    tokens = submission(of).rollouts[index].token_ids
    tokens[EDITED] = next(token for token in (50, 60) if abs(token - tokens[EDITED]) > 5)
    return proved(of, with_rollout(of, index, tokens=pack_tokens(tokens)))


def truncated(of: Lease) -> Submission:
    index = long_rollout(of)
    rollout = submission(of).rollouts[index]
    return proved(of, with_rollout(of, index, tokens=rollout.tokens[:-8], logprobs=rollout.logprobs[:-8]))


def forged_end(of: Lease) -> Submission:
    """Stops early with an end-of-sequence token that the dice did not give, with its true log-probability."""
    index = long_rollout(of)
    rollout = submission(of).rollouts[index]
    tokens = np.append(rollout.token_ids[:3], EOS)
    values = np.append(rollout.logprob_values[:3], -4.0)
    return proved(of, with_rollout(of, index, tokens=pack_tokens(tokens), logprobs=pack_logprobs(values), finish="eos"))


def padded(of: Lease) -> Submission:
    index = long_rollout(of)
    tokens = submission(of).rollouts[index].token_ids
    tokens[4] = EOS
    return with_rollout(of, index, tokens=pack_tokens(tokens))


def logprob_set(value: float) -> Cheat:
    def cheat(of: Lease) -> Submission:
        values = submission(of).rollouts[1].logprob_values.copy()
        values[0] = value
        return with_rollout(of, 1, logprobs=pack_logprobs(values))

    return cheat


def best_of_n(of: Lease) -> Submission:
    """Draws more than was asked for and hands in the longest, as the environment rewards."""
    pool = completions(of, seeds=range(100, 140)) + completions(of)
    return submission(of, sorted(pool, key=lambda completion: -len(completion.token_ids))[: len(of.seeds)])


def one_replaced(of: Lease) -> Submission:
    group = completions(of)
    group[2] = max(completions(of, seeds=range(777, 797)), key=lambda completion: len(completion.token_ids))
    return submission(of, group)


def small_decodes_right_prefills(of: Lease) -> Submission:
    """Another model draws the tokens; the right one only reports their log-probabilities and proves them."""
    group = completions(of, engine(99.0))
    requests = [PrefillRequest(of.prompt_ids, completion.token_ids, 1.0) for completion in group]
    prefills = engine().prefill(requests)
    reported = [
        Completion(completion.token_ids, prefill.logprobs, completion.finish)
        for completion, prefill in zip(group, prefills, strict=True)
    ]
    return proved(of, submission(of, reported))


CHEATS: dict[str, tuple[Cheat, str, Severity]] = {
    "another format": (lambda of: changed(of, format=9), "envelope.format", Severity.CERTAIN),
    "another run": (lambda of: changed(of, run="other"), "lease.mismatch", Severity.CERTAIN),
    "another's work": (lambda of: changed(of, node="m" * 32), "lease.mismatch", Severity.CERTAIN),
    "another lease": (lambda of: changed(of, lease="lease-6"), "lease.mismatch", Severity.CERTAIN),
    "another unit": (lambda of: changed(of, unit=6), "lease.mismatch", Severity.CERTAIN),
    "stale policy, admitted": (lambda of: changed(of, version=2), "policy.mismatch", Severity.CERTAIN),
    "another incarnation": (lambda of: changed(of, incarnation=1), "policy.mismatch", Severity.CERTAIN),
    "another digest": (lambda of: changed(of, policy_digest="f" * 64), "policy.mismatch", Severity.CERTAIN),
    "prompt swapped": (lambda of: changed(of, prompt=pack_tokens([1, 2])), "prompt.mismatch", Severity.CERTAIN),
    "odd prompt bytes": (lambda of: changed(of, prompt=b"\1\2\3"), "prompt.mismatch", Severity.CERTAIN),
    "too few rollouts": (
        lambda of: changed(of, rollouts=submission(of).rollouts[:-1]), "shape.rollouts", Severity.CERTAIN,
    ),
    "too many rollouts": (
        lambda of: changed(of, rollouts=submission(of).rollouts * 2), "shape.rollouts", Severity.CERTAIN,
    ),
    "no tokens": (lambda of: with_rollout(of, 0, tokens=b"", logprobs=b""), "shape.tokens", Severity.CERTAIN),
    "odd token bytes": (
        lambda of: with_rollout(of, 0, tokens=b"12345", logprobs=b"12345"), "shape.tokens", Severity.CERTAIN,
    ),
    "fewer log-probabilities": (lambda of: with_rollout(of, 0, logprobs=b"\0" * 4), "shape.tokens", Severity.CERTAIN),
    "too long": (
        lambda of: with_rollout(of, 0, tokens=b"\2\0\0\0" * 13, logprobs=b"\0" * 52), "shape.tokens", Severity.CERTAIN,
    ),
    "out of vocabulary": (
        lambda of: with_rollout(of, 0, tokens=pack_tokens([96]), logprobs=b"\0" * 4), "shape.vocabulary",
        Severity.CERTAIN,
    ),
    "huge token": (
        lambda of: with_rollout(of, 0, tokens=b"\xff" * 4, logprobs=b"\0" * 4), "shape.vocabulary", Severity.CERTAIN,
    ),
    "NaN log-probability": (logprob_set(float("nan")), "shape.logprobs", Severity.CERTAIN),
    "infinite log-probability": (logprob_set(float("-inf")), "shape.logprobs", Severity.CERTAIN),
    "positive log-probability": (logprob_set(0.5), "shape.logprobs", Severity.CERTAIN),
    "early termination": (truncated, "termination.early", Severity.CERTAIN),
    "padded to length": (padded, "termination.past_eos", Severity.CERTAIN),
    "mislabelled": (
        lambda of: with_rollout(of, long_rollout(of), finish="eos"), "termination.finish", Severity.CERTAIN,
    ),
    "forged end of sequence": (forged_end, "sampling.seed", Severity.STATISTICAL),
    "edited token": (edited_token, "sampling.seed", Severity.STATISTICAL),
    "seed ignored": (
        lambda of: submission(of, completions(of, seeds=range(len(of.seeds)))), "sampling.seed", Severity.CERTAIN,
    ),
    "best of n": (best_of_n, "sampling.seed", Severity.CERTAIN),
    "one rollout replaced": (one_replaced, "sampling.seed", Severity.CERTAIN),
    "another policy": (
        lambda of: submission(of, completions(of, engine(99.0))), "sampling.seed", Severity.CERTAIN,
    ),
    "small model decodes, right model prefills": (small_decodes_right_prefills, "sampling.seed", Severity.CERTAIN),
    "edited log-probability": (logprob_set(-0.001), "logprobs.mismatch", Severity.STATISTICAL),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_fails_for_the_right_reason(name: str) -> None:
    cheat, reason, severity = CHEATS[name]
    verdict = judged(lease(), cheat(lease()))
    assert verdict.outcome is Outcome.REJECTED
    assert (verdict.reason, verdict.severity) == (reason, severity)
    assert verdict.message
    assert verdict.rewards == ()
    assert verdict.generated_tokens == 0
    *before, last = verdict.checks
    assert all(check.passed for check in before[: len(BEFORE_PREFILL)])
    assert not last.passed
    assert last.check == reason.partition(".")[0]
    canonical_json(verdict.model_dump(mode="json"))  # it can be signed: no NaN in the evidence


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_hides_behind_an_honest_neighbour_in_the_batch(name: str) -> None:
    cheat, reason, _ = CHEATS[name]
    dockets = [docket(lease(1)), docket(lease(), cheat(lease())), docket(lease(2))]
    first, second, third = Judge(LengthEnvironment(), load_profiles()).verdicts(dockets, loaded())
    assert (first.outcome, second.reason, third.outcome) == (Outcome.ACCEPTED, reason, Outcome.ACCEPTED)


@pytest.mark.parametrize("unit", range(20))
def test_an_honest_group_passes_every_check_and_gets_its_reward(unit: int) -> None:
    group = completions(lease(unit))
    verdict = judged(lease(unit), submission(lease(unit)))
    assert verdict.outcome is Outcome.ACCEPTED
    assert [check.check for check in verdict.checks] == [
        *(check.__name__ for check in (*BEFORE_PREFILL, *AFTER_PREFILL)),
        "reward",
    ]
    assert all(check.passed for check in verdict.checks)
    lengths = [len(c.token_ids) - (c.finish == "eos") for c in group]
    assert [reward.value for reward in verdict.rewards] == lengths
    assert verdict.generated_tokens == sum(len(c.token_ids) for c in group)
    assert (verdict.unit, verdict.node) == (unit, lease(unit).node)


def test_another_temperature_is_another_policy() -> None:
    hot = lease(sampling=SAMPLING.model_copy(update={"temperature": 1.5}))
    assert judged(hot, submission(hot)).outcome is Outcome.ACCEPTED
    assert judged(lease(), submission(lease(), completions(hot))).reason == "sampling.seed"


def test_the_evidence_has_numbers_and_names_the_place() -> None:
    verdict = judged(lease(), edited_token(lease()))
    evidence = verdict.checks[-1].evidence
    place = (long_rollout(lease()), EDITED)
    assert (evidence["rollout"], evidence["token"]) == place
    assert evidence["kind"] == "beyond"
    assert float(evidence["max_distance"]) > 1e-4
    assert f"token {EDITED} of rollout {place[0]}" in verdict.message


def test_rounding_within_the_tolerance_is_honest() -> None:
    honest = submission(lease())
    noisy = [
        msgspec.structs.replace(r, logprobs=pack_logprobs(np.minimum(r.logprob_values + 5e-5, 0)))
        for r in honest.rollouts
    ]
    assert judged(lease(), msgspec.structs.replace(honest, rollouts=noisy)).outcome is Outcome.ACCEPTED


def test_the_limits_are_the_profiles() -> None:
    narrow = LogprobLimits(largest=1e-9)
    profile = load_profiles()["scripted/cpu/float32"].model_copy(update={"logprobs": narrow})
    strict = Judge(LengthEnvironment(), {profile.key: profile})
    nudged = logprob_set(float(submission(lease()).rollouts[1].logprob_values[0]) - 1e-5)(lease())
    assert strict.verdicts([docket(lease(), nudged)], loaded())[0].reason == "logprobs.mismatch"
    assert judged(lease(), nudged).outcome is Outcome.ACCEPTED


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_bytes_crash_the_validator_or_get_accepted(data: st.DataObject) -> None:
    body = bytearray(pack(submission(lease(seeds=2))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    verdict = judged(lease(seeds=2), bytes(body))
    try:
        decoded = unpack(bytes(body), Submission, BodyLimits())
    except CodecError:
        assert verdict.reason == "envelope.malformed"
    else:
        assert verdict.outcome is Outcome.REJECTED or decoded == submission(lease(seeds=2)) or _close(decoded)


def _close(decoded: Submission) -> bool:
    """A flipped low bit of a log-probability, or another engine name, is within the tolerance and harmless."""
    honest = submission(lease(seeds=2))
    return all(
        (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish)
        and np.abs(mine.logprob_values - theirs.logprob_values).max() < 2e-2
        for mine, theirs in zip(honest.rollouts, decoded.rollouts, strict=True)
    )


@settings(max_examples=100, deadline=None)
@given(
    rollouts=st.lists(
        st.builds(
            Rollout,
            st.binary(max_size=34),
            st.binary(max_size=34),
            st.sampled_from(["eos", "length"]),
            st.binary(max_size=40),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_no_well_formed_nonsense_crashes_the_validator(rollouts: list[Rollout]) -> None:
    verdict = judged(lease(seeds=2), changed(lease(seeds=2), rollouts=rollouts))
    assert verdict.outcome is Outcome.REJECTED
    assert verdict.reason.partition(".")[0] in {"shape", "proofs", "termination", "sampling", "logprobs"}
