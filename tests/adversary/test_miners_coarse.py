"""What miners tried where rounding is coarse: bfloat16 workers, limits as measured, float32 and bfloat16 looks.

The tiny policy's own noise hides more than a real model's (a run would refuse these limits). Single tokens, declared
log-probabilities, proofs and canaries are held here all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kit.miner import EarlyExit, Mine, Miner, early_end, no_end, rewritten
from kit.trial import Judged, Trial, docket
from shoal.adversary import Cheat
from shoal.engines import Engine, PrefillRequest
from shoal.engines.shelf import LoadedPolicy
from shoal.protocol import Outcome, Rollout, Submission, Verdict, pack_logprobs
from shoal.sampling import uniforms
from shoal.sampling.check import distances
from shoal.validator.canary import SPOILERS, original_of
from shoal.validator.case import SeenWork

FILLER = 5
GROUPS = 12


@pytest.fixture(scope="module")
def coarse() -> Mine:
    return Mine("bfloat16", "float32", group_size=8)


@pytest.fixture(scope="module")
def long() -> Mine:
    """Rollouts of three whole chunks, which no end cuts short."""
    return Mine("bfloat16", "float32", long=True, group_size=4, max_new_tokens=96, temperature=2.0)


@pytest.fixture(scope="module")
def honest(long: Mine) -> Trial:
    trial = long.tried(Cheat(), range(GROUPS))
    assert {each.verdict.outcome for each in trial.judged} == {Outcome.ACCEPTED}
    return trial


def judged(mine: Mine, each: Judged, submission: Submission) -> Verdict:
    return verdict_on(mine, docket(each.lease, submission))


def verdict_on(mine: Mine, on_table: Any) -> Verdict:
    truth = LoadedPolicy(on_table.lease.policy, mine.engine(), mine.files)
    [verdict] = replace(mine.judge, seen=SeenWork()).verdicts([on_table], truth)
    return verdict


def farthest(mine: Mine, engine: Engine, each: Judged) -> float:
    """How far a uniform lies outside the interval of its token, at most, as this engine sees it."""
    lease = each.lease
    asked = [
        PrefillRequest(lease.prompt_ids, rollout.token_ids.astype(np.int32), lease.sampling.temperature)
        for rollout in each.submission.rollouts
    ]
    seen = zip(lease.seed_numbers, engine.prefill(asked), strict=True)
    return max(float(distances(uniforms(s, 0, len(p.cdf_low)), p.cdf_low, p.cdf_high).max()) for s, p in seen)


@pytest.mark.parametrize("name", ["an early end", "a suppressed end"])
def test_one_end_in_each_group_that_no_seed_gives_is_never_accepted(name: str, coarse: Mine) -> None:
    """Not trained on, not paid, and struck when their number shows: what a far token would have to pass for, an
    accident of the arithmetic, is rare."""

    def make(engine: Engine, _loot: object) -> Engine:
        change = early_end if name == "an early end" else no_end(engine, FILLER)
        return rewritten(engine, change, most=1)

    trial = coarse.tried(Miner(make), range(24))
    limit = coarse.judge.profiles[coarse.profile].sampling.distance
    accepted = [each for each in trial.judged if each.verdict.outcome is Outcome.ACCEPTED]
    for each in accepted:
        assert min(farthest(coarse, engine, each) for engine in coarse.engines.values()) <= limit
    assert len(accepted) < len(trial.judged) / 2
    assert trial.until_caught() is not None


def test_one_declared_log_probability_that_is_far_off_is_never_accepted(coarse: Mine) -> None:
    """A ratio of e¹⁰⁰⁰ would be trained on; and of what was accepted so, a canary would be made that passes."""
    for lease, submission in coarse.groups(Cheat(), [coarse.lease(unit) for unit in range(4)]):
        first, *others = submission.rollouts
        values = first.logprob_values.copy()
        values[0] = -1000.0
        lie = [msgspec.structs.replace(first, logprobs=pack_logprobs(values)), *others]
        verdict = verdict_on(coarse, docket(lease, msgspec.structs.replace(submission, rollouts=lie)))
        assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "sampling.accident")


def test_early_exit_of_the_last_layer_is_caught(coarse: Mine) -> None:
    trial = coarse.tried(Miner(lambda engine, _loot: EarlyExit(engine)), range(16), stop_when_banned=True)
    assert trial.until_banned() is not None
    assert {each.verdict.reason for each in trial.rejected} <= {"sampling.seed", "likelihood.unlikely"}


# ── canaries ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_canary_of_long_rollouts_is_caught_or_unsure_and_none_passes(long: Mine, honest: Trial) -> None:
    found: Counter[tuple[str, Outcome]] = Counter()
    for each in honest.judged:
        original = original_of(docket(each.lease, each.submission), long.judge, long.engine())
        for name, spoil in SPOILERS.items():
            if (twin := spoil(original)) is not None:
                found[name, verdict_on(long, twin).outcome] += 1
    assert {name for name, _ in found} == set(SPOILERS)
    assert not any(found[name, Outcome.ACCEPTED] for name in SPOILERS)
    assert all(found[name, Outcome.REJECTED] > 3 * found[name, Outcome.UNSURE] for name in SPOILERS)


# ── proofs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def chunks(rollout: Rollout) -> list[bytes]:
    size = len(rollout.proofs) // 3
    return [rollout.proofs[start : start + size] for start in range(0, 3 * size, size)]


def with_proofs(submission: Submission, proofs: Sequence[Sequence[bytes]]) -> Submission:
    pairs = zip(submission.rollouts, proofs, strict=True)
    return msgspec.structs.replace(
        submission, rollouts=[msgspec.structs.replace(rollout, proofs=b"".join(each)) for rollout, each in pairs]
    )


def copied_first_chunk(own: list[list[bytes]]) -> list[list[bytes]]:
    return [[own[0][0], *each[1:]] for each in own]


def swapped_chunks(own: list[list[bytes]]) -> list[list[bytes]]:
    return [[each[1], each[0], *each[2:]] for each in own]


def first_chunks_only(own: list[list[bytes]]) -> list[list[bytes]]:
    return [each[:1] for each in own]


def one_chunk_repeated(own: list[list[bytes]]) -> list[list[bytes]]:
    return [[each[0]] * 3 for each in own]


@pytest.mark.parametrize(
    ("forge", "reasons"),
    [
        (copied_first_chunk, {"duplicate.proof", "proofs.mismatch"}),
        (swapped_chunks, {"duplicate.proof", "proofs.mismatch"}),
        (first_chunks_only, {"proofs.malformed"}),
        (one_chunk_repeated, {"duplicate.proof", "proofs.mismatch"}),
    ],
)
def test_proofs_of_other_chunks_are_rejected(forge: Any, reasons: set[str], long: Mine, honest: Trial) -> None:
    for each in honest.judged[:6]:
        lie = with_proofs(each.submission, forge([chunks(rollout) for rollout in each.submission.rollouts]))
        verdict = judged(long, each, lie)
        assert verdict.outcome is Outcome.REJECTED
        assert verdict.reason in reasons


def test_rollouts_that_begin_alike_may_share_the_proof_of_what_they_share(long: Mine, honest: Trial) -> None:
    """Two seeds that give the same tokens have the same proof: copying it is no cheat, and no `duplicate.proof`."""
    each = honest.judged[0]
    lease = each.lease.model_copy(update={"seeds": (each.lease.seeds[0],) * len(each.lease.seeds)})
    same = msgspec.structs.replace(each.submission, rollouts=[each.submission.rollouts[0]] * len(lease.seeds))
    verdict = verdict_on(long, docket(lease, same))
    assert (verdict.outcome, verdict.reason) == (Outcome.ACCEPTED, "")
