"""What miners of live networks did: each is caught, or hands in what the seeds give, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import msgspec
import numpy as np
import pytest

from kit.miner import (
    CoarseCache,
    EarlyExit,
    Mine,
    Miner,
    Speculative,
    above,
    early_end,
    exact,
    fp8,
    int8,
    no_end,
    repeated_ends,
    rewritten,
    typical,
)
from kit.trial import Judged, Trial, audit_job, farthest
from shoal.adversary import Cheat
from shoal.engines import Engine, GenerationRequest
from shoal.engines.shelf import LoadedPolicy
from shoal.protocol import Outcome, Rollout, Severity, Submission, Tally, Verdict, pack_logprobs, pack_tokens
from shoal.validator.canary import CANARY_CHEATS, original_of
from shoal.validator.case import SeenWork
from shoal.validator.profiles import NoiseLimits
from shoal.validator.verdicts import AuditJob

FILLER, SPACE = 5, 4  # the digit 0, and " "
GROUPS = 16
BANNED_BY = {  # groups that it takes at most; 2 statistical failures, or 1 that is certain
    "repeated-ends": (lambda e: rewritten(e, repeated_ends), 1, {"termination.past_eos"}),
    "early-ends": (lambda e: rewritten(e, early_end), 1, {"sampling.seed"}),
    "one-early-end-in-each-group": (lambda e: rewritten(e, early_end, most=1), 2, {"sampling.seed"}),
    "one-end-suppressed-in-each-group": (lambda e: rewritten(e, no_end(e, FILLER), most=1), 2, {"sampling.seed"}),
    "int8-cache": (lambda e: CoarseCache(e, int8), 3, {"proofs.drift", "proofs.mismatch"}),
    "fp8-cache": (lambda e: CoarseCache(e, fp8), 2, {"proofs.drift", "proofs.mismatch"}),
    "int8-cache-vouched-for": (lambda e: CoarseCache(e, int8, vouching=True), GROUPS, {"sampling.seed"}),
    "fp8-cache-vouched-for": (lambda e: CoarseCache(e, fp8, vouching=True), 8, {"sampling.seed"}),
    "early-exit": (lambda e: EarlyExit(e), 2, {"sampling.seed"}),
    "speculative-above-0.3": (lambda e: Speculative(e, above(0.3)), 8, {"sampling.seed"}),
    "speculative-typical": (lambda e: Speculative(e, typical()), 8, {"sampling.seed"}),
}


@pytest.fixture(scope="module")
def mine() -> Mine:
    return Mine()


@pytest.fixture(scope="module")
def honest(mine: Mine) -> Trial:
    """Groups of the same units, as they should be."""
    return mine.tried(Cheat(), range(GROUPS))


def tried(mine: Mine, make: Callable[[Engine], Engine]) -> Trial:
    return mine.tried(Miner(lambda engine, _context: make(engine)), range(GROUPS), stop_when_banned=True)


def tokens_of(judged: Judged) -> list[bytes]:
    return [rollout.tokens for rollout in judged.submission.rollouts]


@pytest.mark.parametrize("name", BANNED_BY)
def test_a_miner_is_banned_and_what_passes_before_is_what_the_seeds_give(name: str, mine: Mine, honest: Trial) -> None:
    make, groups, reasons = BANNED_BY[name]
    trial = tried(mine, make)
    banned = trial.until_banned()
    assert banned[0] <= groups
    assert {each.verdict.reason for each in trial.rejected} <= reasons
    for mined, asked in zip(trial.judged, honest.judged, strict=False):
        assert mined.verdict.outcome is Outcome.REJECTED or tokens_of(mined) == tokens_of(asked)


@pytest.mark.parametrize("accepts", [exact, above(0.9)])
def test_speculative_decoding_of_the_seeds_tokens_is_accepted(accepts: Any, mine: Mine, honest: Trial) -> None:
    """Drafts are not forbidden: whoever ends with the tokens that the seeds give has done what was asked, faster."""
    made: list[Speculative] = []

    def make(engine: Engine) -> Engine:
        made.append(Speculative(engine, accepts))
        return made[0]

    trial = tried(mine, make)
    assert [tokens_of(each) for each in trial.judged] == [tokens_of(each) for each in honest.judged]
    assert {each.verdict.outcome for each in trial.judged} == {Outcome.ACCEPTED}
    assert made[0].taken > 0.5 * made[0].drafts


# ── what a worker declares ───────────────────────────────────────────────────────────────────────────────────────


def judged(mine: Mine, each: Judged, submission: Submission) -> Verdict:
    return verdict_on(mine, audit_job(each.lease, submission))


def verdict_on(mine: Mine, on_table: AuditJob) -> Verdict:
    truth = LoadedPolicy(on_table.lease.policy, mine.engine(), mine.files)
    [verdict] = replace(mine.judge, seen=SeenWork()).verdicts([on_table], truth)
    return verdict


def with_first(submission: Submission, **changes: Any) -> Submission:
    first, *others = submission.rollouts
    return msgspec.structs.replace(submission, rollouts=[msgspec.structs.replace(first, **changes), *others])


def spans(*pairs: int) -> bytes:
    return pack_tokens(np.array(pairs))


ROLLOUT_FIELDS: dict[str, tuple[Callable[[Rollout], object], str]] = {
    "tokens": (lambda r: pack_tokens(np.roll(r.token_ids, 1)), "termination.past_eos"),
    "logprobs": (lambda r: pack_logprobs(r.logprob_values - np.float32(0.05)), "logprobs.mismatch"),
    "finish": (lambda r: {"eos": "length", "length": "eos"}[r.finish], "termination.finish"),
    "proofs": (lambda r: r.proofs[:-2], "proofs.malformed"),
    "given": (lambda _: spans(1, 2), "dialogue.forged"),
}
SUBMISSION_FIELDS: dict[str, tuple[object, str]] = {
    "format": (2, "envelope.format"),
    "run": ("another", "lease.mismatch"),
    "node": ("another", "lease.mismatch"),
    "lease": ("another", "lease.mismatch"),
    "unit": (10**6, "lease.mismatch"),
    "incarnation": (1, "policy.mismatch"),
    "version": (1, "policy.mismatch"),
    "policy_digest": ("f" * 64, "policy.mismatch"),
    "prompt": (pack_tokens(np.array([7, 8, 9])), "prompt.mismatch"),
    "engine": ("a faster one", ""),  # nobody reads it but people
}


def test_every_field_that_a_worker_declares_is_checked_or_read_by_nobody(mine: Mine, honest: Trial) -> None:
    """No field of a submission says what is trained on: a mask, an end or a length that is not so is rejected for
    certain, but for log-probabilities, which rounding moves. A field that is added must be added here."""
    each = honest.judged[0]
    assert {field.name for field in msgspec.structs.fields(Rollout)} == set(ROLLOUT_FIELDS)
    assert {field.name for field in msgspec.structs.fields(Submission)} == {*SUBMISSION_FIELDS, "rollouts"}
    for name, (change, reason) in ROLLOUT_FIELDS.items():
        lie = with_first(each.submission, **{name: change(each.submission.rollouts[0])})
        verdict = judged(mine, each, lie)
        assert (name, verdict.outcome, verdict.reason) == (name, Outcome.REJECTED, reason)
        assert verdict.severity is (Severity.STATISTICAL if name == "logprobs" else Severity.CERTAIN)
    for name, (value, reason) in SUBMISSION_FIELDS.items():
        verdict = judged(mine, each, msgspec.structs.replace(each.submission, **{name: value}))
        assert (name, verdict.reason) == (name, reason)
    few = msgspec.structs.replace(each.submission, rollouts=each.submission.rollouts[1:])
    assert judged(mine, each, few).reason == "shape.rollouts"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (spans(1, 1), "dialogue.forged"),  # the second token is not to be trained on
        (spans(0, 1), "dialogue.malformed"),  # nor the first: no dialogue begins with the tool
        (spans(0, 0), "dialogue.malformed"),
        (spans(0, 10**6), "dialogue.malformed"),
        (spans(0), "dialogue.malformed"),
        (spans(1, 1, 0, 1), "dialogue.malformed"),
    ],
)
def test_loss_mask_by_tool_spans_without_tool_refused(given: bytes, reason: str, mine: Mine, honest: Trial) -> None:
    each = honest.judged[1]
    verdict = judged(mine, each, with_first(each.submission, given=given))
    assert (verdict.reason, verdict.severity) == (reason, Severity.CERTAIN)


# ── the same text in other tokens ────────────────────────────────────────────────────────────────────────────────


def test_a_completion_spelt_with_more_tokens_is_rejected_though_it_says_the_same(mine: Mine, honest: Trial) -> None:
    """The tiny policy has one token for each character, so a space stands for a token that was split: a grader that
    reads over it sees the same text, and more tokens would be paid."""

    def split(tokens: Any, request: GenerationRequest) -> Any:
        fits = 1 < len(tokens) < request.sampling.max_new_tokens
        return [*tokens[:1], SPACE, *tokens[1:]] if fits else None

    def text(each: Judged) -> list[str]:
        ids = [rollout.token_ids.tolist() for rollout in each.submission.rollouts]
        return [mine.loaded.tokenizer.decode(tokens).replace(" ", "") for tokens in ids]

    first = tried(mine, lambda engine: rewritten(engine, split)).judged[0]
    assert text(first) == text(honest.judged[0])
    assert first.tokens > honest.judged[0].tokens
    assert (first.verdict.reason, first.verdict.severity) == ("sampling.seed", Severity.CERTAIN)


# ── where rounding is coarse: bfloat16 workers, limits as measured, float32 and bfloat16 looks ───────────────────────
#
# The tiny policy's own noise hides more than a real model's (a run would refuse these limits). Single tokens, declared
# log-probabilities, proofs and canaries are held here all the same.


@pytest.fixture(scope="module")
def coarse() -> Mine:
    return Mine("bfloat16", "float32", group_size=8)


@pytest.fixture(scope="module")
def long() -> Mine:
    """Rollouts of three whole chunks, which no end cuts short."""
    return Mine("bfloat16", "float32", long=True, group_size=4, max_new_tokens=96, temperature=2.0)


@pytest.fixture(scope="module")
def honest_long(long: Mine) -> Trial:
    trial = long.tried(Cheat(), range(12))
    assert {each.verdict.outcome for each in trial.judged} == {Outcome.ACCEPTED}
    return trial


@pytest.mark.parametrize("name", ["an early end", "a suppressed end"])
def test_one_end_in_each_group_that_no_seed_gives_is_never_accepted(name: str, coarse: Mine) -> None:
    """Not trained on, not paid, and struck when their number shows: what a far token would have to pass for, an
    accident of the arithmetic, is rare."""

    def make(engine: Engine, _context: object) -> Engine:
        change = early_end if name == "an early end" else no_end(engine, FILLER)
        return rewritten(engine, change, most=1)

    trial = coarse.tried(Miner(make), range(24))
    limit = coarse.judge.profiles[coarse.profile].sampling.distance
    accepted = [each for each in trial.judged if each.verdict.outcome is Outcome.ACCEPTED]
    for each in accepted:
        assert min(farthest(engine, each.lease, each.submission) for engine in coarse.engines.values()) <= limit
    assert len(accepted) < len(trial.judged) / 2
    assert trial.until_caught() is not None


def test_one_declared_log_probability_that_is_far_off_is_never_accepted(coarse: Mine) -> None:
    """A ratio of e¹⁰⁰⁰ would be trained on; and of what was accepted so, a canary would be made that passes."""
    for lease, submission in coarse.groups(Cheat(), [coarse.lease(unit) for unit in range(4)]):
        values = submission.rollouts[0].logprob_values.copy()
        values[0] = -1000.0
        verdict = verdict_on(coarse, audit_job(lease, with_first(submission, logprobs=pack_logprobs(values))))
        assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "sampling.accident")


@pytest.mark.parametrize("name", ["fp8-cache", "fp8-cache-vouched-for", "early-exit"])
def test_shortcuts_that_are_coarser_than_bfloat16_are_banned(name: str, long: Mine) -> None:
    make, _, reasons = BANNED_BY[name]
    trial = tried(long, make)
    assert trial.until_banned() is not None
    also = {"sampling.drift", "logprobs.mismatch", "likelihood.unlikely"}
    assert {each.verdict.reason for each in trial.rejected} <= reasons | also


def test_an_int8_cache_of_a_bfloat16_worker_passes_as_its_errors_are_within_bfloat16s_own(long: Mine) -> None:
    """A bound, not a guard (docs/guides/attack-your-run.md): in float32 it is banned, see above."""
    trial = tried(long, lambda engine: CoarseCache(engine, int8))
    assert not trial.rejected
    sums = reduce(Tally.plus, [each.verdict.tally for each in trial.judged])
    assert all(sums.of(name).seen < sums.of(name).expected for name in NoiseLimits.model_fields)


# ── canaries ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_canary_of_long_rollouts_is_caught_or_unsure_and_none_passes(long: Mine, honest_long: Trial) -> None:
    found: Counter[tuple[str, Outcome]] = Counter()
    for each in honest_long.judged:
        original = original_of(audit_job(each.lease, each.submission), long.judge, long.engine())
        for name, spoil in CANARY_CHEATS.items():
            if (twin := spoil(original)) is not None:
                found[name, verdict_on(long, twin).outcome] += 1
    assert {name for name, _ in found} == set(CANARY_CHEATS)
    assert not any(found[name, Outcome.ACCEPTED] for name in CANARY_CHEATS)
    assert all(found[name, Outcome.REJECTED] > 3 * found[name, Outcome.UNSURE] for name in CANARY_CHEATS)


# ── proofs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def chunks(rollout: Rollout) -> list[bytes]:
    size = len(rollout.proofs) // 3
    return [rollout.proofs[start : start + size] for start in range(0, 3 * size, size)]


FORGERIES: dict[str, tuple[Callable[[list[list[bytes]]], list[list[bytes]]], set[str]]] = {
    "first chunk of another": (
        lambda own: [[own[0][0], *each[1:]] for each in own], {"duplicate.proof", "proofs.mismatch"}
    ),
    "swapped": (lambda own: [[each[1], each[0], *each[2:]] for each in own], {"duplicate.proof", "proofs.mismatch"}),
    "first chunks only": (lambda own: [each[:1] for each in own], {"proofs.malformed"}),
    "one repeated": (lambda own: [[each[0]] * 3 for each in own], {"duplicate.proof", "proofs.mismatch"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_proofs_of_other_chunks_are_rejected(name: str, long: Mine, honest_long: Trial) -> None:
    forge, reasons = FORGERIES[name]
    for each in honest_long.judged[:6]:
        rollouts = each.submission.rollouts
        proofs = forge([chunks(rollout) for rollout in rollouts])
        forged = [msgspec.structs.replace(one, proofs=b"".join(own)) for one, own in zip(rollouts, proofs, strict=True)]
        verdict = judged(long, each, msgspec.structs.replace(each.submission, rollouts=forged))
        assert (verdict.outcome, verdict.reason in reasons) == (Outcome.REJECTED, True)


def test_rollouts_that_begin_alike_may_share_the_proof_of_what_they_share(long: Mine, honest_long: Trial) -> None:
    """Two seeds that give the same tokens have the same proof: copying it is no cheat, and no `duplicate.proof`."""
    each = honest_long.judged[0]
    lease = each.lease.model_copy(update={"seeds": (each.lease.seeds[0],) * len(each.lease.seeds)})
    same = msgspec.structs.replace(each.submission, rollouts=[each.submission.rollouts[0]] * len(lease.seeds))
    verdict = verdict_on(long, audit_job(lease, same))
    assert (verdict.outcome, verdict.reason) == (Outcome.ACCEPTED, "")
