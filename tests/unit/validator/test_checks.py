"""Every check against an honest group and against the cheat it exists for."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from honest import EOS, KEY, SAMPLING, audit_job, completions, engine, judge, judged, lease, loaded, proved, submission
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engines import Completion, PrefillRequest
from shoal.errors import CodecError
from shoal.protocol import Lease, Outcome, ProofParameters, SamplingParameters, Severity, Sums, Tally, canonical_json
from shoal.protocol.codec import BodyLimits, pack, unpack
from shoal.protocol.submission import Rollout, Submission, pack_logprobs, pack_tokens
from shoal.sampling import SeedTolerance
from shoal.toploc import PointBatch, compare
from shoal.toploc.check import Reason as ProofReason
from shoal.validator import canary, checks, loop, rewards, verdicts
from shoal.validator import judge as judge_module
from shoal.validator.case import Case, Finding, Replay
from shoal.validator.checks import AFTER_PREFILL, BEFORE_PREFILL
from shoal.validator.judge import SHOWN_REASONS
from shoal.validator.profiles import BUILT_IN, CertainLimits, ChannelLimits, LikelihoodLimits, NoiseLimits

Cheat = Callable[[Lease], Submission]


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
    """Stops early with an end-of-sequence token that the seed did not give, with its true log-probability."""
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
    """Draws more than was asked for and submits the longest, as the environment rewards."""
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


STATISTICAL = {"forged end of sequence", "edited token", "edited log-probability"}  # others are certain
CHEATS: dict[str, tuple[Cheat, str]] = {
    "another format": (lambda of: changed(of, format=9), "envelope.format"),
    "another run": (lambda of: changed(of, run="other"), "lease.mismatch"),
    "another's work": (lambda of: changed(of, node="m" * 32), "lease.mismatch"),
    "another lease": (lambda of: changed(of, lease="lease-6"), "lease.mismatch"),
    "another unit": (lambda of: changed(of, unit=6), "lease.mismatch"),
    "stale policy, admitted": (lambda of: changed(of, version=2), "policy.mismatch"),
    "another incarnation": (lambda of: changed(of, incarnation=1), "policy.mismatch"),
    "another digest": (lambda of: changed(of, policy_digest="f" * 64), "policy.mismatch"),
    "prompt swapped": (lambda of: changed(of, prompt=pack_tokens([1, 2])), "prompt.mismatch"),
    "odd prompt bytes": (lambda of: changed(of, prompt=b"\1\2\3"), "prompt.mismatch"),
    "too few rollouts": (lambda of: changed(of, rollouts=submission(of).rollouts[:-1]), "shape.rollouts"),
    "too many rollouts": (lambda of: changed(of, rollouts=submission(of).rollouts * 2), "shape.rollouts"),
    "no tokens": (lambda of: with_rollout(of, 0, tokens=b"", logprobs=b""), "shape.tokens"),
    "odd token bytes": (lambda of: with_rollout(of, 0, tokens=b"12345", logprobs=b"12345"), "shape.tokens"),
    "fewer log-probabilities": (lambda of: with_rollout(of, 0, logprobs=b"\0" * 4), "shape.tokens"),
    "too long": (lambda of: with_rollout(of, 0, tokens=b"\2\0\0\0" * 13, logprobs=b"\0" * 52), "shape.tokens"),
    "out of vocabulary": (lambda of: with_rollout(of, 0, tokens=b"\x60\0\0\0", logprobs=b"\0" * 4), "shape.vocabulary"),
    "huge token": (lambda of: with_rollout(of, 0, tokens=b"\xff" * 4, logprobs=b"\0" * 4), "shape.vocabulary"),
    "NaN log-probability": (logprob_set(float("nan")), "shape.logprobs"),
    "infinite log-probability": (logprob_set(float("-inf")), "shape.logprobs"),
    "positive log-probability": (logprob_set(0.5), "shape.logprobs"),
    "early termination": (truncated, "termination.early"),
    "padded to length": (padded, "termination.past_eos"),
    "mislabelled": (lambda of: with_rollout(of, long_rollout(of), finish="eos"), "termination.finish"),
    "forged end of sequence": (forged_end, "sampling.seed"),
    "edited token": (edited_token, "sampling.seed"),
    "seed ignored": (lambda of: submission(of, completions(of, seeds=range(len(of.seeds)))), "sampling.seed"),
    "best of n": (best_of_n, "sampling.seed"),
    "one rollout replaced": (one_replaced, "sampling.seed"),
    "another policy": (lambda of: submission(of, completions(of, engine(99.0))), "sampling.seed"),
    "small model decodes, right model prefills": (small_decodes_right_prefills, "sampling.seed"),
    "edited log-probability": (logprob_set(-0.001), "logprobs.mismatch"),
}  # fmt: skip


def test_a_rollout_ends_at_the_first_of_several_end_tokens() -> None:
    """A token of a long rollout is made an end: the honest rollout ends there, and the whole one goes on after it."""
    index = long_rollout(lease())
    another = int(submission(lease()).rollouts[index].token_ids[2])
    of = lease(sampling=SAMPLING.model_copy(update={"eos_token_ids": (EOS, another)}))
    whole = submission(lease())
    honest, padded_on = judge().verdicts([audit_job(of), audit_job(of, whole)], loaded())
    assert another in submission(of).rollouts[index].token_ids[-1:]
    assert len(whole.rollouts[index].token_ids) > len(submission(of).rollouts[index].token_ids)
    assert (honest.outcome, padded_on.reason) == (Outcome.ACCEPTED, "termination.past_eos")
    assert padded_on.severity is Severity.CERTAIN


def test_a_rollout_ends_where_its_text_has_a_stop_string() -> None:
    """The scripted policy's tokens are characters; two of a long rollout are the stop string."""
    index = long_rollout(lease())
    stop = "".join(map(chr, submission(lease()).rollouts[index].token_ids[3:5]))
    of = lease(sampling=SAMPLING.model_copy(update={"stop": (stop, "never so long")}))
    honest = submission(of)
    ended, whole = honest.rollouts[index], submission(lease())
    assert (len(ended.token_ids), ended.finish) == (5, "eos")
    short = msgspec.structs.replace(ended, tokens=ended.tokens[:-4], logprobs=ended.logprobs[:-4])
    cheats = {
        "": honest, "termination.past_eos": whole,
        "termination.early": proved(of, with_rollout(of, index, tokens=short.tokens, logprobs=short.logprobs)),
        "termination.finish": with_rollout(of, index, finish="length"),
    }  # fmt: skip
    verdicts = judge().verdicts([audit_job(of, each) for each in cheats.values()], loaded())
    for reason, verdict in zip(cheats, verdicts, strict=True):
        assert (verdict.reason, verdict.severity) == (reason, Severity.CERTAIN if reason else verdict.severity)


@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_fails_for_the_right_reason(name: str) -> None:
    cheat, reason = CHEATS[name]
    audit_jobs = [audit_job(lease(1)), audit_job(lease(), cheat(lease())), audit_job(lease(2))]
    first, verdict, third = judge().verdicts(audit_jobs, loaded())  # honest neighbours hide nothing, and lose nothing
    assert (first.outcome, verdict.outcome, third.outcome) == (Outcome.ACCEPTED, Outcome.REJECTED, Outcome.ACCEPTED)
    severity = Severity.STATISTICAL if name in STATISTICAL else Severity.CERTAIN
    assert (verdict.reason, verdict.severity) == (reason, severity)
    assert verdict.message
    assert verdict.rewards == ()
    assert verdict.generated_tokens == 0
    *before, last = verdict.checks
    assert all(check.passed for check in before[: len(BEFORE_PREFILL)])
    assert not last.passed
    assert last.check == reason.partition(".")[0]
    canonical_json(verdict.model_dump(mode="json"))  # it can be signed: no NaN in the evidence


@pytest.mark.parametrize("unit", range(8))
def test_an_honest_group_passes_every_check_and_gets_its_reward(unit: int) -> None:
    group = completions(lease(unit))
    verdict = judged(lease(unit), submission(lease(unit)))
    assert verdict.outcome is Outcome.ACCEPTED
    made = [check.__name__ for check in (*BEFORE_PREFILL, *AFTER_PREFILL)]
    assert [check.check for check in verdict.checks] == [*made, "reward"]
    assert all(check.passed for check in verdict.checks)
    lengths = [len(c.token_ids) - (c.finish == "eos") for c in group]
    assert [reward.value for reward in verdict.rewards] == lengths
    assert verdict.generated_tokens == sum(len(c.token_ids) for c in group)
    assert (verdict.unit, verdict.node) == (unit, lease(unit).node)


def test_the_evidence_has_numbers_and_names_the_place() -> None:
    verdict = judged(lease(), edited_token(lease()))
    evidence = verdict.checks[-1].evidence
    place = (long_rollout(lease()), EDITED)
    assert (evidence["rollout"], evidence["token"]) == place
    assert evidence["kind"] == "beyond"
    assert float(evidence["max_distance"]) > 1e-4
    assert f"token {EDITED} of rollout {place[0]}" in verdict.message


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


SOME_BYTES, FINISHES = st.binary(max_size=34), st.sampled_from(["eos", "length"])
NONSENSE = st.builds(Rollout, SOME_BYTES, SOME_BYTES, FINISHES, st.binary(max_size=40))


@settings(max_examples=100, deadline=None)
@given(st.lists(NONSENSE, min_size=1, max_size=3))
def test_no_well_formed_nonsense_crashes_the_validator(rollouts: list[Rollout]) -> None:
    verdict = judged(lease(seeds=2), changed(lease(seeds=2), rollouts=rollouts))
    assert verdict.outcome is Outcome.REJECTED
    assert verdict.reason.partition(".")[0] in {"shape", "proofs", "termination", "sampling", "logprobs"}


NO_END = SamplingParameters(temperature=1.0, max_new_tokens=16, eos_token_ids=(500,))


def long_lease(**changes: object) -> Lease:
    sampling = NO_END.model_copy(update={"max_new_tokens": 40})
    return lease(seeds=4, sampling=sampling, **changes)


def changed_words(proofs: bytes, **changes: int) -> bytes:
    words = np.frombuffer(proofs, dtype=">u2").copy()
    for where, value in changes.items():
        words[int(where.removeprefix("at_"))] = value
    return words.tobytes()


MALFORMED = {
    "none": lambda proofs: b"", "one byte less": lambda proofs: proofs[:-1],
    "one proof of two": lambda proofs: proofs[: 2 + 2 * 128], "all zero": lambda proofs: bytes(len(proofs)),
    "modulus 1": lambda proofs: changed_words(proofs, at_0=1),
    "in the second proof": lambda proofs: changed_words(proofs, at_130=65535),
}  # fmt: skip


@pytest.mark.parametrize("depth", ["full", "light"])
@pytest.mark.parametrize("name", MALFORMED)
def test_bytes_that_are_no_proofs_are_seen_without_a_prefill(name: str, depth: str) -> None:
    of = long_lease()
    cheat = with_rollout(of, 2, proofs=MALFORMED[name](submission(of).rollouts[2].proofs))
    verdict = judged(of, cheat, depth=depth)
    assert (verdict.reason, verdict.severity) == ("proofs.malformed", "certain")
    assert len(verdict.checks) < len(BEFORE_PREFILL)
    if name in ("all zero", "modulus 1", "in the second proof"):
        where = (2, 32) if name == "in the second proof" else (2, 0)
        assert (verdict.checks[-1].evidence["rollout"], verdict.checks[-1].evidence["token"]) == where


def test_proofs_of_other_weights_are_a_mismatch_and_the_place_is_named() -> None:
    of = long_lease()
    other = proved(of, submission(of), 99.0).rollouts[3].proofs
    verdict = judged(of, with_rollout(of, 3, proofs=other))
    assert (verdict.reason, verdict.severity) == ("proofs.mismatch", "statistical")
    evidence = verdict.checks[-1].evidence
    assert evidence["rollout"] == 3
    assert evidence["exponent_mismatches"] > 0.5 * evidence["values"] / 4
    assert "rollout 3" in verdict.message


def test_the_size_of_proofs_is_the_leases_also_of_several_in_one_batch() -> None:
    small = {"proof": ProofParameters(topk=16, rows=8)}
    leases = [long_lease(unit=1), long_lease(unit=2, **small), long_lease(unit=3)]
    verdicts = judge().verdicts([audit_job(of) for of in leases], loaded())
    assert [(v.unit, v.outcome) for v in verdicts] == [(unit, Outcome.ACCEPTED) for unit in (1, 2, 3)]
    assert judged(long_lease(**small), submission(long_lease())).reason == "proofs.malformed"


def test_the_surest_failure_decides_and_the_others_are_listed() -> None:
    """Wrong weights: the proofs differ (statistical), and the seeds give other tokens beyond doubt (certain)."""
    of = lease(sampling=NO_END)
    verdict = judged(of, submission(of, completions(of, engine(99.0))))
    assert (verdict.reason, verdict.severity) == ("sampling.seed", "certain")
    failures = [check.check for check in verdict.checks if not check.passed]
    assert [each for each in failures if each != "likelihood"] == ["proofs", "logprobs", "second", "sampling"]


def redrawn(of: Lease, temperature: float) -> Submission:
    """Drawn at another temperature, by the lease's own seeds; reported and proved as the lease's policy has it."""
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
def test_picking_by_likelihood_shows_without_seeds(temperature: float, side: str) -> None:
    of = lease(seeds=12, sampling=NO_END)
    verdict = judged(of, redrawn(of, temperature), judge(limits=BLIND_TO_SEEDS))
    assert (verdict.reason, verdict.severity) == ("likelihood.unlikely", "statistical")
    assert f"the tokens are {side} than drawn ones" in verdict.message
    assert abs(verdict.checks[-1].evidence["deviations"]) > 8


@pytest.mark.parametrize(
    ("tokens", "variance", "is_checked"), [(48, 1.0, True), (49, 1.0, False), (48, 1e6, False)], ids=str
)
def test_few_tokens_or_little_chance_are_no_statistic(tokens: int, variance: float, is_checked: bool) -> None:
    of = lease(seeds=3, sampling=NO_END)  # 48 tokens
    limits = LikelihoodLimits(deviations=2.0, tokens=tokens, variance=variance)
    verdict = judged(of, redrawn(of, 0.01), judge(limits={**BLIND_TO_SEEDS, "likelihood": limits}))
    assert (verdict.reason == "likelihood.unlikely") is is_checked


def test_honest_deviations_are_those_of_a_bell() -> None:
    """Mean and spread over groups, also where the end of the sequence stops some rollouts early."""
    audit_jobs = [audit_job(lease(unit, seeds=8)) for unit in range(24)]
    made = [check for verdict in judge().verdicts(audit_jobs, loaded()) for check in verdict.checks]
    found = [float(check.evidence["deviations"]) for check in made if check.check == "likelihood"]
    assert len(found) == 24
    assert abs(np.mean(found)) < 4 / 24**0.5
    assert 0.5 < np.std(found) < 1.6


def test_rare_tokens_of_a_nearly_sure_policy_are_honest() -> None:
    """512 tokens, each of which is the likeliest but for one in 10⁴, and then any of 151,936. Two such tokens come once
    in 800 groups: 8 standard deviations, and nobody's fault."""
    vocabulary, count, share = 151_936, 512, 1e-4
    nats = np.array([-np.log1p(-share), -np.log(share / vocabulary)])
    chances = np.array([1 - share, share])
    entropy = float(chances @ nats)
    varentropy = float(chances @ (nats - entropy) ** 2)

    def finding(rare: int) -> Finding:
        of = lease(seeds=1, sampling=SamplingParameters(temperature=1.0, max_new_tokens=count, eos_token_ids=(EOS,)))
        rollout = Rollout(pack_tokens(range(count)), pack_logprobs(np.zeros(count)), "length", b"")
        what = msgspec.structs.replace(submission(lease()), rollouts=[rollout])
        logprobs = -np.repeat(nats, [count - rare, rare])
        each = np.ones(count)
        nothing = compare(PointBatch.concat([]), [])
        replay = Replay(logprobs, 0 * each, each, entropy * each, varentropy * each, each / 2, nothing)
        return checks.likelihood(Case(of, what, "", vocabulary, 64, BUILT_IN[KEY], replay=replay))

    assert [finding(rare).passed for rare in (0, 1, 2, 3, 100)] == [True, True, True, True, False]
    assert finding(count).result.evidence["deviations"] < -8


@pytest.mark.parametrize(("channel", "reason"), [
    ("outside", "sampling.drift"), ("distance", "sampling.drift"), ("exponents", "proofs.drift"),
    ("mantissa", "proofs.drift"), ("logprobs", "logprobs.mismatch"), ("bias", "logprobs.mismatch"),
])  # fmt: skip
def test_drift_over_several_submissions_fails(channel: str, reason: str) -> None:
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


class NoPrefill(type(engine())):  # type: ignore[misc]
    def prefill(self, requests, proof=None):  # type: ignore[no-untyped-def]
        raise AssertionError("a light audit needs no prefill")


def test_a_light_audit_makes_the_cheap_checks_and_the_reward_without_a_prefill() -> None:
    by, policy = judge(), replace(loaded(), engine=NoPrefill())
    good, bad = audit_job(lease(1), depth="light"), audit_job(lease(2), b"garbage", depth="light")
    one, two = by.verdicts([good, bad], policy)
    assert (one.outcome, one.depth, two.depth) == (Outcome.ACCEPTED, "light", "light")
    assert [check.check for check in one.checks] == [*(check.__name__ for check in BEFORE_PREFILL), "reward"]
    full = judged(lease(1))
    assert (full.depth, one.rewards, one.generated_tokens) == ("full", full.rewards, full.generated_tokens)
    assert two.reason == "envelope.malformed"


SOURCES = [Path(module.__file__ or "") for module in (checks, rewards, canary)]


def test_the_table_has_every_reason_that_the_checks_give() -> None:
    table = set(re.findall(r"^\| ([a-z]+\.[a-z_]+) +\|", checks.__doc__ or "", re.MULTILINE))
    given = {code for path in SOURCES for code in re.findall(r'failed\(\s*"([a-z]+\.[a-z_]+)"', path.read_text())}
    given |= {f"proofs.{reason}" for reason in ProofReason.__args__}
    given |= {"proofs.drift", *(reason for reason, _ in checks.RECORDED.values()), *SHOWN_REASONS.values()}
    assert given == table


def test_every_unsure_reason_is_explained() -> None:
    sources = "".join(Path(module.__file__ or "").read_text() for module in (checks, judge_module, loop))
    given = re.findall(r'unsure\((?:\(\), |\[\], |findings, )?"([a-z]+\.[a-z]+)"', sources)
    assert set(given) == set(verdicts.MACHINERY)
